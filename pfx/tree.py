"""Pytrees with JAX's conventions on torch's registry.

torch.func flattens with `torch.utils._pytree`, where ``None`` is a leaf and a dict keeps its insertion
order, so two equal dicts can flatten differently. Here, as in JAX, ``None`` is an empty subtree and a
dict flattens by sorted key. This is the only file that touches torch's registry: a class registered
here is also seen by torch.func.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch.utils._pytree as _torch_pytree

from pfx.errors import TreeError

Path = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class TreeDef:
    """The structure of a pytree without its leaves; equal structures compare equal."""

    kind: Any = None  # None marks a leaf
    context: Any = None
    keys: tuple[str, ...] = ()
    children: tuple[TreeDef, ...] = ()

    @property
    def num_leaves(self) -> int:
        """How many leaves a tree of this structure has."""
        return 1 if self.kind is None else sum(child.num_leaves for child in self.children)


LEAF = TreeDef()
_NONE = type(None)


def _is_namedtuple(node: Any) -> bool:
    return isinstance(node, tuple) and hasattr(node, "_fields")


def _sorted_keys(node: dict) -> list:
    try:
        return sorted(node)
    except TypeError:  # keys of several types: any fixed order will do
        return sorted(node, key=lambda key: (type(key).__name__, repr(key)))


def _open(node: Any) -> tuple[Any, Any, list[str], list[Any]] | None:
    """Split a container into (kind, context, key strings, children); None for a leaf."""
    if node is None:
        return _NONE, None, [], []
    kind = type(node)
    if kind is dict:
        keys = _sorted_keys(node)
        return dict, tuple(keys), [f"[{key!r}]" for key in keys], [node[key] for key in keys]
    if kind is list or kind is tuple:
        return kind, None, [f"[{i}]" for i in range(len(node))], list(node)
    if _is_namedtuple(node):
        return kind, None, [f".{name}" for name in node._fields], list(node)
    entry = _torch_pytree.SUPPORTED_NODES.get(kind)
    if entry is None:
        return None
    children, context = entry.flatten_fn(node)
    children = list(children)
    names = _registered_names(node, entry)
    if len(names) != len(children):
        names = [f"[{i}]" for i in range(len(children))]
    return kind, context, names, children


def _registered_names(node: Any, entry: Any) -> list[str]:
    """The names of a registered node's children; none where it does not say.

    Of an OrderedDict or a defaultdict they are its keys: its order says nothing of what is what.
    """
    if dataclasses.is_dataclass(node):
        return [f".{field.name}" for field in dataclasses.fields(node)]
    if entry.flatten_with_keys_fn is None:
        return []
    return [_torch_pytree.keystr((key,)) for key, _ in entry.flatten_with_keys_fn(node)[0]]


def _close(treedef: TreeDef, children: list[Any]) -> Any:
    kind = treedef.kind
    if kind is _NONE:
        return None
    if kind is dict:
        return dict(zip(treedef.context, children, strict=True))
    if kind is list or kind is tuple:
        return kind(children)
    entry = _torch_pytree.SUPPORTED_NODES.get(kind)
    if entry is None:
        return kind(*children)  # a named tuple
    return entry.unflatten_fn(children, treedef.context)


def flatten_with_path(
    tree: Any, is_leaf: Callable[[Any], bool] | None = None
) -> tuple[list[tuple[Path, Any]], TreeDef]:
    """Return ``[(path, leaf), …]`` and the structure; dicts by sorted key, ``None`` has no leaf.

    >>> flatten_with_path({"b": [1, None], "a": 2})[0]
    [(("['a']",), 2), (("['b']", '[0]'), 1)]
    """
    pairs: list[tuple[Path, Any]] = []

    def walk(node: Any, path: Path) -> TreeDef:
        opened = None if is_leaf is not None and is_leaf(node) else _open(node)
        if opened is None:
            pairs.append((path, node))
            return LEAF
        kind, context, keys, children = opened
        defs = tuple(walk(c, (*path, k)) for k, c in zip(keys, children, strict=True))
        return TreeDef(kind, context, tuple(keys), defs)

    return pairs, walk(tree, ())


def flatten(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], TreeDef]:
    """Return the leaves of `tree` in a fixed order, and its structure.

    >>> flatten({"b": 1, "a": (2, 3)})[0]
    [2, 3, 1]
    """
    out: list[Any] = []

    def walk(node: Any) -> TreeDef:
        opened = None if is_leaf is not None and is_leaf(node) else _open(node)
        if opened is None:
            out.append(node)
            return LEAF
        kind, context, keys, children = opened
        return TreeDef(kind, context, tuple(keys), tuple([walk(c) for c in children]))

    treedef = walk(tree)
    return out, treedef


def unflatten(treedef: TreeDef, leaves: Iterable[Any]) -> Any:
    """Build the tree of structure `treedef` from its leaves; raises `TreeError` on a wrong count."""
    values = list(leaves)
    if len(values) != treedef.num_leaves:
        raise TreeError(f"unflatten needs {treedef.num_leaves} leaves, got {len(values)}")
    return _build(treedef, iter(values))


def _build(treedef: TreeDef, values: Iterator[Any]) -> Any:
    if treedef.kind is None:
        return next(values)
    return _close(treedef, [_build(child, values) for child in treedef.children])


def leaves(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[Any]:
    """Return the leaves of `tree`."""
    return flatten(tree, is_leaf)[0]


def structure(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> TreeDef:
    """Return the structure of `tree`."""
    return flatten(tree, is_leaf)[1]


def map(
    fn: Callable[..., Any], tree: Any, *rest: Any, is_leaf: Callable[[Any], bool] | None = None
) -> Any:
    """Apply `fn` leaf by leaf to one or more trees of the same structure.

    >>> map(lambda x, y: x + y, {"a": 1, "b": None}, {"a": 10, "b": None})
    {'a': 11, 'b': None}
    """
    return map_with_path(lambda _, *xs: fn(*xs), tree, *rest, is_leaf=is_leaf)


def map_with_path(
    fn: Callable[..., Any], tree: Any, *rest: Any, is_leaf: Callable[[Any], bool] | None = None
) -> Any:
    """Apply ``fn(path, leaf, *other_leaves)``; `path_string` makes a path readable."""
    pairs, treedef = flatten_with_path(tree, is_leaf)
    columns = [match(treedef, other, [p for p, _ in pairs]) for other in rest]
    return unflatten(
        treedef, [fn(*pair, *others) for pair, *others in zip(pairs, *columns, strict=True)]
    )


def match(treedef: TreeDef, other: Any, paths: list[Path]) -> list[Any]:
    """Flatten `other` exactly as deep as `treedef`: its subtrees below a leaf count as one leaf.

    `paths` are the paths of the leaves of `treedef`. Raises `TreeError` with the key path where
    the two structures part.
    """
    out: list[Any] = []

    def walk(definition: TreeDef, node: Any, path: Path) -> None:
        if definition.kind is None:
            out.append(node)
            return
        opened = _open(node)
        if opened is None or opened[0] is not definition.kind:
            raise TreeError(
                f"{path_string(path) or 'the tree'}: expected a {definition.kind.__name__} with "
                f"{len(definition.children)} entries, got {_describe(node)}"
            )
        keys, children = opened[2], opened[3]
        names = definition.keys or tuple(f"[{i}]" for i in range(len(definition.children)))
        if (definition.keys and tuple(keys) != definition.keys) or len(keys) != len(names):
            missing = [k for k in names if k not in keys]
            extra = [k for k in keys if k not in names]
            how = f"missing {missing}, extra {extra}" if missing or extra else "their order"
            raise TreeError(f"{path_string(path) or 'the tree'}: keys differ; {how}")
        for key, child_def, child in zip(keys, definition.children, children, strict=True):
            walk(child_def, child, (*path, key))

    walk(treedef, other, ())
    assert not paths or len(out) == len(paths)
    return out


def broadcast_prefix(
    prefix: Any, tree: Any, is_leaf: Callable[[Any], bool] | None = None
) -> list[Any]:
    """Repeat each leaf of `prefix` for every leaf of the matching subtree of `tree`.

    `is_leaf` marks the leaves of `prefix`. Raises `TreeError` with the key path of a mismatch.

    >>> broadcast_prefix({"a": 1, "b": 2}, {"a": [0, 0], "b": 0})
    [1, 1, 2]
    """
    out: list[Any] = []

    def walk(left: Any, right: Any, path: Path) -> None:
        opened = None if is_leaf is not None and is_leaf(left) else _open(left)
        if opened is None or opened[0] is _NONE:
            out.extend([left] * len(leaves(right)))
            return
        other = _open(right)
        kind, _, keys, children = opened
        if other is None or other[0] is not kind:
            raise TreeError(
                f"{path_string(path) or 'the tree'}: a {kind.__name__} where the value is "
                f"{_describe(right)}"
            )
        if keys != other[2]:
            missing = [k for k in other[2] if k not in keys]
            extra = [k for k in keys if k not in other[2]]
            raise TreeError(
                f"{path_string(path) or 'the tree'}: keys differ; missing {missing}, extra {extra}"
            )
        for key, lower, upper in zip(keys, children, other[3], strict=True):
            walk(lower, upper, (*path, key))

    walk(prefix, tree, ())
    return out


def path_string(path: Path, root: str = "") -> str:
    """Join a path into the text that errors show, e.g. ``params['blocks'].w``."""
    return root + "".join(path)


def _describe(node: Any) -> str:
    shape = getattr(node, "shape", None)
    name = type(node).__name__
    return f"a {name} of shape {tuple(shape)}" if shape is not None else f"a {name}"


def register_dataclass(cls: type) -> type:
    """Make a dataclass a pytree node whose fields are its children; usable as a decorator.

    >>> @register_dataclass
    ... @dataclasses.dataclass(frozen=True)
    ... class Pair:
    ...     left: int
    ...     right: int
    >>> map(lambda x: x + 1, Pair(1, 2))
    Pair(left=2, right=3)
    """
    names = tuple(field.name for field in dataclasses.fields(cls))
    _torch_pytree.register_pytree_node(
        cls,
        lambda node: ([getattr(node, name) for name in names], None),
        lambda children, _: cls(*children),
        serialized_type_name=f"{cls.__module__}.{cls.__qualname__}",
    )
    return cls

"""A sharding rule: which factors an op's dims are made of, in einops notation.

``"b m k, b k n -> b m n"`` names the factors of a batched product. A factor in operands and result
passes through; one only in operands is contracted and leaves a partial sum; one marked `whole` must
not be split. A dim may be composed of several factors, ``"(h d)"``, major first, as in a reshape.
Everything else in the compiler (propagation, partial sums, resharding, cost) is generic over factors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx

from pfx.errors import ShardingError, message
from pfx.mesh import Mesh, Rows
from pfx.spec import Axes, Layout

Dim = tuple[str, ...]
Dims = tuple[Dim, ...]
Assignment = dict[str, Axes]


@dataclass(frozen=True)
class Call:
    """What a device runs: an op on local tensors; fx nodes stand for the operands' local values.

    `offset` names the axes and the local size of a split dim whose global position the op needs; the
    runtime passes ``offset=index * size`` as a keyword.
    """

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    offset: tuple[tuple[Axes, int], ...] = ()


@dataclass(frozen=True)
class Rule:
    """The factors of one node's operands and results, and what may flow through it.

    Attributes:
        operands, results: for each tensor, the factors of each dim.
        sizes: the size of each factor.
        whole: factors that must not be split.
        placed: factors along which the local call asks for its global position (`Local.place`).
        reduce: how a contracted factor leaves its partial result; "sum" if not named.
        linear: groups of operands; a partial sum flows through when exactly one group is partial.
        localize: how the local call differs from the global one, if it does.
        free: any device can compute any part without operands; `zero`: and all of it is zeros.
    """

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    sizes: Mapping[str, int]
    whole: frozenset[str] = frozenset()
    reduce: Mapping[str, str] = field(default_factory=dict)
    linear: tuple[tuple[int, ...], ...] = ()
    localize: Callable[[Local], Call] | None = None
    free: bool = False
    zero: bool = False
    placed: frozenset[str] = frozenset()

    def local_size(self, factor: str, assignment: Assignment, mesh: Mesh) -> int:
        """The size of a factor on one device."""
        axes = assignment.get(factor, ())
        return mesh.extent(axes, self.sizes[factor]) if axes else self.sizes[factor]

    def layout(self, dims: Dims, assignment: Assignment, partial: Axes = ()) -> Layout:
        """The layout of a tensor with these dims under an assignment of axes to factors."""
        axes = tuple(tuple(a for f in dim for a in assignment.get(f, ())) for dim in dims)
        return Layout(axes, partial)

    def representable(self, dim: Dim, assignment: Assignment, mesh: Mesh) -> bool:
        """Tell whether the parts are contiguous blocks: a minor factor splits only after the majors."""
        if mesh.deals and not self._even(dim, assignment, mesh):
            return False
        open_major = False
        for f in dim:
            if assignment.get(f) and open_major:
                return False
            open_major |= self.local_size(f, assignment, mesh) > 1
        return True

    def _even(self, dim: Dim, assignment: Assignment, mesh: Mesh) -> bool:
        """Tell whether a dim of several factors is split in equal blocks in order, as each of them is."""
        axes = tuple(a for f in dim for a in assignment.get(f, ()))
        several = sum(self.sizes[f] > 1 for f in dim) > 1
        size = math.prod(self.sizes[f] for f in dim)
        return not several or (
            mesh.even(axes, size)
            and all(mesh.even(assignment.get(f, ()), self.sizes[f]) for f in dim)
        )


@dataclass(frozen=True)
class Local:
    """What `Rule.localize` sees: the node, its rule, and the axes given to each factor."""

    node: torch.fx.Node
    rule: Rule
    assignment: Assignment
    mesh: Mesh

    def result_shape(self, index: int = 0) -> list[int]:
        """The local shape of a result."""
        return self.shape(self.rule.results[index])

    def shape(self, dims: Dims) -> list[int]:
        """The local shape of a tensor with these factors."""
        size = self.rule.local_size
        return [math.prod(size(f, self.assignment, self.mesh) for f in dim) for dim in dims]

    def place(self, factor: str) -> tuple[Axes, int]:
        """The axes and local size of a factor, for `Call.offset`."""
        axes = self.assignment.get(factor, ())
        assert self.mesh.even(axes, self.rule.sizes[factor]), f"{self.node}: {factor} is dealt"
        return axes, self.rule.local_size(factor, self.assignment, self.mesh)

    def rows(self, factor: str) -> Rows | None:
        """The rows of each device along a factor that an axis deals; None for any other."""
        axes, size = self.assignment.get(factor, ()), self.rule.sizes[factor]
        axis = self.mesh.dealt(axes, size)
        return None if axis is None else self.mesh.rows(axis, size)

    def split(self, factor: str) -> bool:
        """Tell whether a factor is split over any axis."""
        return bool(self.assignment.get(factor))


def operand_nodes(node: torch.fx.Node) -> list[torch.fx.Node]:
    """The tensor operands of a node in order of appearance, repeats included."""
    found: list[torch.fx.Node] = []

    def walk(arg: Any) -> None:
        if isinstance(arg, torch.fx.Node):
            found.append(arg)
        elif isinstance(arg, (list, tuple)):
            for item in arg:
                walk(item)
        elif isinstance(arg, dict):
            for item in arg.values():
                walk(item)

    walk(node.args)
    walk(node.kwargs)
    return found


def substituted(arg: Any, values: dict[torch.fx.Node, list[Any]]) -> Any:
    """Put values for nodes; one that is an operand twice (x @ x) may be needed in two layouts."""
    if isinstance(arg, torch.fx.Node):
        return values[arg].pop(0) if len(values[arg]) > 1 else values[arg][0]
    if isinstance(arg, (list, tuple)):
        return type(arg)(substituted(item, values) for item in arg)
    if isinstance(arg, dict):
        return {key: substituted(item, values) for key, item in arg.items()}
    return arg


def result_values(node: torch.fx.Node) -> list[Any]:
    """The fake results of a node as a list; None where an op returns no tensor there."""
    value = node.meta.get("val")
    if isinstance(value, (list, tuple)):
        return list(value)
    return [value]


def shape_of(node: torch.fx.Node) -> tuple[int, ...]:
    """The global shape of a node's (single) value."""
    return tuple(node.meta["val"].shape)


def argument(node: torch.fx.Node, name: str) -> Any:
    """An op's argument by its schema name, given or default; None if the op has none so named."""
    for i, declared in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if declared.name == name:
            given = node.args[i] if i < len(node.args) else None
            return given if i < len(node.args) else node.kwargs.get(name, declared.default_value)
    return None


def named(prefix: str, n: int) -> Dims:
    """`n` dims of one factor each: ``a0 a1 a2``."""
    return tuple((f"{prefix}{i}",) for i in range(n))


def bind_sizes(dims: Sequence[Dims], shapes: Sequence[Sequence[int]]) -> dict[str, int]:
    """Read the sizes of single-factor dims off the shapes."""
    sizes: dict[str, int] = {}
    for tensor_dims, shape in zip(dims, shapes, strict=True):
        for dim, size in zip(tensor_dims, shape, strict=True):
            if len(dim) == 1:
                assert sizes.setdefault(dim[0], size) == size, (dims, shapes)
    return sizes


def parse(text: str) -> Dims:
    """Read the dims of one tensor: ``"b (h d) 1"``.

    >>> parse("b (h d) 1")
    (('b',), ('h', 'd'), ())
    """
    return tuple(_groups(text.replace("(", " ( ").replace(")", " ) ").split()))


def _groups(tokens: Sequence[str]) -> Iterator[Dim]:
    group: list[str] | None = None
    for token in tokens:
        if token == "(":
            group = []
        elif token == ")":
            assert group is not None
            yield tuple(group)
            group = None
        elif group is not None:
            group.append(token)
        else:
            yield () if token == "1" else (token,)


def pattern_rule(node: torch.fx.Node, pattern: str, whole: str = "", **more: Any) -> Rule:
    """Make the rule of a node from an einops-like pattern whose sizes are read off its shapes.

    ``...`` stands for leading dims, broadcast against each other. Composite dims in the pattern need
    each of their factors alone in another dim. ``whole="*"``: only the dims under ``...`` may split.

    Raises:
        ShardingError: when the pattern does not fit the node's operands and results.
    """
    left, right = pattern.split("->")
    texts = [*(left.split(",") if left.strip() else ()), *right.split(",")]
    operands, values = operand_nodes(node), result_values(node)
    shapes = [shape_of(n) for n in operands] + [tuple(getattr(v, "shape", ())) for v in values]
    count = len(operands)
    if len(left.split(",") if left.strip() else ()) != count or len(texts) != len(shapes):
        raise _misfit(node, pattern, f"the op has {count} operands and {len(values)} results.")
    marks = [f"@{k}" if whole == "*" else "" for k in range(len(texts))]
    dims = _leading([_marked(parse(t), m) for t, m in zip(texts, marks, strict=True)], shapes)
    sizes: dict[str, int] = {}
    for text, tensor, shape in zip(texts, dims, shapes, strict=True):
        if len(tensor) != len(shape):
            raise _misfit(node, pattern, f'"{text.strip()}" does not name the dims of {shape}.')
        for dim, size in zip(tensor, shape, strict=True):
            if len(dim) == 1 and sizes.setdefault(dim[0], size) != size:
                raise _misfit(
                    node, pattern, f"{dim[0]!r} has the sizes {sizes[dim[0]]} and {size}."
                )
    kept = {f for f in sizes if "@" in f} if whole == "*" else set(whole.split())
    return Rule(tuple(dims[:count]), tuple(dims[count:]), sizes, frozenset(kept), **more)


def _misfit(node: torch.fx.Node, pattern: str, why: str) -> ShardingError:
    return ShardingError(
        message(
            f"the rule of {node.target}:",
            f'"{pattern}" does not fit a call of this op.',
            why,
            fix="name every dim of every tensor operand, in order of appearance, and of every result",
        )
    )


def _marked(dims: Dims, mark: str) -> Dims:
    return tuple(d if d == ("...",) else tuple(f + mark for f in d) for d in dims)


def _leading(tensors: Sequence[Dims], shapes: Sequence[Sequence[int]]) -> list[Dims]:
    """Replace ``...`` by the factors ``0 1 …`` of the leading dims, aligned at the right."""
    lead = [
        tuple(shape[: len(shape) - len(dims) + 1]) if ("...",) in dims else ()
        for dims, shape in zip(tensors, shapes, strict=True)
    ]
    full = torch.broadcast_shapes(*lead)
    out = []
    for dims, own in zip(tensors, lead, strict=True):
        skip = len(full) - len(own)
        batch = tuple(
            () if n == 1 and full[skip + i] != 1 else (str(skip + i),) for i, n in enumerate(own)
        )
        out.append((*batch, *(d for d in dims if d != ("...",))))
    return out


def replicated_rule(node: torch.fx.Node) -> Rule:
    """The safe default: every operand whole, computed the same on every device."""
    operands = tuple(named(f"i{k}_", len(shape_of(n))) for k, n in enumerate(operand_nodes(node)))
    shapes = [shape_of(n) for n in operand_nodes(node)]
    values = result_values(node)
    results = tuple(
        named(f"o{k}_", v.ndim) if isinstance(v, torch.Tensor) else () for k, v in enumerate(values)
    )
    out_shapes = [tuple(v.shape) if isinstance(v, torch.Tensor) else () for v in values]
    sizes = bind_sizes([*operands, *results], [*shapes, *out_shapes])
    return Rule(operands, results, sizes, frozenset(sizes))

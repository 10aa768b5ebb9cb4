"""Rewrite a traced graph so that no op writes: a change in place becomes a new value.

The trace records ``add_`` as a node, and what is read later may be that node, the tensor it changed, or
any view of that tensor, taken before or after. So every tensor of the graph is followed to its base
and the views that lead there. A change is computed by the op that writes nothing, put back through the
views into a new value of the base, and views of the base are taken again when they are next read.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx
from torch.fx import Node

from pfx import _torch
from pfx._torch import GraphModule, Traced
from pfx.errors import TraceError, message
from pfx.lax.ops.pure_form import PureForm, arguments, is_op, pure_form, writes
from pfx.lax.ops.views import Emit, View, is_view, may_overlap, memory_order

aten = torch.ops.aten


def functionalize(traced: Traced, where: str, names: Sequence[str] = ()) -> torch.fx.GraphModule:
    """Return the module of a trace without in-place ops; the module itself if it has none.

    Args:
        traced: the trace; it is left as it is.
        where: what errors call the traced function, e.g. ``jit(step)``.
        names: what errors call its inputs.

    Raises:
        TraceError: when an input, a closed-over tensor or a tensor that overlaps itself is changed,
            or when an op that writes has no form that does not.

    >>> traced = _torch.trace(lambda x: [x.clone().add_(1)], [torch.ones(2)])
    >>> [node.name for node in functionalize(traced, "f").graph.nodes]
    ['arg0_1', 'clone', 'add_tensor', 'output']
    """
    if not any(writes(node.target, node.args, node.kwargs) for node in traced.graph.nodes):
        return traced.module
    return _Functionalizer(traced, where, names).run()


@dataclass(eq=False)
class _Tensor:
    """A tensor of the traced graph: a base, or a view of another one, and its value for now."""

    form: Any  # the fake tensor: shape, dtype, strides
    origin: Node  # the traced node that made it
    value: Node | None = None  # of the new graph; None until it is read
    parent: _Tensor | None = None
    view: View | None = None
    version: int = 0  # a base counts its changes; a view notes how many its value has seen
    views: list[_Tensor] = field(default_factory=list)  # those taken of it, each once

    def seen_through(self, view: View, form: Any, origin: Node) -> _Tensor:
        """The view of this tensor; the same one if it was taken before, as ``x[1] += 1`` does."""
        for known in self.views:
            if known.view == view:
                return known
        self.views.append(_Tensor(form, origin, None, self, view))
        return self.views[-1]

    @property
    def chain(self) -> Iterator[_Tensor]:
        """This tensor, what it is a view of, …, the base."""
        link: _Tensor | None = self
        while link is not None:
            yield link
            link = link.parent

    @property
    def base(self) -> _Tensor:
        """The tensor whose memory this one shares."""
        *_, base = self.chain
        return base


class _Functionalizer:
    """The state of one rewrite: the new graph, and what stands for each node of the old one."""

    def __init__(self, traced: Traced, where: str, names: Sequence[str]) -> None:
        self.traced, self.where, self.names = traced, where, names
        self.graph = torch.fx.Graph()
        # A tensor; a list of them; or the new node, for a tuple. None: the node has no result.
        self.env: dict[Node, Any] = {}
        self.mode = traced.fake_mode
        self.places = [node for node in traced.graph.nodes if node.op == "placeholder"]

    def run(self) -> torch.fx.GraphModule:
        """Copy the graph node by node."""
        for node in self.traced.graph.nodes:
            if node.op == "output":
                self.graph.output(self.read(node.args[0]))
            else:
                self.env[node] = self.copy(node)
        _erase_dead(self.graph)
        return GraphModule(self.traced.module, self.graph)

    def copy(self, node: Node) -> Any:
        """Return what stands for `node`."""
        target: Any = node.target
        if is_op(target) and torch.Tag.inplace_view in target.tags:
            return self.view_in_place(node)
        if node.op == "call_function" and writes(target, node.args, node.kwargs):
            return self.write(node)
        if target is operator.getitem:
            found, i = self.env[node.args[0]], node.args[1]  # type: ignore[index]
            if isinstance(found, list):
                return found[i]  # type: ignore[index]
            if isinstance(found, _Tensor):  # one of the views that a split takes
                return self.view(node.args[0], node, i)  # type: ignore[arg-type]
        elif is_view(target):
            return self.view(node, node)
        new = self.graph.node_copy(node, lambda n: self.current(self.env[n]))
        if target is aten._unsafe_view.default:
            new.target = aten.reshape.default  # the strides that it relied on may be others now
        form = node.meta.get("val")
        return _Tensor(form, node, new) if isinstance(form, torch.Tensor) else new

    # Reading

    def read(self, args: Any) -> Any:
        """Put the values of now in the place of the traced nodes."""
        return torch.fx.map_arg(args, lambda n: self.current(self.env[n]))

    def current(self, entry: Any) -> Node:
        """The value of a tensor now; a view of a base that was changed is taken again."""
        if not isinstance(entry, _Tensor):
            return entry
        if entry.parent is not None and entry.view is not None:
            if entry.value is None or entry.version != entry.base.version:
                known = entry.form if entry.view.is_one_op else None
                base = self.current(entry.parent)
                entry.value = entry.view.take(self.emitter(entry.origin, known), base)
                entry.version = entry.base.version
        assert entry.value is not None
        return entry.value

    def emitter(self, origin: Node, known: Any = None) -> Emit:
        """Return what adds a node, of a known form or not, in the name of a traced one."""

        def emit(op: Any, *args: Any, **kwargs: Any) -> Node:
            node = self.graph.call_function(op, args, kwargs)
            form = known
            if form is None:
                forms = torch.fx.map_arg((args, kwargs), lambda n: n.meta["val"])
                form = _torch.fake_call(op, *forms, self.mode)
            node.meta = {**origin.meta, "val": form}
            return node

        return emit

    # Views

    def view(self, node: Node, origin: Node, item: Any = None) -> _Tensor:
        """Note a view; its node is made when it is read."""
        parent, form = self.env[node.args[0]], origin.meta["val"]  # type: ignore[index]
        if node.target is aten.as_strided.default:
            return self.strided(node, parent.base)
        view = View(node.target, tuple(node.args[1:]), tuple(node.kwargs.items()), item)
        return parent.seen_through(view, form, origin)

    def strided(self, node: Node, base: _Tensor) -> _Tensor:
        """A view by strides looks at the memory of its base: at a flat view of it, by positions."""
        form, order = node.meta["val"], memory_order(base.form)
        if order is None:
            raise self.error(node, "reads memory around its tensor.", fix="use slices or unfold")
        line = base
        for op, arg in ((aten.permute.default, order), (aten.reshape.default, [base.form.numel()])):
            flat = _torch.fake_call(op, (line.form, arg), {}, self.mode)
            line = line.seen_through(View(op, (arg,)), flat, node)
        args = (tuple(form.shape), form.stride(), form.storage_offset())
        return line.seen_through(View(aten.as_strided.default, args), form, node)

    def view_in_place(self, node: Node) -> _Tensor:
        """``t_``, ``squeeze_``, …: the tensor itself becomes a view of what it was."""
        pure = pure_form(node.target)
        if pure is None or not is_view(pure.op) or pure.op is aten.as_strided.default:
            raise self.error(node, "changes the size or the storage of a tensor in place.",
                             fix="reshape it, or make a new tensor")  # fmt: skip
        old: _Tensor = self.env[node.args[0]]  # type: ignore[index]
        self.check_owner(node, old)
        view = View(pure.op, tuple(node.args[1:]), tuple(node.kwargs.items()))
        return old.seen_through(view, node.meta["val"], node)

    # Writing

    def write(self, node: Node) -> Any:
        """Compute what an op would write, write it, and return its results."""
        pure = pure_form(node.target)
        if pure is None:
            raise self.error(node, "writes into its operands and has no form that does not.",
                             fix="use an op that returns a new tensor")  # fmt: skip
        given = arguments(node.target, node.args, node.kwargs)
        written = {name: self.tensors(given.get(name)) for name in pure.written}
        for tensor in (tensor for group in written.values() for tensor in group):
            self.check(node, tensor)
        values = self.computed(node, pure, written)
        for group, new in zip(written.values(), values[pure.num_fresh :], strict=True):
            for tensor, value in zip(group, new, strict=True):
                self.assign(node, tensor, value)
        return self.results(node, written, [new for (new,) in values[: pure.num_fresh]])

    def tensors(self, arg: Any) -> list[_Tensor]:
        """The tensors of an operand: of a node, of a list of nodes, of None."""
        nodes = arg if isinstance(arg, (list, tuple)) else [] if arg is None else [arg]
        return [self.env[node] for node in nodes]

    def computed(self, node: Node, pure: PureForm, written: dict[str, list[_Tensor]]) -> list[Any]:
        """The results of the pure op, each a list of nodes."""
        emit = self.emitter(node)
        special = _SPECIAL.get(node.target)
        if special is not None:
            (target,) = written["self"]
            return [[special(emit, target.form, *self.read(node.args[1:]))]]
        kwargs = {k: self.read(v) for k, v in node.kwargs.items() if k not in pure.written}
        kwargs = _defaults(node, pure) | kwargs
        if pure.options:
            form = next(tensor.form for group in written.values() for tensor in group)
            kwargs |= {"dtype": form.dtype, "device": form.device}
        out = emit(pure.op, *self.read(node.args), **kwargs)
        value = out.meta["val"]
        if isinstance(value, torch.Tensor):
            return [[out]]
        items = [emit(operator.getitem, out, i) for i in range(len(value))]
        if len(pure.op._schema.returns) == 1:
            return [items]
        return [
            [emit(operator.getitem, item, i) for i in range(len(v))]
            if isinstance(v, (list, tuple))
            else [item]
            for item, v in zip(items, value, strict=True)
        ]

    def assign(self, node: Node, tensor: _Tensor, value: Node) -> None:
        """Make `value` the value of a tensor, and carry it back to the base."""
        emit = self.emitter(node)
        resized = tensor.parent is None and tensor.form.numel() == 0  # ``out=torch.empty(0)``
        value = value if resized else _fitted(emit, tensor.form, value)
        if value is tensor.value and tensor.version == tensor.base.version:
            return
        fresh = [(tensor, value)]
        for link in tensor.chain:
            if link.parent is not None and link.view is not None:
                parent = link.parent
                value = link.view.put(
                    emit, lambda parent=parent: self.current(parent), parent.form, value
                )
                fresh.append((parent, value))
        tensor.base.version += 1
        for link, value in fresh:
            link.value, link.version = value, tensor.base.version

    def results(self, node: Node, written: dict[str, list[_Tensor]], fresh: list[Node]) -> Any:
        """What the node returned: tensors it wrote, and new ones."""
        schema = node.target._schema  # type: ignore[union-attr]
        aliases = {
            frozenset(a.alias_info.before_set): a.name for a in schema.arguments if a.alias_info
        }
        new, out = iter(fresh), []
        for i, returned in enumerate(schema.returns):
            if returned.alias_info is None:
                form = node.meta["val"] if len(schema.returns) == 1 else node.meta["val"][i]
                out.append(_Tensor(form, node, next(new)))
            else:
                out += written[aliases[frozenset(returned.alias_info.before_set)]]
        return out[0] if len(out) == 1 else out

    # Refusing

    def check(self, node: Node, tensor: _Tensor) -> None:
        """Raise unless a tensor may be changed and the change can be carried to its base."""
        self.check_owner(node, tensor)
        for link in tensor.chain:
            form = link.form
            if link.origin.target is aten._new_zeros_with_same_feature_meta.default:
                continue  # forward mode's own memory for a tangent, laid out like zeros that have none
            if may_overlap(form, strict=link.view is not None and link.view.is_strided):
                raise self.error(
                    node,
                    "changes a tensor that overlaps itself.",
                    f"shape {tuple(form.shape)}, strides {tuple(form.stride())}: "
                    "several elements share one place in memory.",
                    fix="change a copy: .clone() first",
                )
            if link.view is not None and link.view.inverse is None:
                raise self.error(node, f"changes a tensor through its {link.view.name}.",
                                 "a change cannot be carried back through that view.",
                                 fix="change a copy: .clone() first")  # fmt: skip

    def check_owner(self, node: Node, tensor: _Tensor) -> None:
        """Raise if the memory of a tensor is not the traced function's own."""
        origin = tensor.base.origin
        if origin.op not in ("placeholder", "get_attr"):
            return
        plain = _op_name(node).rstrip("_")
        raise self.error(
            node,
            f"changes {self.owner(origin)} in place.",
            "a step must be a pure function of its arguments.",
            fix=f"change a copy (.clone() first) or use the out-of-place form ({plain}), "
            "and return the new value",
        )

    def owner(self, origin: Node) -> str:
        if origin.op == "get_attr":
            return "a constant"
        place = self.places.index(origin)
        if place >= self.traced.num_inputs:
            return "a tensor that the function closed over"
        return f"the input {self.names[place]}" if place < len(self.names) else "an input"

    def error(self, node: Node, what: str, *details: str, fix: str) -> TraceError:
        source = node.meta.get("source")
        line = f" at {source}" if source else ""
        return TraceError(message(f"{self.where}: {_op_name(node)}{line}", what, *details, fix=fix))


def _op_name(node: Node) -> str:
    return str(node.target.overloadpacket).removeprefix("aten.")  # type: ignore[union-attr]


def _defaults(node: Node, pure: PureForm) -> dict[str, Any]:
    """The defaults of an op that its pure form has not."""
    schema = node.target._schema  # type: ignore[union-attr]
    given = arguments(node.target, node.args, node.kwargs)
    needed = {a.name for a in pure.op._schema.arguments if not a.has_default_value()}
    return {
        a.name: a.default_value
        for a in schema.arguments
        if a.name in needed and a.name not in given and a.has_default_value()
    }


def _fitted(emit: Emit, form: torch.Tensor, value: Node) -> Node:
    """Convert and broadcast a value to the form of what it is written into."""
    have = value.meta["val"]
    options: dict[str, Any] = {}
    if have.dtype != form.dtype:
        options["dtype"] = form.dtype
    if have.device != form.device:
        options["device"] = form.device
    if options:
        value = emit(aten._to_copy.default, value, **options)
    if have.shape != form.shape:
        value = emit(aten.expand.default, value, list(form.shape))
    return value


def _filled(emit: Emit, form: torch.Tensor, number: Any = 0) -> Node:
    return emit(aten.full.default, list(form.shape), number, dtype=form.dtype, device=form.device)


# Ops that do not read what they write over; the rest is told by the name of the op.
_SPECIAL: dict[Any, Callable[..., Node]] = {
    aten.copy_.default: lambda emit, form, source, *_: _fitted(emit, form, source),
    aten.fill_.Tensor: lambda emit, form, source: _fitted(emit, form, source),
    aten.fill_.Scalar: _filled,
    aten.zero_.default: _filled,
}


def _erase_dead(graph: torch.fx.Graph) -> None:
    """Erase the ops nobody reads, but for a random one (to be refused) and one with no result."""
    for node in reversed(list(graph.nodes)):
        target: Any = node.target
        pure = target is operator.getitem or (
            is_op(target)
            and bool(target._schema.returns)
            and torch.Tag.nondeterministic_seeded not in target.tags
        )
        if pure and not node.users:
            graph.erase_node(node)

"""What a value in a manual region is along each mesh axis, and what ops make of it.

Along an axis a value is one of four things, as in jax.shard_map. *Varying*: each device has its own.
*Invarying*: all have the same. *Unreduced*: each holds an addend, and the value is their sum.
*Reduced*: all have the same, and its cotangent is still unreduced. A cotangent's variance follows
from the primal's: varying and invarying are their own duals, reduced and unreduced each other's.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from pfx.errors import ShardingError, message, user_line
from pfx.lax.manual.linearity import Linear, asks_form, leaves, linear_in, loses_numbers, op_name
from pfx.lax.ops.pure_form import arguments, is_op
from pfx.lax.ops.views import is_view

STATES = ("varying", "invarying", "unreduced", "reduced")


@dataclass(frozen=True)
class Variance:
    """The axes along which a value is not simply invarying."""

    varying: frozenset[str] = frozenset()
    unreduced: frozenset[str] = frozenset()
    reduced: frozenset[str] = frozenset()

    @property
    def axes(self) -> frozenset[str]:
        """The axes along which the devices' tensors differ."""
        return self.varying | self.unreduced

    @property
    def all_axes(self) -> frozenset[str]:
        """Every axis along which a value is not simply invarying."""
        return self.varying | self.unreduced | self.reduced

    @property
    def dual(self) -> Variance:
        """The variance of a cotangent."""
        return Variance(self.varying, self.reduced, self.unreduced)

    def state(self, axis: str) -> str:
        """What a value is along one axis.

        >>> Variance(varying=frozenset({"dp"})).state("tp")
        'invarying'
        """
        return next((s for s in STATES if s != "invarying" and axis in getattr(self, s)), STATES[1])

    def having(self, axes: Iterable[str], state: str) -> Variance:
        """The same but along `axes`, where it is now in `state`."""
        axes = frozenset(axes)
        rest = {s: getattr(self, s) - axes for s in STATES if s != "invarying"}
        if state != "invarying":
            rest[state] |= axes
        return Variance(**rest)

    def __str__(self) -> str:
        known = [(s, sorted(getattr(self, s))) for s in STATES if s != "invarying"]
        return ", ".join(f"{s} over {', '.join(axes)}" for s, axes in known if axes) or "invarying"


INVARYING = Variance()


def misplaced(wanted: Variance, found: Variance) -> tuple[str, str]:
    """What is wrong with the variance of a cotangent, and what mends it; two empty texts if nothing is.

    One that is the same on all devices is also a varying one.
    """
    for axis in sorted(wanted.all_axes | found.all_axes):
        want, got = wanted.state(axis), found.state(axis)
        if got != want and (want, got) != ("varying", "invarying"):
            what = f"gets a cotangent that is {got} over {axis!r} and must be {want}."
            cast = f"ct = pfx.lax.pcast(ct, {axis!r}, to={want!r})"
            return what, f"ct = pfx.lax.psum(ct, {axis!r})" if want == "invarying" else cast
    return "", ""


def joined(a: Variance, b: Variance) -> Variance:
    """What a value that is now the one and now the other is, as the carry of a loop.

    Raises:
        ShardingError: where it is addends in one of them alone.
    """
    for axis in sorted(a.unreduced ^ b.unreduced):
        states = (a.state(axis), b.state(axis))
        raise ShardingError(
            message(
                f"the carry of a loop at {user_line()}:",
                f"is {states[0]} over {axis!r} at first, and {states[1]} after a step.",
                fix=f"begin with one device's share: pfx.lax.pcast(x, {axis!r}, "
                'to="varying"), and of that to="unreduced"',
            )
        )
    varying = a.varying | b.varying
    return Variance(varying, a.unreduced, (a.reduced | b.reduced) - varying)


def result_variance(
    op: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    variance_of_leaf: Callable[[Any], Variance | None],
    *,
    is_zero: Callable[[Any], bool],
    line: str = "",
) -> Variance:
    """The variance of what an op makes of its operands.

    Args:
        args: positional arguments of the op; what stands for tensors among them are its operands.
        variance_of_leaf: what an operand is; None for one that is not to count, and for a number.
        is_zero: tells an operand that is zero whatever it is along the axes, as an addend may be.
        line: of the user's, where it is called.

    Raises:
        ShardingError: for an op that is not linear in an unreduced operand, and for addends beside
            values that are not, since ``f(a) + f(b)`` would not be ``f(a + b)``.
    """
    operands = leaves([*args, *kwargs.values()])
    found = [v for x in operands if (v := variance_of_leaf(x)) is not None]
    varying = frozenset().union(*(v.varying for v in found))
    if not any(v.unreduced or v.reduced for v in found) or asks_form(op):
        return Variance(varying)
    reduced = [variance_of_leaf(x) for x in operands if _can_have_cotangent(x)]
    unreduced = frozenset().union(*(v.unreduced for v in found))
    if unreduced:
        unreduced = _unreduced(op, args, kwargs, variance_of_leaf, is_zero, line)
    copies = frozenset().union(*(v.reduced for v in reduced if v is not None))
    return Variance(varying, unreduced, copies - unreduced - varying)


def _can_have_cotangent(leaf: Any) -> bool:
    """Tell whether it makes a difference that a value is reduced: not of a mask or an index."""
    dtype = dtype_of(leaf)
    return dtype is None or dtype.is_floating_point or dtype.is_complex


def dtype_of(leaf: Any) -> torch.dtype | None:
    """The dtype of an operand, a tensor or what stands for one; None for any other argument."""
    value = leaf.meta.get("val") if isinstance(leaf, torch.fx.Node) else leaf
    return value.dtype if isinstance(value, torch.Tensor) else None


def _unreduced(
    op: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    variance_of_leaf: Callable[[Any], Variance | None],
    is_zero: Callable[[Any], bool],
    line: str,
) -> frozenset[str]:
    """The axes along which a result holds addends, where some operand does."""
    linear = linear_in(op, args, kwargs)
    if is_op(op):
        named = arguments(op, args, kwargs)
    else:
        named = {str(i): value for i, value in enumerate(args)} | dict(kwargs)
    unread = linear.unread if linear else ()
    operands = [
        (name, leaf, variance)
        for name, value in named.items()
        for leaf in leaves(value)
        if (variance := variance_of_leaf(leaf)) is not None and name not in unread
    ]
    axes = frozenset().union(*(v.unreduced for _, _, v in operands))
    for axis in sorted(axes):
        along = [(name, leaf, v.state(axis)) for name, leaf, v in operands]
        if linear is None:
            what = "is not linear in an operand that is"
        elif loses_numbers(named, linear, dtype_of):
            what = "rounds an operand that is"
        else:
            what = _mismatch(linear, along, named, is_zero)
        if what:
            states = [f"{name} is {state}" for name, _, state in along]
            raise _not_linear(op, axis, what, states, line or user_line())
    return axes


def _mismatch(
    linear: Linear,
    along: Sequence[tuple[Any, Any, str]],
    named: Mapping[Any, Any],
    is_zero: Callable[[Any], bool],
) -> str:
    """What is wrong with the operands of a linear op along an axis; nothing if they fit."""
    for name, leaf, state in along:
        if state == "varying":
            return "has one that is varying beside one that is"
        if name in linear.together and state != "unreduced" and not is_zero(leaf):
            return "adds a value that all devices have to one that is"
        elsewhere = name not in (*linear.together, *linear.one_of, *linear.form)
        if elsewhere and state == "unreduced":
            return f"is not linear in {name!r}, which is"
    for name in linear.together:
        if any(_number(leaf) for leaf in leaves(named.get(name))):
            return "adds a number, on every device, to an operand that is"
    factors = [state for name, _, state in along if name in linear.one_of]
    if factors and factors.count("unreduced") != 1:
        return "multiplies several or none of the operands that are"
    return ""


def _number(leaf: Any) -> bool:
    return isinstance(leaf, (int, float, complex)) and leaf != 0


def _not_linear(op: Any, axis: str, what: str, states: Sequence[str], line: str) -> ShardingError:
    psum = f"pfx.lax.psum(x, {axis!r})"
    later = f"add after {psum}; on one device alone, where pfx.lax.axis_index({axis!r}) == 0"
    return ShardingError(  # no TypeError: Python would take that for an operator that is not there
        message(
            f"{op_name(op)} at {line}:",
            f"{what} unreduced over {axis!r}.",
            f"operands along {axis!r}: {', '.join(states)}.",
            "devices hold addends there, and only sums and linear ops of them mean anything.",
            fix=later if what.startswith("adds") else f"x = {psum} first, or pfx.lax.psum_scatter",
        )
    )


def node_variance(node: torch.fx.Node) -> Any:
    """The variance of the value of a node (of each result, where it has several), remembered there."""
    todo = [node]
    while todo:
        now = todo[-1]
        if now.meta.get("variance") is not None:
            todo.pop()
            continue
        missing = [n for n in now.all_input_nodes if n.meta.get("variance") is None]
        if missing:
            todo.extend(missing)
            continue
        now.meta["variance"] = _inferred(now)
        todo.pop()
    return node.meta["variance"]


def _inferred(node: torch.fx.Node) -> Any:
    if node.op in ("placeholder", "get_attr"):
        return INVARYING
    found = [n.meta["variance"] for n in node.all_input_nodes]
    if node.target is operator.getitem:
        (whole,) = found
        return whole[node.args[1]] if isinstance(whole, tuple) else whole  # type: ignore[index]
    typed = getattr(node.target, "result_variances", None)
    if typed is not None:
        results = typed([n.meta["variance"] for n in node.args])  # type: ignore[union-attr]
        return results[0] if isinstance(node.meta.get("val"), torch.Tensor) else results
    line = node.meta.get("source") or "an unknown line"
    return result_variance(
        node.target, node.args, node.kwargs, _of_node, is_zero=_is_zero_node, line=line
    )


def _of_node(leaf: Any) -> Variance | None:
    return leaf.meta["variance"] if isinstance(leaf, torch.fx.Node) else None


_ZEROS = frozenset({"zeros", "zeros_like", "new_zeros", "zero", "_efficientzerotensor"})
_FILLED = {"full": 1, "full_like": 1, "new_full": 2, "fill": 1, "scalar_tensor": 0}
_FORWARD = frozenset({"clone", "_to_copy", "lift_fresh", "lift_fresh_copy", "reshape", "neg"})


def _is_zero_node(leaf: Any) -> bool:
    """Tell a value that a graph makes of zeros."""
    while isinstance(leaf, torch.fx.Node):
        if leaf.op == "get_attr":
            value = getattr(leaf.graph.owning_module, str(leaf.target), None)
            return isinstance(value, torch.Tensor) and not value.ndim and not value.item()
        name = op_name(leaf.target) if is_op(leaf.target) else ""
        if name in _ZEROS:
            return True
        if name in _FILLED:
            given = [*leaf.args, *leaf.kwargs.values()][_FILLED[name] :]
            return bool(given) and isinstance(given[0], (int, float)) and given[0] == 0
        if not is_view(leaf.target) and name not in _FORWARD:
            return False
        leaf = leaf.args[0]
    return False

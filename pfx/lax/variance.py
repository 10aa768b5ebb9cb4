"""What a value in a manual region is along each mesh axis, and what ops make of it.

Along an axis a value is one of four things, as in jax.shard_map. *Varying*: each device has its own.
*Invarying*: all have the same. *Unreduced*: each holds an addend, and the value is their sum.
*Reduced*: all have the same, and its cotangent is still unreduced. A cotangent's variance follows
from the primal's: varying and invarying are their own duals, reduced and unreduced each other's.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from pfx._torch import OpOverload
from pfx.errors import ShardingError, message, user_line

STATES = ("varying", "invarying", "unreduced", "reduced")
aten = torch.ops.aten


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


def result_variance(
    op: Any, operands: Sequence[Variance], args: Sequence[Any] = (), line: str = ""
) -> Variance:
    """The variance of what an op makes of its tensor operands.

    Args:
        args: all arguments of the op, for the numbers among them.
        line: of the user's, where it is called.

    Raises:
        ShardingError: for an op that is not linear in an unreduced operand, and for addends beside
            values that are not, since ``f(a) + f(b)`` would not be ``f(a + b)``.
    """
    if not any(v.unreduced or v.reduced for v in operands):
        return Variance(frozenset().union(*(v.varying for v in operands)))
    varying = frozenset().union(*(v.varying for v in operands))
    unreduced = frozenset().union(*(v.unreduced for v in operands))
    reduced = frozenset().union(*(v.reduced for v in operands)) - unreduced
    for axis in sorted(unreduced):
        states = [v.state(axis) for v in operands]
        if not _keeps_addends(op, states, args):
            raise _not_linear(op, axis, states, line or user_line())
    return Variance(varying - unreduced, unreduced, reduced - varying)


# Linear in all operands together: sums, and what only moves elements.
_ADDITIVE = frozenset({
    "add", "sub", "rsub", "neg", "sum", "clone", "_to_copy", "to", "cat", "stack", "mean", "detach",
    "alias", "index", "index_select", "gather", "flip", "roll", "constant_pad_nd", "slice_backward",
    "select_backward", "copy", "lift_fresh", "zeros_like", "diagonal", "tril", "triu", "cumsum",
    "reshape", "_unsafe_view", "contiguous", "repeat", "index_put", "scatter_add", "index_add",
    "select_scatter", "slice_scatter", "masked_fill", "where", "_reshape_alias", "new_zeros",
    "new_empty_strided", "zero", "is_same_size", "full_like", "embedding_dense_backward",
})  # fmt: skip
# Linear in one operand while the others stay as they are.
_MULTILINEAR = frozenset({
    "mul", "mm", "bmm", "matmul", "dot", "mv", "convolution", "linear", "einsum", "ger", "outer",
})  # fmt: skip


def _keeps_addends(op: Any, states: Sequence[str], args: Sequence[Any]) -> bool:
    """Tell whether an op of addends along one axis makes addends of the right result."""
    name = str(getattr(op, "overloadpacket", op)).split(".")[-1].rstrip("_")
    if name in _PUTS_A_NUMBER and any(_number(arg) for arg in args[_PUTS_A_NUMBER[name] :]):
        return False  # every device would put it in once
    count, others = states.count("unreduced"), {s for s in states if s != "unreduced"}
    if name in _ADDITIVE or _is_view(op):
        return not others or (others == {"invarying"} and name in _INDEXED)
    if "varying" in others or count != 1:
        return False
    first = states[0] == "unreduced"
    return name in _MULTILINEAR or (first and (name == "div" or name.endswith("_backward")))


# Ops that put a number into the result, and the first argument that may be one.
_PUTS_A_NUMBER = {"add": 1, "sub": 1, "rsub": 1, "masked_fill": 2, "constant_pad_nd": 2,
                  "full_like": 1, "where": 1}  # fmt: skip


def _number(arg: Any) -> bool:
    return isinstance(arg, (int, float, complex)) and arg != 0


_INDEXED = frozenset({"index", "index_select", "gather", "index_put", "scatter_add", "index_add",
                      "masked_fill", "where", "embedding_dense_backward"})  # fmt: skip


def _is_view(op: Any) -> bool:
    if not isinstance(op, OpOverload):
        return False
    returns = op._schema.returns
    return bool(returns) and all(r.alias_info is not None for r in returns)


def _not_linear(op: Any, axis: str, states: Sequence[str], line: str) -> ShardingError:
    name = str(getattr(op, "overloadpacket", op)).removeprefix("aten.")
    return ShardingError(  # no TypeError: Python would take that for an operator that is not there
        message(
            f"{name} at {line}:",
            f"has an operand that is unreduced over {axis!r}.",
            f"operands along {axis!r}: {', '.join(states)}.",
            "devices hold addends there, and only sums and linear ops of them mean anything.",
            fix=f"x = pfx.lax.psum(x, {axis!r}) first, or pfx.lax.psum_scatter",
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
    return result_variance(node.target, found, node.args, line)

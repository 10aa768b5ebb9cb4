"""Which ops keep addends: for which arguments f(a + b) is f(a) + f(b), in one table.

Devices that hold addends of a value may apply an op each to its own, and still hold addends of the
right result, only where the op is linear in the arguments that are unreduced. Arguments go by the
names in torch's schemas, and an op that writes in place by the op that computes what it writes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from pfx.lax.ops.pure_form import arguments, is_op, pure_form
from pfx.lax.ops.views import is_view


@dataclass(frozen=True)
class Linear:
    """The arguments of an op that may be unreduced; all others are the same on all devices.

    The op is linear in all of `together` at once, as a sum is; in each one of `one_of` while the
    others stay, as a product is. Of those in `form` it reads no value, yet its result is of their
    kind; those in `unread` do not count at all.
    """

    together: tuple[str, ...] = ()
    one_of: tuple[str, ...] = ()
    form: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()


Rule = Linear | Callable[[dict[str, Any]], Linear | None]

_MASK_OF_WEIGHT, _MASK_OF_INPUT = [False, True, False], [True, False, False]


def _convolution_backward(given: dict[str, Any]) -> Linear:
    """A product of the gradient and, for one result, one of the operands of the convolution."""
    mask = list(given.get("output_mask", ()))
    if mask == _MASK_OF_WEIGHT:
        return Linear(one_of=("grad_output", "input"), unread=("weight",))
    if mask == _MASK_OF_INPUT:
        return Linear(one_of=("grad_output", "weight"), unread=("input",))
    return Linear(("grad_output",))


def _if_sum(given: dict[str, Any]) -> Linear | None:
    if given.get("reduce", "sum") not in ("sum", "add"):
        return None
    return Linear(("self", "src", "value"))


_RULES: tuple[tuple[Rule, str], ...] = (
    (
        Linear(("self",)),
        "neg positive clone contiguous _to_copy to lift_fresh lift_fresh_copy _unsafe_view sum mean "
        "trace cumsum flip roll rot90 repeat tril triu diag_embed index _unsafe_index index_select "
        "gather take real imag _conj_physical conj_physical resolve_conj resolve_neg avg_pool1d "
        "avg_pool2d avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d reflection_pad1d "
        "reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d "
        "upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d "
        "upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d _fft_r2c _fft_c2c _fft_c2r",
    ),
    (Linear(("self", "other")), "add sub rsub"),
    (Linear(("real", "imag")), "complex"),
    (Linear(("tensors",)), "cat stack"),
    (Linear(("weight",)), "embedding"),
    (Linear(("self", "value")), "constant_pad_nd masked_fill index_fill"),
    (Linear(("self", "values")), "index_put _unsafe_index_put _index_put_impl"),
    (Linear(("self", "source")), "index_add index_copy put masked_scatter"),
    (Linear(("self", "src")), "select_scatter slice_scatter diagonal_scatter scatter_add"),
    (Linear(("self", "src")), "as_strided_scatter"),
    (_if_sum, "scatter scatter_reduce"),
    (Linear(("src",), form=("self",)), "copy"),
    (Linear(("value",), form=("self",)), "fill"),
    (Linear(("fill_value",), form=("self",)), "full_like new_full"),
    (Linear(form=("self",)), "zero zeros_like new_zeros empty_like new_empty new_empty_strided"),
    (Linear(form=("self", "other")), "_new_zeros_with_same_feature_meta"),
    (Linear(("self", "other")), "where"),
    (Linear(("self", "end")), "lerp"),
    (Linear(one_of=("self", "other")), "mul matmul"),
    (Linear(one_of=("self", "mat2")), "mm bmm"),
    (Linear(one_of=("self", "vec")), "mv"),
    (Linear(one_of=("self", "vec2")), "ger outer"),
    (Linear(one_of=("self", "tensor")), "dot"),
    (Linear(one_of=("tensors",)), "einsum"),
    (Linear(("bias",), one_of=("input", "weight")), "linear convolution"),
    (Linear(("self",), one_of=("mat1", "mat2")), "addmm"),
    (Linear(("self",), one_of=("batch1", "batch2")), "baddbmm addbmm"),
    (Linear(("self",), one_of=("mat", "vec")), "addmv"),
    (Linear(("self",), one_of=("vec1", "vec2")), "addr"),
    (Linear(("self",), one_of=("tensor1", "tensor2")), "addcmul"),
    (Linear(("self",), one_of=("tensor1",)), "addcdiv"),
    (lambda given: None if given.get("rounding_mode") else Linear(("self",)), "div"),
    (lambda given: None if "dtype" in given else Linear(("self",)), "view"),
    (_convolution_backward, "convolution_backward"),
)
TABLE: Mapping[str, Rule] = MappingProxyType(
    {name: rule for rule, names in _RULES for name in names.split()}
)


def linear_in(op: Any, args: Any, kwargs: Any) -> Linear | None:
    """How a call is linear; None if it is not.

    >>> aten = torch.ops.aten
    >>> linear_in(aten.mul_.Tensor, (), {})
    Linear(together=(), one_of=('self', 'other'), form=(), unread=())
    >>> linear_in(aten.exp_.default, (), {}) is None
    True
    """
    pure = pure_op(op)
    if pure is None:
        return None
    name = op_name(pure)
    rule = TABLE.get(name)
    if callable(rule):
        return rule(arguments(op, args, kwargs))
    if rule is not None:
        return rule
    names = [a.name for a in pure._schema.arguments]
    if is_view(pure):
        return Linear(tuple(names[:1]))
    if name.endswith(("_backward", "_backward_data")):
        return Linear(tuple(n for n in names if n.startswith("grad")))
    return None


def pure_op(op: Any) -> Any:
    """The op that computes what `op` writes; itself if it writes nothing, None if there is none."""
    if not is_op(op):
        return None
    if not op._schema.is_mutable:
        return op
    pure = pure_form(op)
    return None if pure is None else pure.op


def op_name(op: Any) -> str:
    """The name of an op without its overload.

    >>> op_name(torch.ops.aten.add.Tensor)
    'add'
    """
    return op._schema.name.split("::")[-1] if is_op(op) else getattr(op, "__name__", str(op))


_READS_A_VALUE = ("_local_scalar_dense", "item", "equal", "allclose", "is_nonzero")


def asks_form(op: Any) -> bool:
    """Tell an op that makes no tensor and reads no value, such as one that asks for a size."""
    pure = pure_op(op)
    if pure is None or op_name(pure) in _READS_A_VALUE:
        return False
    return not any("Tensor" in str(result.type) for result in pure._schema.returns)


def loses_numbers(named: dict[str, Any], linear: Linear, dtype_of: Callable[[Any], Any]) -> bool:
    """Tell a call that rounds or truncates: from floats to ints, or anything to truth values."""
    into = named.get("dtype")
    if linear.form and "src" in linear.together:
        into = dtype_of(named["self"])
    if not isinstance(into, torch.dtype) or into.is_floating_point or into.is_complex:
        return False
    found = [dtype_of(leaf) for name in linear.together for leaf in leaves(named.get(name))]
    return any(d == torch.bool or into == torch.bool or _is_inexact(d) for d in found if d)


def _is_inexact(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def leaves(value: Any) -> list[Any]:
    """What an argument of an op holds, in order: itself, or the items of a list."""
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in leaves(item)]
    return [] if value is None else [value]


_PRODUCTS = frozenset(
    [
        "mul",
        "imul",
        "rmul",
        "multiply",
        "matmul",
        "imatmul",
        "rmatmul",
        "mm",
        "bmm",
        "mv",
        "dot",
        "vdot",
        "inner",
        "outer",
        "ger",
        "einsum",
        "kron",
        "tensordot",
        "chain_matmul",
        "multi_dot",
        "vecdot",
        "linear",
        "bilinear",
        "conv1d",
        "conv2d",
        "conv3d",
        "conv_transpose1d",
        "conv_transpose2d",
        "conv_transpose3d",
        "convolution",
        "conv_tbc",
        "addmm",
        "addbmm",
        "baddbmm",
        "addmv",
        "addr",
        "addcmul",
        "addcdiv",
        "lerp",
        "div",
        "divide",
        "true_divide",
        "truediv",
        "itruediv",
        "rtruediv",
        "rdiv",
        "idiv",
    ]
)


def is_product(func: Any) -> bool:
    """Tell a torch function, as torch.overrides sees it, that multiplies its operands or divides.

    Where one factor holds addends, the gradient of another is a sum over the devices too.

    >>> is_product(torch.Tensor.__mul__), is_product(torch.nn.functional.conv1d), is_product(torch.add)
    (True, True, False)
    """
    name = getattr(func, "__name__", "").strip("_").removeprefix("linalg_")
    return name in _PRODUCTS

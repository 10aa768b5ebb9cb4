"""`Policy`: in which dtype parameters are kept, steps computed, gradients added, masters kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from pfx import tree
from pfx.errors import message
from pfx.optim import GradientTransformation, find_state
from pfx.optim.base import wide_dtype
from pfx.precision import loss_scale
from pfx.precision.masters import MasterWeightsState, check_dtype, master_weights

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"f64": torch.float64, "f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
)
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The dtypes of a training step (Micikevicius et al. 2018, arXiv:1710.03740, section 3).

    A dtype is a torch one or its name, "f32", "bf16", "f16" or "f64". Only floating-point leaves are
    cast. Loss, weight, norms and metrics are float32 at least, whatever the policy.

    Attributes:
        params: of the parameters between steps; None: as the model makes them.
        compute: of the parameters that the loss sees, and so of its activations; None: as kept.
            Under ZeRO-3 they are gathered in this dtype.
        reduce: of the gradients, once a device has made them: in it they are added up over devices
            and microbatches, and given to the optimizer; None: float32, or float64 where they are.
        master: of the copies from which parameters of a narrower dtype are rounded; None: no copies.
        loss_scale: "dynamic" (`pfx.precision.loss_scale.dynamic`), a power of two that stays, or None.

    Raises:
        ValueError: a field is not one of these.

    >>> Policy(params="f32", compute=torch.bfloat16).compute
    torch.bfloat16
    """

    params: Any = None
    compute: Any = None
    reduce: Any = None
    master: Any = None
    loss_scale: Any = None

    def __post_init__(self) -> None:
        for name in ("params", "compute", "reduce", "master"):
            object.__setattr__(self, name, _dtype(name, getattr(self, name)))
        if self.loss_scale not in (None, "dynamic"):
            loss_scale.check_power_of_two("Policy", "loss_scale", self.loss_scale)
            object.__setattr__(self, "loss_scale", float(self.loss_scale))
        if self.master is not None:
            check_dtype("Policy", self.master)
        if self.master is not None and self.params is not None:
            if torch.promote_types(self.master, self.params) != self.master:
                raise ValueError(
                    message(
                        f"Policy: master={_NAMES[self.master]}",
                        f"cannot hold parameters in {_NAMES[self.params]}.",
                        "masters are at least as wide as the parameters rounded from them.",
                        fix="master=f32, or no master",
                    )
                )

    def __str__(self) -> str:
        """The text that `as_policy` reads; the fields that are None are left out."""
        given = [(f.name, getattr(self, f.name)) for f in fields(self)]
        words = [f"{name}={_word(value)}" for name, value in given if value is not None]
        return ",".join(words) or "model"

    def kept(self, params: Any) -> Any:
        """Parameters as they are kept between steps."""
        return _cast(params, self.params)

    def computed(self, params: Any) -> Any:
        """Parameters as the loss sees them."""
        return _cast(params, self.compute)

    def reduced(self, grads: Any) -> Any:
        """Gradients as they are added up."""
        return tree.map(lambda g: g.to(self.reduce_dtype(g)), grads)

    def reduce_dtype(self, grad: Any) -> torch.dtype:
        """The dtype in which gradients like this are added up."""
        return wide_dtype(grad) if self.reduce is None else self.reduce

    @property
    def reduces_in_16_bits(self) -> bool:
        """Whether gradients are added up in less than float32."""
        return self.reduce in (torch.bfloat16, torch.float16)

    def wrap(self, optimizer: GradientTransformation, state: Any) -> GradientTransformation:
        """Add the masters and the loss scale to an optimizer that does not have its own.

        Args:
            optimizer: what is wrapped: masters inside, the loss scale outside.
            state: the optimizer's state, or its shapes: tells what it has.

        >>> from pfx import optim
        >>> params = {"w": torch.ones(2, dtype=torch.bfloat16)}
        >>> inner = optim.sgd(0.1)
        >>> wrapped = as_policy("bf16-master").wrap(inner, inner.init(params))
        >>> wrapped.init(params).masters
        {'w': tensor([1., 1.])}
        """
        if self.master is not None and find_state(state, MasterWeightsState) is None:
            optimizer = master_weights(optimizer, dtype=self.master)
        if self.loss_scale is not None and find_state(state, loss_scale.LossScaleState) is None:
            if self.loss_scale == "dynamic":
                return loss_scale.dynamic(optimizer)
            return loss_scale.fixed(optimizer, self.loss_scale)
        return optimizer


NAMED: Mapping[str, str] = MappingProxyType(
    {
        "model": "",
        "f32": "params=f32,compute=f32,reduce=f32",
        "bf16": "params=f32,compute=bf16,reduce=f32",
        "bf16-master": "params=bf16,compute=bf16,reduce=f32,master=f32",
        "fp16": "params=f32,compute=f16,reduce=f32,loss_scale=dynamic",
        "fp16-master": "params=f16,compute=f16,reduce=f32,master=f32,loss_scale=dynamic",
    }
)


def as_policy(value: Policy | str) -> Policy:
    """Return the policy that a name or a text says.

    Args:
        value: a `Policy`; a name: "model" casts nothing and adds gradients in float32, "f32", "bf16"
            and "fp16" keep float32 parameters, "bf16-master" and "fp16-master" float32 masters of
            16-bit ones; or its fields: "params=bf16,compute=bf16,reduce=f32,master=f32". A name and
            then fields changes those.

    Raises:
        ValueError: no such name or field.

    >>> as_policy("bf16") == as_policy("params=f32,compute=bf16,reduce=f32")
    True
    >>> print(as_policy("bf16,reduce=bf16"))
    params=f32,compute=bf16,reduce=bf16
    """
    if isinstance(value, Policy):
        return value
    if not isinstance(value, str):
        raise ValueError(_unknown(value, "is no policy."))
    first, *rest = (word.strip() for word in value.split(","))
    if first in NAMED:
        policy, words = (
            _read(value, NAMED[first].split(",") if NAMED[first] else [], Policy()),
            rest,
        )
    elif "=" in first:
        policy, words = Policy(), [first, *rest]
    else:
        raise ValueError(_unknown(value, f"{first!r} is no policy."))
    return _read(value, words, policy)


def _read(text: str, words: list[str], policy: Policy) -> Policy:
    """The policy with the fields that the words give it."""
    given: dict[str, Any] = {}
    known = [field.name for field in fields(Policy)]
    for word in words:
        name, _, to = (part.strip() for part in word.partition("="))
        if name not in known or name in given or not to:
            why = "is said twice" if name in given and to else "is no field with a value"
            raise ValueError(_unknown(text, f"{word!r} {why}.", f"fields: {', '.join(known)}"))
        given[name] = None if to == "none" else to
    return replace(policy, **given)


def _unknown(value: Any, what: str, *details: str) -> str:
    names = f"names: {', '.join(NAMED)}"
    fix = 'precision="bf16", or "params=f32,compute=bf16,reduce=f32"'
    return message(f"precision={value!r}:", what, *details, names, fix=fix)


def _dtype(name: str, value: Any) -> torch.dtype | None:
    if value is None or value in _NAMES:
        return value
    if isinstance(value, str) and value in DTYPES:
        return DTYPES[value]
    where, what = f"Policy: {name}={value!r}", "is no dtype to train in."
    raise ValueError(message(where, what, f"dtypes: {', '.join(DTYPES)}", fix=f"{name}=f32"))


def _word(value: Any) -> str:
    return _NAMES.get(value) or (f"{value:g}" if isinstance(value, float) else str(value))


def _cast(values: Any, dtype: torch.dtype | None) -> Any:
    if dtype is None:
        return values

    def cast(x: Tensor) -> Tensor:
        return x.to(dtype) if x.dtype.is_floating_point else x

    return tree.map(cast, values)

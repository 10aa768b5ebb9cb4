"""Refuse what cannot be part of a pure step: global random numbers, and Python that reads values."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from pfx._torch import DataDependentError, DynamicShapeError, OpOverload
from pfx.errors import TraceError, message, raised_line
from pfx.lax.scan import Loop

aten = torch.ops.aten


def check_pure(module: torch.fx.GraphModule, where: str) -> None:
    """Raise `TraceError` for a random op in a graph or in its loops' bodies."""
    for node in module.graph.nodes:
        if isinstance(node.target, Loop):
            check_pure(node.target.body.module, where)
        elif getattr(node.target, "inlined", False):
            check_pure(node.target.primal.module, where)  # type: ignore[union-attr]
        elif isinstance(node.target, OpOverload):
            _check_random(node, where)


def _line(node: torch.fx.Node) -> str:
    source = node.meta.get("source")
    return f"at {source}" if source else ""


def _check_random(node: torch.fx.Node, where: str) -> None:
    target: Any = node.target
    if torch.Tag.nondeterministic_seeded not in target.tags or _drops_nothing(node):
        return
    name = str(target.overloadpacket).removesuffix("_functional")  # how torch writes a pure normal_
    raise TraceError(
        message(
            f"{where}: {name} {_line(node)}".rstrip(),
            "draws from torch's global random number generator.",
            "a step must be a pure function: equal keys, equal numbers, on any mesh.",
            fix="pfx.random.normal(key, shape), uniform, bernoulli, … with a key you pass in",
        )
    )


def _drops_nothing(node: torch.fx.Node) -> bool:
    """Attention is tagged random because it can drop; with dropout 0 it draws nothing."""
    target: Any = node.target
    for i, argument in enumerate(target._schema.arguments):
        if argument.name == "dropout_p":
            value = node.args[i] if len(node.args) > i else node.kwargs.get("dropout_p", 0.0)
            return bool(value == 0.0)
    return False


ReadsValues = (DataDependentError, DynamicShapeError)


def reads_values(error: Exception, where: str) -> TraceError:
    """The error for Python that needed the values, not only the shapes, of a traced tensor."""
    line = raised_line(error)
    if isinstance(error, DynamicShapeError):
        what = f"makes a tensor whose size depends on values ({error})."
        fix = "torch.where(mask, x, 0) in the place of x[mask]; a fixed size and a mask elsewhere"
    else:
        what = "needs the value of a traced tensor (if, while, int(), float() or .item())."
        fix = "torch.where(condition, a, b) for a choice; pfx.scan for a loop"
    return TraceError(
        message(
            f"{where}: Python at {line}" if line else f"{where}: Python",
            what,
            "a step is traced once, from shapes alone; its values are not known then.",
            fix=fix,
        )
    )

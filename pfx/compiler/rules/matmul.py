"""Products: a contracted dim that is split leaves a partial sum."""

from __future__ import annotations

from typing import Any

import torch

from pfx.compiler.rule import pattern_rule

aten = torch.ops.aten


def _product(pattern: str) -> Any:
    return lambda node: pattern_rule(node, pattern, linear=((0,), (1,)))


TABLE: dict[Any, Any] = {
    aten.mm: _product("m k, k n -> m n"),
    aten.bmm: _product("b m k, b k n -> b m n"),
    aten.mv: _product("m k, k -> m"),
    aten.dot: _product("k, k -> "),
    aten.vdot: _product("k, k -> "),
}

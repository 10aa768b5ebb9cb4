"""Products and linear algebra: a contracted dim that is split leaves a partial sum."""

from __future__ import annotations

from typing import Any

import torch

from pfx.compiler.rule import pattern_rule

aten = torch.ops.aten


def _product(pattern: str) -> Any:
    return lambda node: pattern_rule(node, pattern, linear=((0,), (1,)))


def batched(pattern: str) -> Any:
    """The rule of an op on whole matrices: only the batch dims, ``...``, may be split."""
    return lambda node: pattern_rule(node, pattern, "*")


_MATRIX = batched("... i j -> ... i j")
_MATRICES = batched("... i j, ... k l -> ... m n")

TABLE: dict[Any, Any] = {
    aten.mm: _product("m k, k n -> m n"),
    aten.bmm: _product("b m k, b k n -> b m n"),
    aten.matmul: _product("... m k, ... k n -> ... m n"),
    aten.mv: _product("m k, k -> m"),
    aten.dot: _product("k, k -> "),
    aten.vdot: _product("k, k -> "),
    aten._cdist_forward: lambda node: pattern_rule(node, "... m k, ... n k -> ... m n", "k"),
    aten._cdist_backward: lambda node: pattern_rule(
        node, "... m n, ... m k, ... n k, ... m n -> ... m k", "n k"
    ),
    aten.linalg_solve_triangular: _MATRICES,
    aten.linalg_lu_solve: batched("... i j, ... k, ... l m -> ... n o"),
    aten.cholesky_solve: _MATRICES,
    aten.triangular_solve: batched("... i j, ... k l -> ... m n, ... o p"),
    **dict.fromkeys((aten.cholesky, aten.cholesky_inverse, aten.linalg_matrix_exp), _MATRIX),
    **dict.fromkeys(
        (aten.linalg_cholesky_ex, aten.linalg_inv_ex), batched("... i j -> ... i j, ...")
    ),
    **dict.fromkeys((aten._linalg_eigh, aten.linalg_eig), batched("... i j -> ... k, ... i j")),
    aten.linalg_householder_product: batched("... i j, ... k -> ... i j"),
    aten.linalg_lu: batched("... i j -> ... i k, ... k l, ... l j"),
    aten.linalg_qr: batched("... i j -> ... i k, ... l j"),
    aten._linalg_svd: batched("... i j -> ... i k, ... l, ... m n"),
    aten._linalg_det: batched("... i j -> ..., ... i j, ... k"),
    aten._linalg_slogdet: batched("... i j -> ..., ..., ... i j, ... k"),
    aten.linalg_lu_factor_ex: batched("... i j -> ... i j, ... k, ..."),
}

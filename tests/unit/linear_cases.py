"""An op of addends for every entry of the table of linear ops, and some that go by their schema."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

aten = torch.ops.aten
MASK = torch.tensor([[True, False, True], [False, True, True], [True, True, False]])
INDEX = torch.tensor([2, 0, 2])
WHERE = torch.tensor([[0, 2, 1], [1, 1, 2], [2, 0, 0]])


@dataclass(frozen=True)
class Case:
    """An op of float operands: "U" is unreduced, "I" the same everywhere, "F" a form, "N" not read."""

    states: str
    call: Callable[..., torch.Tensor]
    shapes: tuple[tuple[int, ...], ...] = ()

    def shape(self, i: int) -> tuple[int, ...]:
        return self.shapes[i] if self.shapes else (3, 3)


def case(states: str, call: Callable[..., Any], *shapes: tuple[int, ...]) -> Case:
    return Case(states, call, shapes)


IMAGE = (1, 2, 4, 4)
CONVOLUTION = ((1, 2, 4, 4), (3, 2, 2, 2), (3,))
_GEOMETRY = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)


def _convolution(x: Any, w: Any, b: Any = None) -> torch.Tensor:
    return aten.convolution.default(x, w, b, *_GEOMETRY)


def _convolution_backward(item: int, *mask: bool) -> Callable[..., torch.Tensor]:
    def call(g: Any, x: Any, w: Any) -> torch.Tensor:
        return aten.convolution_backward.default(g, x, w, [3], *_GEOMETRY, list(mask))[item]

    return call


_GRADIENT = ((1, 3, 3, 3), (1, 2, 4, 4), (3, 2, 2, 2))

CASES: dict[str, tuple[Case, ...]] = {
    "neg": (case("U", aten.neg.default), case("U", aten.neg_.default)),
    "positive": (case("U", aten.positive.default),),
    "clone": (case("U", aten.clone.default),),
    "contiguous": (case("U", aten.contiguous.default),),
    "_to_copy": (case("U", lambda x: aten._to_copy.default(x, dtype=torch.complex128).real),),
    "to": (case("U", lambda x: x.to(torch.float64)),),
    "lift_fresh": (case("U", aten.lift_fresh.default),),
    "lift_fresh_copy": (case("U", aten.lift_fresh_copy.default),),
    "_unsafe_view": (case("U", lambda x: aten._unsafe_view.default(x, [9])),),
    "sum": (case("U", aten.sum.default), case("U", lambda x: aten.sum.dim_IntList(x, [1]))),
    "mean": (case("U", lambda x: aten.mean.dim(x, [0])),),
    "trace": (case("U", aten.trace.default),),
    "cumsum": (case("U", lambda x: aten.cumsum.default(x, 1)),),
    "flip": (case("U", lambda x: aten.flip.default(x, [0])),),
    "roll": (case("U", lambda x: aten.roll.default(x, [1], [0])),),
    "rot90": (case("U", aten.rot90.default),),
    "repeat": (case("U", lambda x: aten.repeat.default(x, [2, 1])),),
    "tril": (case("U", aten.tril.default),),
    "triu": (case("U", aten.triu.default),),
    "diag_embed": (case("U", aten.diag_embed.default),),
    "index": (case("U", lambda x: aten.index.Tensor(x, [INDEX])),),
    "_unsafe_index": (case("U", lambda x: aten._unsafe_index.Tensor(x, [INDEX])),),
    "index_select": (case("U", lambda x: aten.index_select.default(x, 0, INDEX)),),
    "gather": (case("U", lambda x: aten.gather.default(x, 1, WHERE)),),
    "take": (case("U", lambda x: aten.take.default(x, WHERE)),),
    "real": (case("U", lambda x: aten.complex.default(x, x).real),),
    "imag": (case("U", lambda x: aten.complex.default(x, x).imag),),
    "_conj_physical": (
        case("U", lambda x: torch.view_as_real(aten._conj_physical(aten.complex.default(x, x)))),
    ),
    "conj_physical": (
        case("U", lambda x: torch.view_as_real(aten.conj_physical(aten.complex.default(x, x)))),
    ),
    "resolve_conj": (
        case("U", lambda x: torch.view_as_real(aten.resolve_conj(aten.complex.default(x, x)))),
    ),
    "resolve_neg": (case("U", aten.resolve_neg.default),),
    "avg_pool1d": (case("U", lambda x: aten.avg_pool1d.default(x, [2]), (2, 3, 4)),),
    "avg_pool2d": (case("U", lambda x: aten.avg_pool2d.default(x, [2, 2]), IMAGE),),
    "avg_pool3d": (case("U", lambda x: aten.avg_pool3d.default(x, [1, 2, 2]), IMAGE),),
    "_adaptive_avg_pool2d": (
        case("U", lambda x: aten._adaptive_avg_pool2d.default(x, [2, 2]), IMAGE),
    ),
    "_adaptive_avg_pool3d": (
        case("U", lambda x: aten._adaptive_avg_pool3d.default(x, [1, 2, 2]), IMAGE),
    ),
    "reflection_pad1d": (case("U", lambda x: aten.reflection_pad1d.default(x, [1, 1])),),
    "reflection_pad2d": (
        case("U", lambda x: aten.reflection_pad2d.default(x, [1, 1, 0, 1]), IMAGE),
    ),
    "reflection_pad3d": (
        case("U", lambda x: aten.reflection_pad3d.default(x, [1, 1, 0, 1, 1, 0]), IMAGE),
    ),
    "replication_pad1d": (case("U", lambda x: aten.replication_pad1d.default(x, [1, 1])),),
    "replication_pad2d": (
        case("U", lambda x: aten.replication_pad2d.default(x, [1, 1, 0, 1]), IMAGE),
    ),
    "replication_pad3d": (
        case("U", lambda x: aten.replication_pad3d.default(x, [1, 1, 0, 1, 1, 0]), IMAGE),
    ),
    "upsample_nearest1d": (
        case("U", lambda x: aten.upsample_nearest1d.default(x, [8]), (1, 2, 4)),
    ),
    "upsample_nearest2d": (case("U", lambda x: aten.upsample_nearest2d.default(x, [8, 8]), IMAGE),),
    "upsample_nearest3d": (
        case("U", lambda x: aten.upsample_nearest3d.default(x, [4, 4, 4]), (1, 1, 2, 2, 2)),
    ),
    "upsample_linear1d": (
        case("U", lambda x: aten.upsample_linear1d.default(x, [8], False), (1, 2, 4)),
    ),
    "upsample_bilinear2d": (
        case("U", lambda x: aten.upsample_bilinear2d.default(x, [8, 8], False), IMAGE),
    ),
    "upsample_bicubic2d": (
        case("U", lambda x: aten.upsample_bicubic2d.default(x, [8, 8], False), IMAGE),
    ),
    "upsample_trilinear3d": (
        case(
            "U", lambda x: aten.upsample_trilinear3d.default(x, [4, 4, 4], False), (1, 1, 2, 2, 2)
        ),
    ),
    "_fft_r2c": (case("U", lambda x: torch.view_as_real(aten._fft_r2c.default(x, [1], 0, True))),),
    "_fft_c2c": (case("U", lambda x: torch.fft.fft(torch.fft.fft(x)).real),),
    "_fft_c2r": (case("U", lambda x: torch.fft.irfft(torch.fft.rfft(x))),),
    "add": (
        case("UU", lambda x, y: aten.add.Tensor(x, y, alpha=3)),
        case("UU", aten.add_.Tensor),
    ),
    "sub": (case("UU", aten.sub.Tensor),),
    "rsub": (case("UU", aten.rsub.Tensor),),
    "complex": (case("UU", lambda x, y: torch.view_as_real(aten.complex.default(x, y))),),
    "cat": (case("UU", lambda x, y: aten.cat.default([x, y], 1)),),
    "stack": (case("UU", lambda x, y: aten.stack.default([x, y])),),
    "embedding": (case("U", lambda x: aten.embedding.default(x, INDEX)),),
    "constant_pad_nd": (case("U", lambda x: aten.constant_pad_nd.default(x, [1, 0])),),
    "masked_fill": (
        case("U", lambda x: aten.masked_fill.Scalar(x, MASK, 0)),
        case("UU", lambda x, y: aten.masked_fill.Tensor(x, MASK, y), (3, 3), ()),
        case("U", lambda x: aten.masked_fill_.Scalar(x, MASK, 0.0)),
    ),
    "index_fill": (
        case("UU", lambda x, y: aten.index_fill.int_Tensor(x, 0, INDEX, y), (3, 3), ()),
    ),
    "index_put": (
        case("UU", lambda x, y: aten.index_put.default(x, [INDEX], y, True)),
        case("UU", lambda x, y: aten.index_put_.default(x, [INDEX[:2]], y[:2])),
    ),
    "_unsafe_index_put": (
        case("UU", lambda x, y: aten._unsafe_index_put.default(x, [INDEX], y, True)),
    ),
    "_index_put_impl": (
        case("UU", lambda x, y: aten._index_put_impl.default(x, [INDEX], y, True)),
    ),
    "index_add": (case("UU", lambda x, y: aten.index_add.default(x, 0, INDEX, y, alpha=2)),),
    "index_copy": (case("UU", lambda x, y: aten.index_copy.default(x, 0, INDEX[:2], y[:2])),),
    "put": (case("UU", lambda x, y: aten.put.default(x, WHERE, y, True)),),
    "masked_scatter": (case("UU", lambda x, y: aten.masked_scatter.default(x, MASK, y)),),
    "select_scatter": (
        case("UU", lambda x, y: aten.select_scatter.default(x, y, 0, 1), (3, 3), (3,)),
    ),
    "slice_scatter": (
        case("UU", lambda x, y: aten.slice_scatter.default(x, y, 0, 1, 3), (3, 3), (2, 3)),
    ),
    "diagonal_scatter": (
        case("UU", lambda x, y: aten.diagonal_scatter.default(x, y), (3, 3), (3,)),
    ),
    "as_strided_scatter": (
        case("UU", lambda x, y: aten.as_strided_scatter.default(x, y, [3], [1]), (3, 3), (3,)),
    ),
    "scatter_add": (case("UU", lambda x, y: aten.scatter_add.default(x, 1, WHERE, y)),),
    "scatter": (
        case("UU", lambda x, y: aten.scatter.src(x, 0, INDEX[None, :2], y)),
        case("U", lambda x: aten.scatter.value(x, 1, WHERE, 0)),
    ),
    "scatter_reduce": (case("UU", lambda x, y: aten.scatter_reduce.two(x, 1, WHERE, y, "sum")),),
    "copy": (case("FU", aten.copy.default), case("UU", aten.copy_.default)),
    "fill": (
        case("FU", aten.fill.Tensor, (3, 3), ()),
        case("U", lambda x: aten.fill_.Scalar(x, 0)),
    ),
    "full_like": (case("U", lambda x: aten.full_like.default(x, 0)),),
    "new_full": (case("U", lambda x: aten.new_full.default(x, [2], 0)),),
    "zero": (case("U", aten.zero.default), case("U", aten.zero_.default)),
    "zeros_like": (case("U", aten.zeros_like.default),),
    "new_zeros": (case("U", lambda x: aten.new_zeros.default(x, [2])),),
    "_new_zeros_with_same_feature_meta": (
        case("FF", aten._new_zeros_with_same_feature_meta.default),
    ),
    "empty_like": (case("U", lambda x: aten.empty_like.default(x).copy_(x)),),
    "new_empty": (case("U", lambda x: aten.new_empty.default(x, [3, 3]).copy_(x)),),
    "new_empty_strided": (
        case("U", lambda x: aten.new_empty_strided.default(x, [3, 3], [3, 1]).copy_(x)),
    ),
    "where": (
        case("UU", lambda x, y: aten.where.self(MASK, x, y)),
        case("U", lambda x: aten.where.self(MASK, x, torch.zeros((), dtype=x.dtype))),
        case("U", lambda x: aten.where.self(MASK, torch.zeros_like(x), x)),
    ),
    "lerp": (case("UUI", aten.lerp.Tensor),),
    "mul": (
        case("UI", aten.mul.Tensor),
        case("IU", aten.mul.Tensor),
        case("UI", aten.mul_.Tensor),
        case("U", lambda x: aten.mul.Tensor(x, 3.0)),
    ),
    "matmul": (case("UI", aten.matmul.default), case("IU", aten.matmul.default)),
    "mm": (case("UI", aten.mm.default), case("IU", aten.mm.default)),
    "bmm": (
        case("UI", aten.bmm.default, (2, 3, 4), (2, 4, 3)),
        case("IU", aten.bmm.default, (2, 3, 4), (2, 4, 3)),
    ),
    "mv": (case("UI", aten.mv.default, (3, 4), (4,)), case("IU", aten.mv.default, (3, 4), (4,))),
    "ger": (case("UI", aten.ger.default, (3,), (4,)), case("IU", aten.ger.default, (3,), (4,))),
    "outer": (case("UI", aten.outer.default, (3,), (4,)),),
    "dot": (case("UI", aten.dot.default, (3,), (3,)), case("IU", aten.dot.default, (3,), (3,))),
    "einsum": (case("UI", lambda x, y: aten.einsum.default("ij,kj->ik", [x, y])),),
    "linear": (
        case("UI", aten.linear.default),
        case("UIU", aten.linear.default, (2, 3), (4, 3), (4,)),
    ),
    "convolution": (
        case("UI", _convolution, *CONVOLUTION),
        case("IU", _convolution, *CONVOLUTION),
        case("UIU", _convolution, *CONVOLUTION),
    ),
    "convolution_backward": (
        case("UII", _convolution_backward(0, True, True, True), *_GRADIENT),
        case("UII", _convolution_backward(2, True, True, True), *_GRADIENT),
        case("UIN", _convolution_backward(1, False, True, False), *_GRADIENT),
        case("IUN", _convolution_backward(1, False, True, False), *_GRADIENT),
        case("INU", _convolution_backward(0, True, False, False), *_GRADIENT),
    ),
    "addmm": (case("UUI", aten.addmm.default), case("UIU", aten.addmm.default)),
    "baddbmm": (case("UUI", aten.baddbmm.default, (2, 3, 3), (2, 3, 4), (2, 4, 3)),),
    "addbmm": (case("UUI", aten.addbmm.default, (3, 3), (2, 3, 4), (2, 4, 3)),),
    "addmv": (case("UUI", aten.addmv.default, (3,), (3, 4), (4,)),),
    "addr": (case("UUI", aten.addr.default, (3, 3), (3,), (3,)),),
    "addcmul": (case("UUI", aten.addcmul.default), case("UIU", aten.addcmul.default)),
    "addcdiv": (case("UUI", aten.addcdiv.default),),
    "div": (
        case("UI", aten.div.Tensor),
        case("UI", aten.div_.Tensor),
        case("U", lambda x: aten.div.Tensor(x, 4.0)),
    ),
    "view": (case("U", lambda x: aten.view.default(x, [9])),),
}
# Of no table: views by their schema, and backward formulas by their name.
OTHERS: dict[str, tuple[Case, ...]] = {
    "select": (case("U", lambda x: aten.select.int(x, 0, 1)),),
    "permute": (case("U", lambda x: aten.permute.default(x, [1, 0])),),
    "expand": (case("U", lambda x: aten.expand.default(x, [2, 3, 3])),),
    "split": (case("U", lambda x: aten.split.Tensor(x, 2)[1]),),
    "t_": (case("U", aten.t_.default),),
    "unfold": (case("U", lambda x: aten.unfold.default(x, 0, 2, 1)),),
    "select_backward": (case("U", lambda g: aten.select_backward.default(g, [3, 3], 0, 1), (3,)),),
    "tanh_backward": (case("UI", aten.tanh_backward.default),),
    "gelu_backward": (case("UI", aten.gelu_backward.default),),
    "threshold_backward": (case("UI", lambda g, x: aten.threshold_backward.default(g, x, 0)),),
    "_softmax_backward_data": (
        case("UI", lambda g, y: aten._softmax_backward_data.default(g, y, 1, y.dtype)),
    ),
    "_log_softmax_backward_data": (
        case("UI", lambda g, y: aten._log_softmax_backward_data.default(g, y, 1, y.dtype)),
    ),
    "embedding_dense_backward": (
        case("U", lambda g: aten.embedding_dense_backward.default(g, INDEX, 4, -1, False)),
    ),
    "mse_loss_backward": (case("UII", lambda g, x, y: aten.mse_loss_backward.default(g, x, y, 1)),),
    "native_layer_norm_backward": (
        case(
            "UIIII",
            lambda g, x, m, r, w: aten.native_layer_norm_backward.default(
                g, x, [3], m, r, w, None, [True, True, False]
            )[0],
            *((3, 3), (3, 3), (3, 1), (3, 1), (3,)),
        ),
    ),
}

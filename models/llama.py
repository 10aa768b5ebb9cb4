"""Llama-3, Qwen2 and Qwen3: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

The families differ by `Config` only. The names of dims are those of `gpt`: "seq" in the
residual stream, "tokens" for the same dim inside attention, mlp and loss.

Grattafiori et al., "The Llama 3 herd of models" (2024), section 3.2; Yang et al., "Qwen3 technical
report" (2025), section 2; Su et al., "RoFormer" (2021), section 3; Shazeer, "GLU variants improve
transformer" (2020), section 2; Ainslie et al., "GQA" (2023), section 2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

import pfx
from models import common
from models.common import Loss, Param, Params

Rotation = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama 3.1's stretch of the slow rotary frequencies beyond the length of pretraining."""

    factor: float
    original_seq_len: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0


@dataclass(frozen=True, kw_only=True)
class Config:
    """The sizes of a Llama-3, Qwen2 or Qwen3, its rotary positions and how it starts."""

    num_layers: int
    embed_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_dim: int
    vocab_size: int
    max_seq_len: int
    rope_theta: float = 500_000.0
    rope_scaling: RopeScaling | None = None
    qk_norm: bool = False  # of each head of q and k, as in Qwen3
    qkv_bias: bool = False  # as in Qwen2
    tied: bool = False  # the token embedding is the output projection too
    eps: float = 1e-5
    init_std: float = 0.02
    dtype: torch.dtype = torch.float32
    remat: str | None = None  # "full" recomputes each block in the backward pass

    def __post_init__(self) -> None:
        kv_heads = self.num_kv_heads
        common.check_divides("llama.Config", "num_heads", self.num_heads, "num_kv_heads", kv_heads)
        common.check_divides("llama.Config", "head_dim", self.head_dim, "a rotary pair", 2)

    @property
    def sizes(self) -> dict[str, int]:
        """The size of every logical dim of the parameters."""
        return {
            "layers": self.num_layers,
            "embed": self.embed_dim,
            "heads": self.num_heads,
            "kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "mlp": self.mlp_dim,
            "vocab": common.padded_vocab(self.vocab_size),
        }


LLAMA3_8B = Config(
    num_layers=32,
    embed_dim=4096,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    mlp_dim=14336,
    vocab_size=128256,
    max_seq_len=8192,
)
LLAMA3_70B = replace(LLAMA3_8B, num_layers=80, embed_dim=8192, num_heads=64, mlp_dim=28672)
QWEN3_0_6B = Config(
    num_layers=28,
    embed_dim=1024,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    mlp_dim=3072,
    vocab_size=151936,
    max_seq_len=40960,
    rope_theta=1e6,
    qk_norm=True,
    tied=True,
    eps=1e-6,
)


def describe(config: Config) -> Params:
    """Return the tree of parameters as `Param`: what each dim means and how each leaf starts."""
    std = config.init_std
    residual_std = std / math.sqrt(2 * config.num_layers)  # as in `gpt`
    blocks = {
        "attn_norm": Param("layers embed", mean=1.0),
        "wq": Param("layers embed heads head_dim", std),
        "wk": Param("layers embed kv_heads head_dim", std),
        "wv": Param("layers embed kv_heads head_dim", std),
        "wo": Param("layers heads head_dim embed", residual_std),
        "mlp_norm": Param("layers embed", mean=1.0),
        "w_gate": Param("layers embed mlp", std),
        "w_up": Param("layers embed mlp", std),
        "w_down": Param("layers mlp embed", residual_std),
    }
    if config.qk_norm:
        blocks["q_norm"] = blocks["k_norm"] = Param("layers head_dim", mean=1.0)
    if config.qkv_bias:
        blocks["bq"] = Param("layers heads head_dim")
        blocks["bk"] = blocks["bv"] = Param("layers kv_heads head_dim")
    params = {
        "tok_embed": Param("vocab embed", std),
        "blocks": blocks,
        "final_norm": Param("embed", mean=1.0),
    }
    if not config.tied:
        params["unembed"] = Param("vocab embed", std)
    return params


def init(config: Config, key: torch.Tensor) -> Params:
    """Draw the parameters; those of the blocks are stacked on a leading "layers" dim."""
    return common.init_params(describe(config), config.sizes, key, config.dtype)


def axes(config: Config) -> Params:
    """Return a tree like the parameters, whose leaves name the dims: "layers embed mlp"."""
    return common.logical_dims(describe(config))


def apply(
    params: Params,
    tokens: torch.Tensor,
    config: Config,
    *,
    key: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    segments: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the logits of the next token, (batch, seq, padded vocab); the padding's are -inf.

    Args:
        params: what `init` returns.
        tokens: (batch, seq) int64, seq at most ``config.max_seq_len``.
        key: unused, these models draw nothing; every model of this package takes one.
        positions: (batch, seq) int64, the place of each token; None: 0, 1, 2, ... in each row.
        segments: (batch, seq) int64, the number of each token's document in its row; no token
            attends to another document. None: all are one.

    Raises:
        ValueError: the tokens are longer than ``config.max_seq_len``.

    >>> config = Config(
    ...     num_layers=2, embed_dim=8, num_heads=4, num_kv_heads=2, head_dim=4, mlp_dim=16,
    ...     vocab_size=5, max_seq_len=4)
    >>> params = init(config, pfx.random.key(0))
    >>> apply(params, torch.tensor([[3, 1, 4]]), config).shape
    torch.Size([1, 3, 128])
    """
    common.check_length("llama.apply", tokens, config.max_seq_len)
    x = pfx.constrain(F.embedding(tokens, params["tok_embed"]), "batch seq embed")
    rotation = rotary_table(tokens.shape[1], config, x, positions)
    mask = common.attention_mask(segments)

    def layer(x: torch.Tensor, weights: Params) -> tuple[torch.Tensor, None]:
        return block(x, weights, rotation, config, mask), None

    x, _ = pfx.scan(layer, x, params["blocks"], remat=config.remat)
    x = rms_norm(x, params["final_norm"], config.eps)
    unembed = params["tok_embed"] if config.tied else params["unembed"]
    logits = pfx.constrain(F.linear(x, unembed), "batch tokens vocab")
    return common.mask_padding(logits, config.vocab_size)


def loss_fn(config: Config) -> Loss:
    """Return ``loss(params, batch, key) -> (loss_sum, weight, metrics)`` of this model."""
    return common.language_model_loss(apply, config)


def block(
    x: torch.Tensor,
    weights: Params,
    rotation: Rotation,
    config: Config,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Add attention, then the mlp, to the residual stream; each reads it through an RMSNorm."""
    normed = rms_norm(x, weights["attn_norm"], config.eps)
    x = pfx.constrain(x + attention(normed, weights, rotation, config, mask), "batch seq embed")
    normed = rms_norm(x, weights["mlp_norm"], config.eps)
    return pfx.constrain(x + mlp(normed, weights), "batch seq embed")


def attention(
    x: torch.Tensor,
    weights: Params,
    rotation: Rotation,
    config: Config,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal self-attention in which each key and value head serves a group of query heads."""
    q, k, v = (project(x, weights[f"w{name}"], weights.get(f"b{name}")) for name in "qkv")
    q = pfx.constrain(q, "batch heads tokens head_dim")
    k = pfx.constrain(k, "batch kv_heads tokens head_dim")
    v = pfx.constrain(v, "batch kv_heads tokens head_dim")
    if config.qk_norm:
        q = rms_norm(q, weights["q_norm"], config.eps)
        k = rms_norm(k, weights["k_norm"], config.eps)
    group = config.num_heads // config.num_kv_heads
    k, v = repeat_heads(rotate(k, rotation), group), repeat_heads(v, group)
    mixed = common.attend(rotate(q, rotation), k, v, mask)
    return torch.tensordot(mixed.transpose(1, 2), weights["wo"], dims=2)


def project(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The heads that a weight (embed, heads, head_dim) makes of x: (batch, heads, seq, head_dim)."""
    heads = torch.tensordot(x, weight, dims=1)
    return (heads if bias is None else heads + bias).transpose(1, 2)


def repeat_heads(x: torch.Tensor, times: int) -> torch.Tensor:
    """Repeat each head of (batch, kv_heads, seq, head_dim) for the query heads that share it."""
    return x.unsqueeze(2).expand(-1, -1, times, -1, -1).flatten(1, 2)


def mlp(x: torch.Tensor, weights: Params) -> torch.Tensor:
    """SwiGLU: the SiLU of one product gates the other."""
    gate = x @ weights["w_gate"]
    gate = gate * torch.sigmoid(gate)  # F.silu's derivative in torch.func is longer, and in place
    return pfx.constrain(gate * (x @ weights["w_up"]), "batch tokens mlp") @ weights["w_down"]


def rms_norm(x: torch.Tensor, scale: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last dim, in float32 whatever the dtype of `x`."""
    wide = common.at_least_float32(x)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return scale * normed.to(x.dtype)


def rotary_table(
    seq_len: int, config: Config, like: torch.Tensor, positions: torch.Tensor | None = None
) -> Rotation:
    """Return (cos, signed sin) of every position's angles, for `rotate`.

    Each is (seq, head_dim), or (batch, 1, seq, head_dim) for given positions (batch, seq).
    """
    dtype = torch.promote_types(like.dtype, torch.float32)
    if positions is None:
        positions = torch.arange(seq_len, device=like.device)
    else:
        positions = positions.unsqueeze(1)
    positions = positions.to(dtype)
    angles = positions.unsqueeze(-1) * rotary_frequencies(config, positions)
    cos, sin = angles.cos().to(like.dtype), angles.sin().to(like.dtype)
    return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


def rotary_frequencies(config: Config, like: torch.Tensor) -> torch.Tensor:
    """Return the angle that each of the head_dim/2 pairs turns by from token to token.

    Llama 3.1 divides by `factor` the frequency of a pair that makes fewer than `low_freq_factor`
    turns in the length of pretraining, keeps one above `high_freq_factor`, interpolates between.
    """
    pairs = torch.arange(0, config.head_dim, 2, dtype=like.dtype, device=like.device)
    frequencies = config.rope_theta ** (-pairs / config.head_dim)
    if (scaling := config.rope_scaling) is None:
        return frequencies
    turns = frequencies * (scaling.original_seq_len / (2 * math.pi))
    span = scaling.high_freq_factor - scaling.low_freq_factor
    kept = ((turns - scaling.low_freq_factor) / span).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


def rotate(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Turn feature pairs (i, i + head_dim/2) of (batch, heads, seq, head_dim) by their angles."""
    cos, sin = rotation
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin

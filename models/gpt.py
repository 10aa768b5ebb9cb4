"""GPT-2: learned positions, LayerNorm with bias, GELU, and one embedding for both ends.

Written for one device. Parallelism enters by names alone: `axes` names the dims of every
parameter, `pfx.constrain` those of the activations, and a plan maps names to mesh axes. "seq" is
the sequence in the residual stream, where sequence parallelism shards it; "tokens" is the same
dim inside attention, mlp and loss, where it is whole.

Radford et al., "Language models are unsupervised multitask learners" (2019).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

import pfx
from models import common
from models.common import Loss, Param, Params


@dataclass(frozen=True, kw_only=True)
class Config:
    """The sizes of a GPT-2, its dropout rate and how it starts."""

    num_layers: int
    embed_dim: int
    num_heads: int
    mlp_dim: int
    vocab_size: int
    max_seq_len: int
    dropout: float = 0.0  # of the embedding and both branches of a block, not inside attention
    eps: float = 1e-5
    init_std: float = 0.02
    dtype: torch.dtype = torch.float32
    remat: str | None = None  # "full" recomputes each block in the backward pass

    def __post_init__(self) -> None:
        common.check_divides("gpt.Config", "embed_dim", self.embed_dim, "num_heads", self.num_heads)

    @property
    def sizes(self) -> dict[str, int]:
        """The size of every logical dim of the parameters."""
        return {
            "layers": self.num_layers,
            "embed": self.embed_dim,
            "heads": self.num_heads,
            "qkv": 3,
            "head_dim": self.embed_dim // self.num_heads,
            "mlp": self.mlp_dim,
            "vocab": common.padded_vocab(self.vocab_size),
            "positions": self.max_seq_len,
        }


GPT2 = Config(
    num_layers=12, embed_dim=768, num_heads=12, mlp_dim=3072, vocab_size=50257, max_seq_len=1024
)


def describe(config: Config) -> Params:
    """Return the tree of parameters as `Param`: what each dim means and how each leaf starts.

    The two projections that add to the residual stream start smaller, by 1/sqrt(2 num_layers), so
    that its variance does not grow with depth (Radford et al., section 2.3).
    """
    std = config.init_std
    residual_std = std / math.sqrt(2 * config.num_layers)
    return {
        "tok_embed": Param("vocab embed", std),
        "positions": Param("positions embed", std),
        "blocks": {
            "attn_norm": _layer_norm_params("layers embed"),
            # One product for q, k and v. Heads come first of its output dims, so that a shard of
            # heads is one block of columns.
            "wqkv": Param("layers embed heads qkv head_dim", std),
            "bqkv": Param("layers heads qkv head_dim"),
            "wo": Param("layers heads head_dim embed", residual_std),
            "bo": Param("layers embed"),
            "mlp_norm": _layer_norm_params("layers embed"),
            "w_up": Param("layers embed mlp", std),
            "b_up": Param("layers mlp"),
            "w_down": Param("layers mlp embed", residual_std),
            "b_down": Param("layers embed"),
        },
        "final_norm": _layer_norm_params("embed"),
    }


def _layer_norm_params(dims: str) -> Params:
    return {"scale": Param(dims, mean=1.0), "bias": Param(dims)}


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
        key: for dropout; without it nothing is dropped.
        positions: (batch, seq) int64, the place of each token; None: 0, 1, 2, ... in each row.
        segments: (batch, seq) int64, the number of each token's document in its row; no token
            attends to another document. None: all are one.

    Raises:
        ValueError: the tokens are longer than the model has positions.

    >>> config = Config(
    ...     num_layers=2, embed_dim=8, num_heads=2, mlp_dim=16, vocab_size=5, max_seq_len=4)
    >>> params = init(config, pfx.random.key(0))
    >>> apply(params, torch.tensor([[3, 1, 4]]), config).shape
    torch.Size([1, 3, 128])
    """
    common.check_length("gpt.apply", tokens, config.max_seq_len)
    embed_key, block_keys = _dropout_keys(key, config)
    x = pfx.constrain(F.embedding(tokens, params["tok_embed"]), "batch seq embed")
    x = dropout(x + _position_embed(params, tokens, positions), config.dropout, embed_key)
    mask = common.attention_mask(segments)

    def layer(x: torch.Tensor, inputs: tuple) -> tuple[torch.Tensor, None]:
        weights, block_key = inputs
        return block(x, weights, config, block_key, mask), None

    x, _ = pfx.scan(layer, x, (params["blocks"], block_keys), remat=config.remat)
    x = layer_norm(x, params["final_norm"], config.eps)
    logits = pfx.constrain(F.linear(x, params["tok_embed"]), "batch tokens vocab")
    return common.mask_padding(logits, config.vocab_size)


def loss_fn(config: Config) -> Loss:
    """Return ``loss(params, batch, key) -> (loss_sum, weight, metrics)`` of this model."""
    return common.language_model_loss(apply, config)


def _position_embed(
    params: Params, tokens: torch.Tensor, positions: torch.Tensor | None
) -> torch.Tensor:
    if positions is None:
        return params["positions"][: tokens.shape[1]]
    return pfx.constrain(F.embedding(positions, params["positions"]), "batch seq embed")


def block(
    x: torch.Tensor,
    weights: Params,
    config: Config,
    key: torch.Tensor | None,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Add attention, then the mlp, to the residual stream; each reads it through a LayerNorm."""
    attn_key, mlp_key = (None, None) if key is None else pfx.random.split(key)
    update = attention(layer_norm(x, weights["attn_norm"], config.eps), weights, mask)
    x = pfx.constrain(x + dropout(update, config.dropout, attn_key), "batch seq embed")
    update = mlp(layer_norm(x, weights["mlp_norm"], config.eps), weights)
    return pfx.constrain(x + dropout(update, config.dropout, mlp_key), "batch seq embed")


def attention(x: torch.Tensor, weights: Params, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Causal multi-head self-attention, within the mask if there is one."""
    qkv = torch.tensordot(x, weights["wqkv"], dims=1) + weights["bqkv"]
    qkv = pfx.constrain(qkv, "batch tokens heads qkv head_dim")
    q, k, v = (part.transpose(1, 2) for part in qkv.unbind(3))
    mixed = common.attend(q, k, v, mask)
    return torch.tensordot(mixed.transpose(1, 2), weights["wo"], dims=2) + weights["bo"]


def mlp(x: torch.Tensor, weights: Params) -> torch.Tensor:
    """Two layers with GELU in its tanh form between them."""
    hidden = pfx.constrain(x @ weights["w_up"] + weights["b_up"], "batch tokens mlp")
    return F.gelu(hidden, approximate="tanh") @ weights["w_down"] + weights["b_down"]


def layer_norm(x: torch.Tensor, weights: Params, eps: float) -> torch.Tensor:
    """LayerNorm over the last dim, with scale and bias."""
    return F.layer_norm(x, x.shape[-1:], weights["scale"], weights["bias"], eps)


def dropout(x: torch.Tensor, rate: float, key: torch.Tensor | None) -> torch.Tensor:
    """Zero a share `rate` of `x` and scale up the rest; without a key, return `x`."""
    if key is None:
        return x
    kept = pfx.random.bernoulli(key, 1 - rate, x.shape)
    return torch.where(kept, x / (1 - rate), 0.0)


def _dropout_keys(
    key: torch.Tensor | None, config: Config
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """One key for the embedding and a stack of one for each layer; None where nothing drops."""
    if key is None or config.dropout == 0:
        return None, None
    embed_key, key = pfx.random.split(key)
    return embed_key, pfx.random.split(key, config.num_layers)

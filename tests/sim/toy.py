"""A model with everything that a pipeline must carry, and little else: it compiles in a second.

A table for both ends, a residual layer of two matrices, keys for dropout, and a loss with a metric.
It has what a model file has: `Config`, `init`, `axes`, `apply`, `loss_fn`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

import pfx

IGNORED = -100
AXES = {
    "table": "vocab embed",
    "blocks": {"w_up": "layers embed mlp", "bias": "layers mlp", "w_down": "layers mlp embed"},
    "scale": "embed",
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """The sizes of the model."""

    num_layers: int = 2
    embed_dim: int = 4
    mlp_dim: int = 8
    vocab_size: int = 6
    dropout: float = 0.0
    remat: str | None = None
    dtype: torch.dtype = torch.float64


def init(config: Config, key: torch.Tensor) -> Any:
    """Draw the parameters."""
    sizes = {"layers": config.num_layers, "embed": config.embed_dim, "mlp": config.mlp_dim,
             "vocab": config.vocab_size}  # fmt: skip
    names, structure = pfx.tree.flatten(AXES)
    keys = pfx.random.split(key, len(names))
    leaves = [
        0.6 * pfx.random.normal(keys[i], tuple(sizes[n] for n in name.split())).to(config.dtype)
        for i, name in enumerate(names)
    ]
    return pfx.tree.unflatten(structure, leaves)


def axes(config: Config) -> Any:
    """Name the dims of the parameters."""
    return AXES


def apply(params: Any, tokens: torch.Tensor, config: Config, *, key: Any = None) -> torch.Tensor:
    """Return the logits, (batch, seq, vocab)."""
    keys = None if not config.dropout else pfx.random.split(key, config.num_layers)

    def layer(x: torch.Tensor, inputs: Any) -> tuple[torch.Tensor, None]:
        weights, layer_key = inputs
        hidden = torch.tanh(x @ weights["w_up"] + weights["bias"])
        if layer_key is not None:
            kept = pfx.random.bernoulli(layer_key, 1 - config.dropout, hidden.shape)
            hidden = torch.where(kept, hidden, 0.0)
        return pfx.constrain(x + hidden @ weights["w_down"], "batch seq embed"), None

    x = pfx.constrain(F.embedding(tokens, params["table"]), "batch seq embed")
    x, _ = pfx.scan(layer, x, (params["blocks"], keys), remat=config.remat)
    return (x * params["scale"]) @ params["table"].T


def loss_fn(config: Config) -> Any:
    """Return the loss, by the loss contract; its metric counts the tokens that are guessed."""

    def loss(params: Any, batch: Any, key: Any = None) -> tuple[Any, Any, Any]:
        logits, labels = apply(params, batch["tokens"], config, key=key), batch["labels"]
        counted = labels != IGNORED
        index = torch.where(counted, labels, 0)
        own = torch.gather(logits, -1, index.unsqueeze(-1)).squeeze(-1)
        losses = torch.where(counted, torch.logsumexp(logits, -1) - own, 0.0)
        guessed = counted & (own >= logits.amax(-1))
        return losses.sum(), counted.sum(dtype=torch.float32), {"guessed": guessed.sum()}

    return loss

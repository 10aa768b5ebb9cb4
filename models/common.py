"""What the reference models share: described parameters, a padded vocabulary and the token loss.

A model describes each of its parameters once, as a `Param` in a nested dict. The values
(`init_params`) and the logical dims that a plan maps to mesh axes (`logical_dims`) both follow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

import pfx

IGNORED_LABEL = -100
"""A token with this label is not counted by the loss."""

VOCAB_MULTIPLE = 128
"""Vocabularies are padded to a multiple of this on every mesh, so a checkpoint fits them all."""

Params = dict[str, Any]
Loss = Callable[
    [Params, dict[str, torch.Tensor], torch.Tensor | None],
    tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]],
]


@dataclass(frozen=True)
class Param:
    """One parameter: the logical names of its dims, and the normal distribution it starts from."""

    dims: str
    std: float = 0.0
    mean: float = 0.0


def init_params(
    described: Params, sizes: dict[str, int], key: torch.Tensor, dtype: torch.dtype
) -> Params:
    """Draw every described parameter, one draw a leaf; a std of 0 draws nothing.

    >>> described = {"scale": Param("embed", mean=1.0), "w_up": Param("embed mlp", std=0.02)}
    >>> params = init_params(described, {"embed": 2, "mlp": 8}, pfx.random.key(0), torch.float32)
    >>> params["scale"], params["w_up"].shape
    (tensor([1., 1.]), torch.Size([2, 8]))
    """
    leaves, structure = pfx.tree.flatten(described)
    keys = pfx.random.split(key, len(leaves))
    values = []
    for param, leaf_key in zip(leaves, keys, strict=True):
        shape = tuple(sizes[dim] for dim in param.dims.split())
        if param.std == 0:
            value = torch.full(shape, param.mean, dtype=dtype, device=key.device)
        else:
            # In float32 whatever the dtype: the same numbers, and no coarse tails in bfloat16.
            value = (param.mean + param.std * pfx.random.normal(leaf_key, shape)).to(dtype)
        values.append(value)
    return pfx.tree.unflatten(structure, values)


def logical_dims(described: Params) -> Params:
    """Return the tree of dim names that belongs to the parameters.

    >>> logical_dims({"w_up": Param("embed mlp", std=0.02)})
    {'w_up': 'embed mlp'}
    """
    return pfx.tree.map(lambda param: param.dims, described)


def padded_vocab(vocab_size: int) -> int:
    """Round a vocabulary up to a whole number of `VOCAB_MULTIPLE` rows.

    >>> padded_vocab(50257), padded_vocab(128256)
    (50304, 128256)
    """
    return -(-vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def mask_padding(logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Set the logits of the padding to -inf: probability 0, and no gradient to its embeddings."""
    padded = logits.shape[-1]
    if padded == vocab_size:
        return logits
    real = torch.arange(padded, device=logits.device) < vocab_size
    return torch.where(real, logits, -torch.inf)


def at_least_float32(x: torch.Tensor) -> torch.Tensor:
    """Widen bfloat16 and float16 where rounding would hurt; float64 stays what it is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def token_loss(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the summed cross-entropy in nats and the number of tokens counted, both float32.

    logsumexp over the vocabulary minus the label's own logit: with the vocabulary sharded, each
    term needs one number a token from the other shards, never the logits themselves.

    Args:
        logits: (batch, seq, vocab).
        labels: (batch, seq) int64; `IGNORED_LABEL` is not counted and passes no gradient.

    >>> loss, weight = token_loss(torch.zeros(1, 3, 8), torch.tensor([[5, 2, IGNORED_LABEL]]))
    >>> round(loss.exp().item(), 3), weight.item()
    (64.0, 2.0)
    """
    logits = at_least_float32(logits)
    counted = labels != IGNORED_LABEL
    index = torch.where(counted, labels, 0)
    label_logit = torch.gather(logits, -1, index.unsqueeze(-1)).squeeze(-1)
    losses = torch.logsumexp(logits, -1) - label_logit
    return torch.where(counted, losses, 0.0).sum(), counted.sum(dtype=torch.float32)


def language_model_loss(apply: Callable[..., torch.Tensor], config: Any) -> Loss:
    """Return ``loss(params, batch, key) -> (loss_sum, weight, metrics)`` for ``apply``.

    The batch holds int64 "tokens" and "labels", both (batch, seq). "positions" and "segments" of the
    same shape, where they are there, go to ``apply``: the place of each token, and the number of
    its document in the row. Sums, not means: microbatches and devices add theirs, and the one
    division by the whole weight comes last.
    """

    def loss(
        params: Params, batch: dict[str, torch.Tensor], key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        placed = {name: batch[name] for name in ("positions", "segments") if name in batch}
        logits = apply(params, batch["tokens"], config, key=key, **placed)
        loss_sum, weight = token_loss(logits, batch["labels"])
        return loss_sum, weight, {}

    return loss


def attention_mask(segments: torch.Tensor | None) -> torch.Tensor | None:
    """Return which tokens may attend to which: those before them, of their own document.

    Args:
        segments: (batch, seq), the number of each token's document in its row; None: all one.

    Returns:
        Bools (batch, 1, seq, seq), true where the third dim attends to the fourth; None for None.

    >>> attention_mask(torch.tensor([[0, 0, 1]]))[0, 0].int()
    tensor([[1, 0, 0],
            [1, 1, 0],
            [0, 0, 1]], dtype=torch.int32)
    """
    if segments is None:
        return None
    seq = torch.arange(segments.shape[1], device=segments.device)
    before = seq.unsqueeze(1) >= seq
    return (before & (segments.unsqueeze(2) == segments.unsqueeze(1))).unsqueeze(1)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """Causal attention over (batch, heads, seq, head_dim), within the mask if there is one."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)


def check_divides(where: str, name: str, size: int, by: str, divisor: int) -> None:
    """Raise ValueError unless `divisor` divides `size`."""
    if size % divisor:
        raise ValueError(
            f"{where}: {name} is not a multiple of {by}.\n"
            f"  {name} = {size}, {by} = {divisor}; {size} % {divisor} = {size % divisor}\n"
            f"  fix: {name}={(size // divisor + 1) * divisor}"
        )


def check_length(where: str, tokens: torch.Tensor, max_seq_len: int) -> None:
    """Raise ValueError for sequences longer than the model has positions."""
    if tokens.shape[1] > max_seq_len:
        raise ValueError(
            f"{where}: tokens are too long.\n"
            f"  tokens has shape {tuple(tokens.shape)} (batch, seq); max_seq_len = {max_seq_len}\n"
            f"  fix: pass tokens[:, -{max_seq_len}:], or raise max_seq_len"
        )

"""A model that compiles at once, and a source that can be asked to spoil batches or to send signals."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.functional import embedding

import pfx
from models import common
from pfx.recipe import Run


@dataclass(frozen=True)
class Config:
    """Sizes of a table of pairs of tokens."""

    vocab_size: int = 32
    dim: int = 8
    dtype: torch.dtype = torch.float32


def _described() -> dict[str, common.Param]:
    return {"embed": common.Param("vocab embed", 0.5), "head": common.Param("embed vocab", 0.5)}


def init(config: Config, key: torch.Tensor) -> Any:
    sizes = {"vocab": config.vocab_size, "embed": config.dim}
    return common.init_params(_described(), sizes, key, config.dtype)


def axes(config: Config) -> Any:
    return common.logical_dims(_described())


def apply(params: Any, tokens: torch.Tensor, config: Config, **_: Any) -> torch.Tensor:
    return embedding(tokens, params["embed"]) @ params["head"]


def loss_fn(config: Config) -> Callable[..., Any]:
    """The loss of each token, times the factor of its row if the batch has one."""

    def loss(params: Any, batch: Any, key: Any = None) -> Any:
        logits = common.at_least_float32(apply(params, batch["tokens"], config))
        label = torch.gather(logits, -1, batch["labels"].unsqueeze(-1)).squeeze(-1)
        losses = torch.logsumexp(logits, -1) - label
        if "factor" in batch:
            losses = losses * batch["factor"].unsqueeze(-1)
        return losses.sum(), torch.ones_like(losses).sum(), {}

    return loss


@dataclass(frozen=True)
class Counting:
    """Rows that count up from a random number.

    Args:
        factors: of a batch's loss, by its number; others have 1.
        signals: sent to this process when a batch is asked for, once each.
        moved: batches from the first of these numbers on are those so many later.
    """

    size: int
    seq: int
    seed: int
    vocab: int
    factors: Mapping[int, float] = field(default_factory=dict)
    signals: dict[int, signal.Signals] = field(default_factory=dict)
    moved: tuple[int, int] = (10**9, 0)
    same: int = -1
    num_batches: int = 3

    def __call__(self, step: int) -> dict[str, torch.Tensor]:
        if step in self.signals:
            signal.raise_signal(self.signals.pop(step))
        step += self.moved[1] if step >= self.moved[0] else 0
        key = pfx.random.fold_in(pfx.random.key(self.seed), step)
        start = pfx.random.randint(key, (self.size, 1), 0, self.vocab).long()
        row = (start + torch.arange(self.seq + 1)) % self.vocab
        if step == self.same:
            row = torch.full_like(row, 7)
        factor = torch.full((self.size,), self.factors.get(step, 1.0))
        tokens, labels = row[:, :-1].contiguous(), row[:, 1:].contiguous()
        return {"tokens": tokens, "labels": labels, "factor": factor}

    def ids(self, step: int) -> list[int]:
        return list(range(step * self.size, (step + 1) * self.size))


WANTED: dict[str, Any] = {}
"""What the next source is to do; tests set it and clear it."""


def counting(run: Run, part: str) -> Counting:
    seed = run.train.seed + (0 if part == "train" else 1000)
    wanted = WANTED if part == "train" else {}
    vocab = WANTED.get("vocab", run.model.config.vocab_size)
    given = {name: value for name, value in wanted.items() if name != "vocab"}
    return Counting(run.train.batch_size, run.data.seq_len, seed, vocab, **given)

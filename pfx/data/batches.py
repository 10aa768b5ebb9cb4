"""The batch of a step, from its number alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from pfx.data.error import DataError
from pfx.data.samples import IGNORED_LABEL, Rows, SampleId, Samples
from pfx.errors import message

Last = Literal["wrap", "drop", "pad"]


@dataclass(frozen=True, eq=False)
class Batches:
    """Give the batch of any step: ``batches(step)``, a pure function of the seed and the step.

    What a run must keep to go on is the number of its next step. The batch is the global one, the
    same on every process and for any number of devices and microbatches.

    Args:
        samples: `Windows`, `Packed` or a `Blend`.
        batch_size: rows of a batch.
        seed: of all shuffles.
        last: where an epoch's rows fill no whole number of batches: "wrap" lets a batch go on with
            the next epoch's rows, "drop" leaves the rest of the epoch out, "pad" fills the batch up
            with rows without labels, so that an evaluation counts every row once.
        reset_positions: add "positions", which start from 0 in each document of a row.
        block_diagonal: add "segments", the number of the document in the row: a model that is given
            it lets no token attend to another document.
        mask_boundaries: count no loss where the label is the first token of another document.

    Raises:
        DataError: there is less than a batch to an epoch and `last` is "drop", or a blend, which has
            no epochs, is to "drop" or "pad".
    """

    samples: Samples
    batch_size: int
    seed: int = 0
    last: Last = "wrap"
    reset_positions: bool = False
    block_diagonal: bool = False
    mask_boundaries: bool = False

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(message("Batches: batch_size", f"is {self.batch_size}."))
        if self.last not in ("wrap", "drop", "pad"):
            what = f"is {self.last!r}; it is one of wrap, drop, pad."
            raise ValueError(message("Batches: last", what))
        if self.last != "wrap" and self.samples.size is None:
            what = f"is {self.last!r}, and a blend has no epochs."
            raise DataError(message("Batches: last", what, fix='last="wrap"'))
        if self.last == "drop" and not self.steps_per_epoch:
            what = f"is more than the {self.samples.size} rows of an epoch."
            fix = 'last="wrap" or "pad", or a smaller batch'
            raise DataError(message(f"Batches: batch_size={self.batch_size}", what, fix=fix))

    @property
    def size(self) -> int | None:
        """The rows of an epoch; None for a blend."""
        return self.samples.size

    @property
    def seq_len(self) -> int:
        """The tokens of a row."""
        return self.samples.seq_len

    @property
    def steps_per_epoch(self) -> int:
        """The batches of an epoch, rounded down for "drop" and up otherwise.

        Raises:
            DataError: a blend has no epochs.
        """
        if self.size is None:
            raise DataError(message("Batches: a blend", "has no epochs to count steps in."))
        return (
            self.size // self.batch_size
            if self.last == "drop"
            else -(-self.size // self.batch_size)
        )

    def position(self, step: int) -> tuple[int, int]:
        """Return the epoch in which a step begins, and how many of its rows came before it."""
        if self.last == "wrap":
            if self.size is None:
                raise DataError(message("Batches: a blend", "has no epochs to be in."))
            return divmod(step * self.batch_size, self.size)
        epoch, at = divmod(step, self.steps_per_epoch)
        return epoch, at * self.batch_size

    def __call__(self, step: int, *, rows: slice | None = None) -> dict[str, torch.Tensor]:
        """Return "tokens" and "labels", int64 (batch_size, seq_len), and what was asked for besides.

        Args:
            step: from 0.
            rows: of the batch; None: all. Only these are read.

        Raises:
            ValueError: the step is negative.
        """
        numbers = self._numbers(step)[slice(None) if rows is None else rows]
        real = numbers >= 0
        read = self.samples.read(self.seed, numbers[real])
        if not real.all():
            read = _padded(read, real)
        return self._batch(read)

    def ids(self, step: int) -> list[SampleId]:
        """Return which rows are in the batch of a step, in its order; padding has none."""
        numbers = self._numbers(step)
        return self.samples.ids(self.seed, numbers[numbers >= 0])

    def _numbers(self, step: int) -> np.ndarray:
        """Return the places of a batch's rows in the sequence of samples, -1 for padding."""
        if step < 0:
            raise ValueError(message(f"Batches: step {step}", "is below 0."))
        if self.last == "wrap" or self.size is None:
            return step * self.batch_size + np.arange(self.batch_size)
        epoch, consumed = self.position(step)
        at = consumed + np.arange(self.batch_size)
        return np.where(at < self.size, epoch * self.size + at, -1)

    def _batch(self, read: Rows) -> dict[str, torch.Tensor]:
        labels = read.labels
        if self.mask_boundaries:
            labels = np.where(read.crosses, IGNORED_LABEL, labels)
        batch = {"tokens": read.tokens, "labels": labels}
        if self.reset_positions:
            batch["positions"] = positions(read.segments)
        if self.block_diagonal:
            batch["segments"] = read.segments
        return {name: torch.from_numpy(np.ascontiguousarray(x)) for name, x in batch.items()}


def positions(segments: np.ndarray) -> np.ndarray:
    """Return the place of each token within its segment.

    >>> positions(np.array([[0, 0, 0, 1, 1, 2]]))
    array([[0, 1, 2, 0, 1, 0]])
    """
    at = np.arange(segments.shape[1])
    begins = np.ones(segments.shape, bool)
    begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
    return at - np.maximum.accumulate(np.where(begins, at, 0), axis=1)


def _padded(read: Rows, real: np.ndarray) -> Rows:
    """Put rows without labels where there is no real one."""
    rows = []
    for part, fill in zip(read, (0, IGNORED_LABEL, 0, False), strict=True):
        whole = np.full((len(real), part.shape[1]), fill, part.dtype)
        whole[real] = part
        rows.append(whole)
    return Rows(*rows)

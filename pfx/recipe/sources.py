"""Batches for a run: of its prefixes, or of the function that its config names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import Tensor

from pfx.data import Batches, Blend, Documents, Packed, Samples, Windows
from pfx.errors import PfxError, message
from pfx.recipe.config import Data, Run
from pfx.recipe.config_file import function_of
from pfx.recipe.oddities import IGNORED, out_of_range


class BatchError(PfxError, ValueError):
    """A batch that the model cannot take."""


class Source(Protocol):
    """The batch of a step as a pure function of its number."""

    def __call__(self, step: int) -> dict[str, Tensor]:
        """The batch of that number; training asks for any, evaluation below `num_batches`."""
        ...


class HeldOut(Source, Protocol):
    """Held-out data: so many batches."""

    @property
    def num_batches(self) -> int: ...


def sources(run: Run) -> tuple[Source, HeldOut | None]:
    """The training data, and the held-out data if there are some."""
    if run.data.source is not None:
        make: Callable[..., Any] = function_of(run.data.source, "data.source")
        return make(run, "train"), make(run, "valid")
    settings, seed, size = run.data, run.train.seed, run.train.batch_size
    parts = [Documents.open(prefix).split(settings.split) for prefix in settings.prefixes]
    training: list[Samples] = [_rows(settings, part[0]) for part in parts]
    weights = settings.weights or [part[0].num_tokens for part in parts]
    blend = training[0] if len(training) == 1 else Blend(training, weights)
    if run.evaluate.every is None:
        return _batches(settings, blend, size, seed), None
    held_out = [_batches(settings, _rows(settings, part[1]), size, seed, "pad") for part in parts]
    return _batches(settings, blend, size, seed), Joined(tuple(held_out))


def contents(data: Data) -> dict[str, dict[str, int]]:
    """How much is behind each prefix, to tell whether it still is what a run began with."""
    found = {prefix: Documents.open(prefix) for prefix in data.prefixes}
    return {
        prefix: {"documents": len(documents), "tokens": documents.num_tokens}
        for prefix, documents in found.items()
    }


def _rows(settings: Data, documents: Documents) -> Any:
    make = {"windows": Windows, "packed": Packed}[settings.packing]
    return make(documents, settings.seq_len)


def _batches(
    settings: Data, samples: Any, size: int, seed: int, last: Literal["wrap", "pad"] = "wrap"
) -> Batches:
    return Batches(
        samples, size, seed, last,
        reset_positions=settings.reset_positions,
        block_diagonal=settings.block_diagonal,
        mask_boundaries=settings.mask_boundaries,
    )  # fmt: skip


@dataclass(frozen=True)
class Joined:
    """The held-out batches of several sources, one source after the other, each row once."""

    parts: tuple[Batches, ...]

    @property
    def num_batches(self) -> int:
        """Of all sources."""
        return sum(part.steps_per_epoch for part in self.parts)

    def __call__(self, step: int) -> dict[str, Tensor]:
        """The batch of that number."""
        for part in self.parts:
            if step < part.steps_per_epoch:
                return part(step)
            step -= part.steps_per_epoch
        raise ValueError(message(f"held-out batch {step}", "is beyond the last one."))


@dataclass(frozen=True)
class Checked:
    """A source whose ids are all rows of the model's embedding.

    Beyond it a CPU raises an IndexError of nothing in particular, and a GPU dies.
    """

    source: Source
    vocab_size: int | None

    def __call__(self, step: int) -> dict[str, Tensor]:
        """The batch of a step.

        Raises:
            BatchError: naming the ids, and which samples were in the batch.
        """
        batch = self.source(step)
        labels = batch.get("labels")
        found = (
            out_of_range(batch["tokens"], self.vocab_size, "token ids") if "tokens" in batch else []
        )
        if labels is not None:
            found += out_of_range(labels[labels != IGNORED], self.vocab_size, "labels")
        if found:
            ids = self.ids(step)
            samples = "" if ids is None else f"samples: {_some(ids)}"
            fix = "model.config.vocab_size of at least that of the tokenizer that wrote the data"
            raise BatchError(
                message(f"batch {step}:", "cannot be looked up.", *found, samples, fix=fix)
            )
        return batch

    def ids(self, step: int) -> Any:
        """Which samples are in a batch; None where the source does not know."""
        ids = getattr(self.source, "ids", None)
        return None if ids is None else ids(step)


def _some(ids: Any, most: int = 4) -> str:
    """The first of many ids."""
    listed = list(ids)
    more = f", and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(map(str, listed[:most])) + more

"""What is odd in a batch: the usual ways in which data makes a loss jump.

Pure functions of a batch and a few usual ones to compare it with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

IGNORED = -100
LONG_RUN = 16  # of one token; shorter ones are usual in tables, indented code and padding
SHOWN = 8

Batch = Mapping[str, Tensor]


def oddities(batch: Batch, usual: Sequence[Batch], vocab_size: int | None) -> list[str]:
    """Say what sets a batch apart, one line each.

    Args:
        batch: "tokens" and "labels", both (batch, seq) int64; others are not looked at.
        usual: batches of the same data that nothing was wrong with.
        vocab_size: ids from this number on are out of range; None does not check.

    >>> tokens = torch.arange(12).reshape(2, 6)
    >>> oddities({"tokens": tokens, "labels": tokens}, [], 10)
    ['2 token ids are outside of 0...9: 10, 11', '2 labels are outside of 0...9: 10, 11']
    """
    found: list[str] = []
    tokens, labels = batch.get("tokens"), batch.get("labels")
    if tokens is not None:
        seen = [one["tokens"] for one in usual if "tokens" in one]
        found += out_of_range(tokens, vocab_size, "token ids")
        found += duplicate_rows(tokens, seen)
        found += long_runs(tokens, seen)
        found += rare_tokens(tokens, seen)
    if labels is not None:
        found += out_of_range(labels[labels != IGNORED], vocab_size, "labels")
        found += ignored_labels(labels, [one["labels"] for one in usual if "labels" in one])
    return found


def out_of_range(ids: Tensor, vocab_size: int | None, what: str) -> list[str]:
    """Ids that no row of the embedding belongs to."""
    if vocab_size is None:
        return []
    wrong = ids[(ids < 0) | (ids >= vocab_size)]
    if not wrong.numel():
        return []
    shown = ", ".join(map(str, wrong.unique().tolist()[:SHOWN]))
    return [f"{wrong.numel()} {what} are outside of 0...{vocab_size - 1}: {shown}"]


def duplicate_rows(tokens: Tensor, usual: Sequence[Tensor]) -> list[str]:
    """Rows that are there twice, where usual batches have none."""
    if any(_duplicates(other) for other in usual):
        return []
    return [f"rows {_list(rows)} are the same" for rows in _duplicates(tokens)]


def _duplicates(tokens: Tensor) -> list[list[int]]:
    _, number, count = tokens.unique(dim=0, return_inverse=True, return_counts=True)
    repeated = (count > 1).nonzero().flatten()
    return [(number == one).nonzero().flatten().tolist() for one in repeated]


def long_runs(tokens: Tensor, usual: Sequence[Tensor]) -> list[str]:
    """Rows with one token many times in a row: at least 16, a quarter of the row, twice as usual."""
    known = max((int(_longest(other)[0].max()) for other in usual), default=0)
    limit = max(LONG_RUN, tokens.shape[1] // 4, 2 * known)
    lengths, which = _longest(tokens)
    return [
        f"row {row} repeats token {int(which[row])} {int(lengths[row])} times in a row"
        for row in (lengths >= limit).nonzero().flatten().tolist()[:SHOWN]
    ]


def _longest(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The length of each row's longest run of one token, and that token."""
    place = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    starts = torch.ones_like(tokens, dtype=torch.bool)
    starts[:, 1:] = tokens[:, 1:] != tokens[:, :-1]
    begun = torch.where(starts, place, 0).cummax(1).values
    lengths, ends = (place - begun + 1).max(1)
    return lengths, tokens.gather(1, ends.unsqueeze(1)).squeeze(1)


def ignored_labels(labels: Tensor, usual: Sequence[Tensor]) -> list[str]:
    """A share of labels without loss that is far from the usual one."""
    share = lambda x: float((x == IGNORED).double().mean())
    here, known = share(labels), [share(other) for other in usual]
    if here == 1:
        return ["no label counts: all are ignored"]
    if known and (here > max(known) + 0.25 or here < min(known) - 0.25):
        spread = f"{min(known):.0%} to {max(known):.0%}"
        return [f"{here:.0%} of the labels are ignored; usual are {spread}"]
    return []


def rare_tokens(tokens: Tensor, usual: Sequence[Tensor]) -> list[str]:
    """Tokens that the usual batches have far less often than one another.

    Each batch's mean surprise, in nats a token, under the frequencies of the other usual ones; one
    count is added to every id that any of the batches has.
    """
    if len(usual) < 3:
        return []
    # Counted by place among the ids that occur: a wrong id may be as large as an int64 goes.
    batches = [one.flatten() for one in (tokens, *usual)]
    ids, places = torch.cat(batches).unique(return_inverse=True)
    counted = [
        (one, torch.bincount(one, minlength=len(ids)).double())
        for one in places.split([len(one) for one in batches])
    ]
    (suspect, times), *others = counted
    whole = torch.stack([own for _, own in others]).sum(0)
    known = torch.tensor([_surprise(one, whole - own) for one, own in others])
    here = _surprise(suspect, whole)
    if here <= max(1.2 * float(known.mean()), float(known.mean() + 6 * known.std())):
        return []
    rarity = times / (1 + whole)
    shown = ", ".join(map(str, ids[rarity.argsort(descending=True)[:SHOWN]].tolist()))
    return [
        f"its tokens are rare: {here:.2f} nats each by frequency, usual are {known.mean():.2f}; "
        f"most of all {shown}"
    ]


def _surprise(places: Tensor, counts: Tensor) -> float:
    logs = ((counts + 1) / (counts + 1).sum()).log()
    return float(-logs[places].mean())


def _list(rows: Sequence[int]) -> str:
    shown = [str(row) for row in rows[:SHOWN]]
    last = f"{len(rows) - SHOWN} more" if len(rows) > SHOWN else shown.pop()
    return f"{', '.join(shown)} and {last}"

"""Ranks compare what they are about to do, through a store, before they could hang on it.

A collective that one rank does not join waits for ever, and names nobody. So each rank first puts a
hash under its own key; rank 0 waits for all of them, compares, and publishes one verdict, which every
rank returns or raises. Two round trips and O(ranks) messages; nobody waits longer than the timeout.
"""

from __future__ import annotations

import hashlib
import itertools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

from pfx.errors import RuntimeMismatchError, message

# Seconds beyond the timeout: the others wait so much for rank 0's verdict, and rank 0 until they
# have read it (its process may hold the store).
GRACE = 5.0


class Store(Protocol):
    """What is used of torch.distributed's stores: keys are set once and waited for."""

    def set(self, key: str, value: Any, /) -> Any: ...
    def get(self, key: str, /) -> bytes: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def wait(self, keys: list[str], timeout: timedelta, /) -> Any: ...
    def check(self, keys: list[str], /) -> bool: ...


def agree(
    store: Store, name: str, text: str, *, rank: int, size: int, timeout: float, where: str
) -> None:
    """Return once every rank is here with the same text.

    Args:
        store: shared by all ranks.
        name: of what the ranks meet for; the n-th meeting of one rank is the n-th of any other.
        timeout: seconds that this rank waits for the others.
        where: the beginning of an error's first line.

    Raises:
        RuntimeMismatchError: on every rank, naming the ranks that did not come in time, or those
            that differ from rank 0 with the first line in which they do.
    """
    number = store.add(f"pfx/{name}/count/{rank}", 1)
    meeting = _Meeting(store, f"{name} {number}", text, rank, size, timeout)
    store.set(meeting.key("hash", rank), hashlib.sha256(text.encode()).digest())
    problem = meeting.judge() if rank == 0 else meeting.verdict()
    if problem:
        raise RuntimeMismatchError(f"{where} {problem}")


def late(ranks: Sequence[int], size: int, what: str, timeout: float) -> str:
    """The text for ranks that did not come to `what` in time."""
    return message(
        f"{_named(ranks)} of {size} never arrived.",
        "",
        f"the others waited {timeout:g} s at {what}.",
        fix=f"read what {_named(ranks)} printed, or wait longer: PFX_TIMEOUT={2 * timeout:g}",
    )


@dataclass(frozen=True)
class _Meeting:
    store: Store
    name: str
    text: str
    rank: int
    size: int
    timeout: float

    def key(self, *parts: Any) -> str:
        return "/".join(["pfx", self.name.replace(" ", "/"), *map(str, parts)])

    def judge(self) -> str:
        """On rank 0: wait for everybody, compare, and publish what is wrong ("" for nothing)."""
        here = self.present(self.timeout)
        missing = [rank for rank in range(self.size) if rank not in here]
        hashes = [self.store.get(self.key("hash", rank)) for rank in here]
        other = [rank for rank, found in zip(here, hashes, strict=True) if found != hashes[0]]
        if not missing and not other:
            self.store.set(self.key("verdict"), "agreed")
            return ""
        self.store.set(self.key("verdict"), f"show {other[0]}" if other else "late")
        problem = self.late(missing) if missing else self.differing(other)
        self.store.set(self.key("problem"), problem)
        self.arrived([self.key("read", rank) for rank in here if rank], GRACE)
        return problem

    def verdict(self) -> str:
        """On the others: read what rank 0 found; without it, find out alone who is missing."""
        if self.arrived([self.key("verdict")], self.timeout + GRACE):
            verdict = self.store.get(self.key("verdict")).decode()
            if verdict == "agreed":
                return ""
            if verdict == f"show {self.rank}":
                self.store.set(self.key("text", self.rank), zlib.compress(self.text.encode()))
            if self.arrived([self.key("problem")], 2 * GRACE):
                problem = self.store.get(self.key("problem")).decode()
                self.store.set(self.key("read", self.rank), b"")
                return problem
        here = self.present(0.0)
        return self.late([rank for rank in range(self.size) if rank not in here] or [0])

    def differing(self, ranks: Sequence[int]) -> str:
        """Say which ranks differ from this one, and show the first line in which they do."""
        text = self.key("text", ranks[0])
        shown = self.store.get(text) if self.arrived([text], GRACE) else zlib.compress(b"(unknown)")
        ours, theirs = self.text.splitlines(), zlib.decompress(shown).decode().splitlines()
        pairs = itertools.zip_longest(ours, theirs, fillvalue="(nothing)")
        line, (our, their) = next((n, p) for n, p in enumerate(pairs, 1) if p[0] != p[1])
        verb = "differs" if len(ranks) == 1 else "differ"
        return message(
            f"{_named(ranks)} {verb} from rank 0.",
            "",
            f"line {line} of {self.name}, on rank 0: {our.strip()}",
            f"on rank {ranks[0]}: {their.strip()}",
            fix="call the same functions in the same order, with the same shapes, on every rank",
        )

    def late(self, ranks: Sequence[int]) -> str:
        return late(ranks, self.size, self.name, self.timeout)

    def present(self, seconds: float) -> list[int]:
        """The ranks that have come; all of them, if they do so in time."""
        keys = [self.key("hash", rank) for rank in range(self.size)]
        if seconds and self.arrived(keys, seconds):
            return list(range(self.size))
        return [rank for rank, key in enumerate(keys) if self.has(key)]

    def arrived(self, keys: list[str], seconds: float) -> bool:
        """Wait until all keys are set; False when time is over or the store is gone."""
        try:
            self.store.wait(keys, timedelta(seconds=seconds))
        except RuntimeError:
            return False
        return True

    def has(self, key: str) -> bool:
        try:
            return self.store.check([key])
        except RuntimeError:
            return False


def _named(ranks: Sequence[int]) -> str:
    """Name some ranks, the first ten: "rank 3", "ranks 1, 2 and 5"."""
    shown = [str(rank) for rank in ranks[:10]]
    if len(ranks) == 1:
        return f"rank {shown[0]}"
    last = f"{len(ranks) - 10} more" if len(ranks) > 10 else shown.pop()
    return f"ranks {', '.join(shown)} and {last}"

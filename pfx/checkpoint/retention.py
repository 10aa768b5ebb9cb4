"""Which steps are kept, by tier; and how those that are not go away without leaving half a step."""

from __future__ import annotations

import math
import os
import re
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

from pfx.checkpoint.directory import (
    DISCARDED,
    UNFINISHED,
    Place,
    head_of,
    places,
)
from pfx.checkpoint.disk import sync_folder
from pfx.checkpoint.manifest import Head
from pfx.errors import CheckpointError, message

# What an attempt to save, or to remove, can leave; other files are not ours, however they are called.
_LEFT = re.compile(
    rf"(?:{re.escape(UNFINISHED)}|{re.escape(DISCARDED)})step-\d{{8,18}}(?:~\d+)?-[0-9a-f]+"
    rf"|\.?{re.escape(UNFINISHED)}failed-\d{{5,}}-[0-9a-f]+(?:-[0-9a-f]+)?"
    r"|\.latest-[0-9a-f]+"
)

TIERS = ("temporary", "regular", "best", "final")


def check_tier(tier: str, keep: int | None, metric: float | None) -> None:
    """Raise unless a tier, its keep and its metric go together."""
    if tier not in TIERS:
        fix = f"one of {', '.join(map(repr, TIERS))}"
        raise CheckpointError(message(f"save: tier={tier!r}", "is unknown.", fix=fix))
    if (tier == "best") != (metric is not None):
        what = "needs a metric to go by." if metric is None else "has no use for a metric."
        fix = 'tier="best", metric=loss' if metric is None else "drop metric="
        raise CheckpointError(message(f"save: tier={tier!r}", what, fix=fix))
    if keep is not None and (type(keep) is not int or keep < 1):
        what = "must be an integer of at least 1, or None."
        raise CheckpointError(message(f"save: keep={keep!r}", what))
    if keep is not None and tier in ("temporary", "final"):
        kept = {"temporary": "only the last one is kept", "final": "all are kept"}[tier]
        what = f"has no meaning for tier={tier!r}: {kept}."
        raise CheckpointError(message(f"save: keep={keep}", what, fix="drop keep="))


def superfluous(heads: Mapping[Place, Head], saved: Place, keep: int | None) -> list[Place]:
    """The steps that go once `saved` is durable.

    Earlier copies of the same step, but for those that another tier keeps; all other temporary
    ones, when it is one or the final one; and of its own tier what is beyond the `keep` newest, or
    the best.
    """
    now = heads[saved]
    others = [place for place in heads if place != saved]
    replaced = (now.tier, "temporary")
    copies = [p for p in others if p.step == saved.step and heads[p].tier in replaced]
    tier = [p for p in others if heads[p].tier == now.tier and p not in copies]
    if now.tier in ("temporary", "final"):
        return copies + [p for p in others if heads[p].tier == "temporary" and p not in copies]
    if now.tier == "best":
        tier.sort(key=lambda place: rank(heads[place]))
        better = sum(rank(heads[place]) <= rank(now) for place in tier)
        keep = keep or 1
        return copies + tier[keep if better >= keep else keep - 1 :]
    if now.tier == "regular" and keep is not None:
        tier.sort(key=lambda place: heads[place].saved, reverse=True)
        return copies + tier[keep - 1 :]
    return copies


def rank(head: Head) -> tuple[bool, float, int]:
    """The place of a step among the best: smaller is better, and what is no number comes last."""
    metric = math.nan if head.metric is None else head.metric
    return math.isnan(metric), -metric if head.higher else metric, -head.saved


def now_in(directory: Path) -> int:
    """The time, in nanoseconds; later than that of any step, although clocks are set back."""
    latest = max((head.saved for head in _heads(directory)[0].values()), default=0)
    return min(max(time.time_ns(), latest + 1), (1 << 63) - 1)


def _heads(directory: Path) -> tuple[dict[Place, Head], list[Place]]:
    """The heads of the complete steps, and the steps that are none."""
    heads: dict[Place, Head] = {}
    damaged: list[Place] = []
    for place in places(directory):
        try:
            heads[place] = head_of(place)
        except CheckpointError:
            damaged.append(place)
    return heads, damaged


def retire(directory: Path, saved: Place, keep: int | None) -> None:
    """Remove what is superfluous now that `saved` is durable and `latest`."""
    heads, damaged = _heads(directory)
    for place in damaged:  # not ours to judge, unless it has just been saved anew
        if place.step == saved.step:
            discard(place.path)
    if saved not in heads:
        what = "is gone again: something else saves into this directory, or removes from it."
        raise CheckpointError(message(str(saved.path), what, fix="a directory for each run"))
    for place in superfluous(heads, saved, keep):
        discard(place.path)


def discard(path: Path) -> None:
    """Remove a step's folder: it stops being a step before its files go."""
    gone = path.with_name(f"{DISCARDED}{path.name}-{os.urandom(4).hex()}")
    os.rename(path, gone)
    sync_folder(path.parent)
    shutil.rmtree(gone, ignore_errors=True)


def clean(directory: Path, nonce: str) -> None:
    """Remove what killed attempts have left; `nonce` is of the attempt that is being made."""
    for name in os.listdir(directory):
        if _LEFT.fullmatch(name) and nonce not in name:
            path = directory / name
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()

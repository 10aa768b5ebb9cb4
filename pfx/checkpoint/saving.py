"""`save` and `save_async`: a tree to a directory, by all ranks together."""

from __future__ import annotations

import functools
import secrets
import threading
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pfx.checkpoint import image
from pfx.checkpoint.commit import Attempt, Part, begin, fail, finish
from pfx.checkpoint.directory import Place
from pfx.checkpoint.manifest import Head, Leaf, Manifest, Piece
from pfx.checkpoint.retention import check_tier, now_in, retire
from pfx.checkpoint.snapshot import Contents, contents_of, digest, mesh_of
from pfx.checkpoint.values import pack, unpack
from pfx.errors import CheckpointError, message
from pfx.runtime.process_world import World, world_of


class Handle:
    """A save that goes on in the background.

    Attributes:
        step: what is being saved.
    """

    def __init__(self, step: int, run: Callable[[], Place]) -> None:
        self.step = step
        self._place: Place | None = None
        self._error: BaseException | None = None
        self._told = False  # whether the error has been raised somewhere
        self._thread = threading.Thread(
            target=self._work, args=(run,), name=f"pfx-checkpoint-{step}", daemon=False
        )
        self._thread.start()

    def _work(self, run: Callable[[], Place]) -> None:
        try:
            self._place = run()
        except BaseException as error:  # raised where somebody looks
            self._error = error

    def join(self) -> None:
        """Return once it has ended, well or not."""
        self._thread.join()

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def check(self) -> None:
        """Raise what has gone wrong so far; does not wait."""
        if self.done():
            self.wait()

    def wait(self) -> Path:
        """Return the step's folder once it is durable, or raise why it is not.

        Raises:
            CheckpointError: it could not be written, here or on another rank.
        """
        self._thread.join()
        if self._error is not None:
            self._told = True
            raise self._error
        assert self._place is not None
        return self._place.path

    def untold(self) -> str:
        """Wait, and return an error that has not been raised yet; nothing if there is none."""
        self._thread.join()
        told, self._told = self._told, True
        return "" if self._error is None or told else str(self._error)


class Writer:
    """What saves into one directory from this process: at most one save at a time."""

    def __init__(self) -> None:
        self.pending: Handle | None = None
        self.room: image.Room | None = None  # kept from save to save: new pages are slow to come by

    def untold(self) -> str:
        """Wait for the pending save, and return its error if nobody has seen it."""
        pending, self.pending = self.pending, None
        return "" if pending is None else pending.untold()

    def staged(self, contents: Contents) -> image.Room:
        """A copy of all pieces in this process's own memory."""
        pinned = any(s.data is not None and s.data.is_cuda for s in contents.sources)
        if self.room is None or len(self.room) < contents.size:
            self.room = None
            self.room = image.room_for(contents.size, pinned=pinned)
        image.fill(self.room, contents.sources, 0, image.THREADS)
        return self.room


@functools.cache
def writer_of(directory: Path) -> Writer:
    """The writer of a directory in this process."""
    return Writer()


def wait_for_pending(directory: Path) -> None:
    """Return once no save into a directory is going on; its error stays for the next save or check."""
    pending = writer_of(directory).pending
    if pending is not None:
        pending.join()


@dataclass(frozen=True)
class _Request:
    """What was asked for besides the tree."""

    directory: Path
    step: int
    metadata: Any
    tier: str
    keep: int | None
    metric: float | None
    higher: bool


def save(
    directory: str | Path,
    step: int,
    tree: Any,
    *,
    metadata: Any = None,
    tier: str = "regular",
    keep: int | None = None,
    metric: float | None = None,
    higher_is_better: bool = False,
    world: World | None = None,
) -> Path:
    """Save a tree as one step; it is complete, durable and `latest` when this returns.

    Every rank of a process mesh calls it and writes its own shards; what several ranks hold is
    written once. Law: killed at any moment, the directory still has the steps that it had before.

    Args:
        directory: of all steps of a run; all ranks must see the same one.
        step: at least 0. A step saved again in its tier replaces the one before once it is complete;
            saved in another tier, each tier keeps its own.
        tree: leaves are Arrays, torch tensors or numpy arrays (the same on every rank), int, float,
            bool, str, bytes and None.
        metadata: plain data for `metadata`; read without the tree.
        tier: "regular"; "temporary", which the next temporary one replaces; "best", by `metric`;
            "final", never removed.
        keep: so many regular steps (the newest) or best ones (1 by default) are kept.
        metric: what "best" goes by; smaller is better unless `higher_is_better`.
        world: the processes that save together; None: those of the Arrays' mesh.

    Returns:
        The folder of the step.

    Raises:
        CheckpointError: on every rank, when something cannot be saved or written on one of them.

    >>> import tempfile, torch
    >>> from pfx.checkpoint import latest, restore
    >>> with tempfile.TemporaryDirectory() as run:
    ...     save(run, 10, {"w": torch.ones(2), "seen": 640}).name
    ...     latest(run), restore(run, like={"w": torch.empty(2), "seen": 0})
    'step-00000010'
    (10, {'seen': 640, 'w': tensor([1., 1.])})
    """
    asked = _request(directory, step, metadata, tier, keep, metric, higher_is_better)
    world = world_of(mesh_of(tree)) if world is None else world
    contents, attempt = _agreed(asked, tree, world)
    found: Place | None = None
    problem = ""
    try:
        found = _saved(asked, attempt, contents, None)
    except CheckpointError as error:
        if world.size == 1:
            raise
        problem = str(error)
    _raise_first(asked, world.exchange(problem, f"the end of the save of step {step}"))
    assert found is not None
    return found.path


def save_async(
    directory: str | Path,
    step: int,
    tree: Any,
    *,
    metadata: Any = None,
    tier: str = "regular",
    keep: int | None = None,
    metric: float | None = None,
    higher_is_better: bool = False,
    world: World | None = None,
) -> Handle:
    """Copy a tree into host memory, return, and save it in the background.

    The copy is made before this returns: later changes of the tensors, or a step that writes over
    donated Arrays, do not reach the file. One save is pending at a time; the next one waits for it
    and raises its error, as do `Handle.check` and `Handle.wait`.

    Args:
        directory, step, tree, metadata, tier, keep, metric, higher_is_better, world: as for `save`.

    Raises:
        CheckpointError: the save before this one failed, on any rank, or this one cannot begin.

    >>> import tempfile, torch
    >>> from pfx.checkpoint import restore
    >>> w = torch.ones(1)
    >>> with tempfile.TemporaryDirectory() as run:
    ...     handle = save_async(run, 1, {"w": w})
    ...     w += 1
    ...     handle.wait().name, restore(run, like={"w": w})
    ('step-00000001', {'w': tensor([1.])})
    """
    asked = _request(directory, step, metadata, tier, keep, metric, higher_is_better)
    world = world_of(mesh_of(tree)) if world is None else world
    contents, attempt = _agreed(asked, tree, world)
    writer = writer_of(asked.directory)
    room = writer.staged(contents)
    run = functools.partial(_saved, asked, attempt, contents.without_data(), room)
    writer.pending = Handle(step, run)
    return writer.pending


def _request(
    directory: str | Path,
    step: int,
    metadata: Any,
    tier: str,
    keep: int | None,
    metric: float | None,
    higher: bool,  # noqa: FBT001
) -> _Request:
    if type(step) is not int or not 0 <= step < 10**18:
        what = "must be an integer of at least 0."
        raise CheckpointError(message(f"save: step={step!r}", what))
    metric = None if metric is None else float(metric)
    check_tier(tier, keep, metric)
    try:
        metadata = unpack(pack(metadata))
    except (TypeError, ValueError) as error:
        what = f"cannot be saved: {error}."
        fix = "dicts, lists, numbers, text and bytes; tensors belong into the tree"
        raise CheckpointError(message("save: metadata", what, fix=fix)) from error
    return _Request(Path(directory).resolve(), step, metadata, tier, keep, metric, higher)


def _agreed(asked: _Request, tree: Any, world: World) -> tuple[Contents, Attempt]:
    """What this rank saves, once all ranks are here, without errors, to save the same tree."""
    problem = writer_of(asked.directory).untold()
    problem = problem and f"the save before this one failed:\n{problem}"
    contents = Contents()
    try:
        contents = contents_of(tree, world)
    except CheckpointError as error:
        if world.size == 1 and not problem:
            raise
        problem = problem or str(error)
    terms = [f"step {asked.step}", f"tier {asked.tier}", f"keep {asked.keep}", f"{asked.metric}"]
    lines = [*terms, *contents.lines()]
    mine = {"problem": problem, "nonce": secrets.token_hex(8), "digest": digest(lines)}
    found = world.exchange(mine, f"the save of step {asked.step}")
    _raise_first(asked, [each["problem"] for each in found])
    if len({each["digest"] for each in found}) > 1:
        raise _differing(asked, world, lines)
    attempt = Attempt(asked.directory, asked.step, found[0]["nonce"], world)
    return contents, attempt


def _raise_first(asked: _Request, problems: Sequence[str]) -> None:
    """Raise the first rank's problem; every rank raises the same."""
    for rank, problem in enumerate(problems):
        if problem:
            where = f"save: step {asked.step} in {asked.directory}"
            who = f"cannot be saved; rank {rank} says:" if len(problems) > 1 else "cannot be saved:"
            raise CheckpointError(message(where, who, *problem.splitlines()))


def _differing(asked: _Request, world: World, lines: list[str]) -> CheckpointError:
    """The error of ranks that would save different trees: the first line in which they differ."""
    text = zlib.compress("\n".join(lines).encode("utf-8", "replace"))
    each = [zlib.decompress(text).decode().splitlines() for text in world.exchange(text)]
    rank = next(rank for rank, other in enumerate(each) if other != each[0])
    pairs = zip([*each[0], "(nothing)"], [*each[rank], "(nothing)"], strict=False)
    ours, theirs = next(pair for pair in pairs if pair[0] != pair[1])
    return CheckpointError(
        message(
            f"save: step {asked.step} in {asked.directory}",
            f"differs between ranks 0 and {rank}.",
            f"on rank 0: {ours}",
            f"on rank {rank}: {theirs}",
            fix="save the same tree on every rank; what differs belongs into an Array's shards",
        )
    )


def _saved(asked: _Request, attempt: Attempt, contents: Contents, room: image.Room | None) -> Place:
    """Write this rank's pieces and see the step complete."""
    try:
        begin(attempt)
        part = _written(attempt, contents, room)
        make = functools.partial(_manifest, asked, attempt.nonce, contents)
        place = finish(attempt, part, make)
    except BaseException as error:
        fail(attempt, error)
        if isinstance(error, OSError):
            what = f"cannot be written: {error.strerror or error}."
            raise CheckpointError(message(attempt.where, what, str(error))) from error
        raise
    if attempt.world.rank == 0:
        try:
            retire(asked.directory, place, asked.keep)
        except OSError as error:
            what = f"is saved, but an earlier one cannot be removed: {error.strerror or error}."
            raise CheckpointError(message(attempt.where, what, str(error))) from error
    return place


def _written(attempt: Attempt, contents: Contents, room: image.Room | None) -> Part:
    if not contents.sources:
        return 0, []
    sums = image.write(attempt.shard, contents.sources, contents.size, room)
    name = attempt.shard.name
    pieces = [
        (source.leaf, Piece(name, source.offset, source.nbytes, found, source.box))
        for source, found in zip(contents.sources, sums, strict=True)
    ]
    return contents.size, pieces


def _manifest(asked: _Request, nonce: str, contents: Contents, parts: Sequence[Part]) -> Manifest:
    """The manifest of all ranks' parts."""
    pieces: dict[int, list[Piece]] = {}
    for _, found in parts:
        for leaf, piece in found:
            pieces.setdefault(leaf, []).append(piece)
    leaves: list[Leaf] = []
    for number, leaf in enumerate(contents.leaves):
        own = sorted(pieces.get(number, ()), key=lambda piece: piece.box)
        leaves.append(replace(leaf, pieces=tuple(own)))
    files = {f"{rank:05d}.bin": size for rank, (size, _) in enumerate(parts) if size}
    saved = now_in(asked.directory)
    head = Head(asked.step, nonce, saved, asked.tier, asked.metric, asked.higher, files)
    return Manifest(head, tuple(leaves), contents.mesh, asked.metadata)

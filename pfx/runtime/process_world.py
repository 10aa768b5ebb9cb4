"""The processes behind a mesh: which one this is, small objects exchanged, and waiting for all.

Everything here works before any collective has run and with any backend: what is exchanged goes
through the store that the ranks have met at. A mesh that is not one of processes has this process
alone, and needs no store.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import msgpack

from pfx.errors import PfxError, RuntimeMismatchError, message
from pfx.mesh import Mesh
from pfx.runtime.fingerprint import GRACE, Store, late


class World(Protocol):
    """Processes that work together.

    Attributes:
        rank: this process's number.
        size: how many there are.
        patience: seconds that one waits for another.
    """

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def patience(self) -> float: ...

    def exchange(self, value: Any, name: str = "exchange") -> list[Any]:
        """What every process gave, by rank; all must call it, in the same order."""
        ...


@dataclass(frozen=True)
class Alone:
    """A world of one process.

    >>> Alone().exchange("hello")
    ['hello']
    """

    rank: int = 0
    size: int = 1
    patience: float = 600.0

    def exchange(self, value: Any, name: str = "exchange") -> list[Any]:
        """A list with the value alone, as it would come back from the others."""
        return [_unpacked(_packed(value))]


@dataclass(frozen=True)
class Processes:
    """Processes that share a store of torch.distributed."""

    store: Store
    rank: int
    size: int
    patience: float
    where: str = "process mesh:"

    def exchange(self, value: Any, name: str = "exchange") -> list[Any]:
        """What every process gave, by rank: each sends one message, and rank 0 hands all of them out.

        Raises:
            RuntimeMismatchError: on every rank, naming those that did not come in time.
        """
        number = self.store.add(f"pfx/world/count/{self.rank}", 1)
        self.store.set(_key(number, self.rank), _packed(value))
        if self.rank == 0:
            missing, values = found = self._gathered(number)
            self.store.set(_key(number, "all"), _packed(found))
            if missing:  # this process may hold the store: not gone before the others have read
                here = [rank for rank in range(1, self.size) if rank not in missing]
                self._arrived([_key(number, f"read/{rank}") for rank in here], GRACE)
        elif self._arrived([_key(number, "all")], self.patience + GRACE):
            missing, values = _unpacked(self.store.get(_key(number, "all")))
            if missing:
                self.store.set(_key(number, f"read/{self.rank}"), b"")
        else:
            missing, values = [0], []
        if missing:
            what = late(missing, self.size, name, self.patience)
            raise RuntimeMismatchError(f"{self.where} {what}")
        return [_unpacked(each) for each in values]

    def _gathered(self, number: int) -> tuple[list[int], list[bytes]]:
        """On rank 0: the ranks that are missing, or else what all gave."""
        keys = [_key(number, rank) for rank in range(self.size)]
        if not self._arrived(keys, self.patience):
            return [rank for rank, key in enumerate(keys) if not self.store.check([key])], []
        values = [self.store.get(key) for key in keys]
        for rank in range(self.size) if number > 1 else ():  # all have read the exchange before
            self._forget(_key(number - 1, rank))
        self._forget(_key(number - 1, "all"))
        return [], values

    def _arrived(self, keys: list[str], seconds: float) -> bool:
        try:
            self.store.wait(keys, timedelta(seconds=seconds))
        except RuntimeError:
            return False
        return True

    def _forget(self, key: str) -> None:
        """Free a key; a store that cannot keeps it."""
        delete = getattr(self.store, "delete_key", None)
        if delete is not None:
            delete(key)


def world_of(mesh: Mesh | None = None) -> World:
    """The processes of a mesh; without one, those that torch.distributed already runs, if any.

    Raises:
        MeshError: when a process mesh was not started by a launcher.
        RuntimeMismatchError: when the first meeting of its processes fails.

    >>> from pfx.mesh import make_mesh
    >>> world_of(make_mesh(dp=4, kind="simulated")).size
    1
    """
    if mesh is not None and mesh.kind != "process":
        return Alone()
    from pfx.runtime import process_start  # a simulated mesh has no use for torch.distributed

    if mesh is None:
        found = process_start.running()
        if found is None:
            return Alone()
        where, ranks = "process mesh:", found
    else:
        where, ranks = f"process mesh {mesh}:", process_start.ranks(mesh)
    meeting = process_start.seconds(None, process_start.MEETING)
    patience = process_start.seconds(None, process_start.COLLECTIVE)
    store = (
        process_start.start(mesh, ranks, meeting, patience)
        if mesh
        else process_start.shared_store()
    )
    return Processes(store, ranks.rank, ranks.size, patience, where)


def rank(mesh: Mesh) -> int:
    """This process's number on a mesh; 0 where the mesh is simulated.

    >>> from pfx.mesh import make_mesh
    >>> rank(make_mesh(dp=4, kind="simulated"))
    0
    """
    return world_of(mesh).rank


def count(mesh: Mesh) -> int:
    """How many processes a mesh has; 1 where it is simulated.

    >>> from pfx.mesh import make_mesh
    >>> count(make_mesh(dp=4, kind="simulated"))
    1
    """
    return world_of(mesh).size


def exchange(mesh: Mesh, value: Any, name: str = "exchange") -> list[Any]:
    """Give a small object to every process of a mesh, and get theirs, by rank.

    Args:
        value: what msgpack can hold; tuples come back as lists.
        name: what an error calls it.

    Raises:
        RuntimeMismatchError: on every rank, naming those that did not come in time.

    >>> from pfx.mesh import make_mesh
    >>> exchange(make_mesh(dp=4, kind="simulated"), {"loss": 1.5})
    [{'loss': 1.5}]
    """
    return world_of(mesh).exchange(value, name)


def barrier(mesh: Mesh, name: str = "a barrier") -> None:
    """Return once every process of a mesh is here.

    Raises:
        RuntimeMismatchError: on every rank, naming those that did not come in time.
    """
    exchange(mesh, None, name)


@contextlib.contextmanager
def together(world: World, where: str, error: type[PfxError]) -> Iterator[None]:
    """Run a block in every process; an error in one becomes an error in all, so that none waits for it.

    Args:
        where: what errors begin with.
        error: what to raise where the block went well, but not in another process.

    >>> from pfx.errors import CheckpointError
    >>> with together(Alone(), "restore:", CheckpointError):
    ...     print("done")
    done
    """
    raised: Exception | None = None
    try:
        yield
    except Exception as caught:
        raised = caught
    texts = world.exchange(None if raised is None else str(raised), where)
    if raised is not None:
        raise raised
    failed = [rank for rank, text in enumerate(texts) if text is not None]
    if failed:
        ranks = ", ".join(map(str, failed))
        raise error(message(where, f"failed on rank {ranks}.", *texts[failed[0]].splitlines()))


def _key(number: int, what: Any) -> str:
    return f"pfx/world/{number}/{what}"


def _packed(value: Any) -> bytes:
    return bytes(msgpack.packb(value, use_bin_type=True) or b"")


def _unpacked(data: bytes) -> Any:
    return msgpack.unpackb(data, raw=False, strict_map_key=False)

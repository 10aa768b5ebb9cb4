"""Processes exchange small objects through a store: here threads play them, each with its rank."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st
from torch.distributed import HashStore

from pfx import make_mesh
from pfx.errors import RuntimeMismatchError
from pfx.runtime import process_world
from pfx.runtime.process_world import Alone, Processes, world_of

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


def together(size: int, patience: float, act: Any, *, absent: tuple[int, ...] = ()) -> list[Any]:
    """What `act(world)` returns or raises in each process that is there."""
    store = HashStore()
    present = [rank for rank in range(size) if rank not in absent]

    def one(rank: int) -> Any:
        try:
            return act(Processes(store, rank, size, patience))
        except RuntimeMismatchError as error:
            return error

    with ThreadPoolExecutor(len(present)) as threads:
        return list(threads.map(one, present))


@hypothesis.given(st.lists(st.lists(VALUES, min_size=2, max_size=2), min_size=1, max_size=4))
def test_every_process_gets_what_all_gave_in_the_order_of_ranks(given: list[list[Any]]) -> None:
    act = lambda world: [world.exchange(value) for value in given[world.rank]]
    expected = [list(column) for column in zip(*given, strict=True)]
    assert together(len(given), 20.0, act) == [expected] * len(given)


def test_a_missing_process_is_named_by_all_others() -> None:
    errors = together(4, 0.2, lambda world: world.exchange(1, "a save"), absent=(2,))
    assert len(errors) == 3
    for error in errors:
        assert str(error).startswith("process mesh: rank 2 of 4 never arrived.")
        assert "waited 0.2 s at a save" in str(error)


def test_keys_of_earlier_exchanges_are_freed() -> None:
    store = HashStore()
    world = Processes(store, 0, 1, 5.0)
    for _ in range(5):
        world.exchange("x" * 100)
    assert store.num_keys() == 3  # a counter, and the last value twice


def test_a_simulated_mesh_is_a_world_of_this_process() -> None:
    mesh = make_mesh(dp=8, kind="simulated")
    assert isinstance(world_of(mesh), Alone) and isinstance(world_of(), Alone)
    assert (process_world.rank(mesh), process_world.count(mesh)) == (0, 1)
    assert process_world.exchange(mesh, (1, "a")) == [[1, "a"]]
    process_world.barrier(mesh)


def test_what_cannot_be_packed_is_refused_before_anybody_waits() -> None:
    with pytest.raises(TypeError):
        Alone().exchange(object())

"""Arrays saved on one mesh and restored on another, by one process or by several.

Several processes are played by threads here, each with its rank, its parts and its own world; real
ones are in `tests/dist`.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch.distributed import HashStore

import pfx
from pfx import Array, Deal, Mesh, P, ShapeDtype, checkpoint, make_mesh
from pfx.checkpoint import boxes
from pfx.checkpoint import directory as places
from pfx.checkpoint.reading import Shards
from pfx.errors import CheckpointError
from pfx.runtime.process_world import Processes
from pfx.spec import Layout, layout_of, local_bytes, part_of

EXAMPLES = int(os.environ.get("PFX_EXAMPLES", "40"))


def ranks(size: int, act: Any, patience: float = 20.0) -> list[Any]:
    """What ``act(world)`` returns or raises in each of some processes."""
    store, found = HashStore(), [None] * size

    def one(rank: int) -> None:
        try:
            found[rank] = act(Processes(store, rank, size, patience))
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def ok(found: list[Any]) -> list[Any]:
    for each in found:
        if isinstance(each, Exception):
            raise each
    return found


def held(x: torch.Tensor, mesh: Mesh, spec: P, rank: int) -> Array:
    """What a rank of a process mesh holds of a global tensor."""
    layout, here = layout_of(spec, x.shape, mesh), mesh.coordinate(rank)
    return Array(tuple(x.shape), x.dtype, mesh, layout, (part_of(x, layout, mesh, here),), here)


@st.composite
def placed(draw: st.DrawFn, shape: Sequence[int], kind: str) -> tuple[Mesh, P]:
    """A mesh of 1 to 12 devices and a spec that fits a shape, dealt unevenly or not."""
    sizes = draw(
        st.lists(st.integers(1, 4), max_size=3).filter(lambda sizes: math.prod(sizes) <= 12)
    )
    axes = dict(zip("abc", sizes, strict=False))
    deals = {}
    if axes and draw(st.booleans()):
        blocks = draw(st.lists(st.integers(0, axes["a"] - 1), max_size=3))
        order = draw(st.permutations([*range(axes["a"]), *blocks]))
        rest = draw(st.lists(st.integers(0, 3), min_size=len(order) - 1, max_size=len(order) - 1))
        last = shape[0] - sum(rest) if shape else 0
        deals = {"a": Deal(tuple(order), (*rest, last) if last >= 0 else ())}
    mesh = make_mesh(kind, deals=deals, **axes)
    left, entries = draw(st.permutations(list(axes))), []
    for n in shape:
        some = [tuple(left[:count]) for count in range(len(left) + 1)]
        entry = draw(st.sampled_from([axes for axes in some if mesh.splits(axes, n)]))
        left = left[len(entry) :]
        entries.append(entry or None)
    return mesh, P(*entries)


SHAPES = st.lists(st.sampled_from([12, 6, 4, 8, 5, 1]), max_size=3)


@hypothesis.given(SHAPES, st.data())
@hypothesis.settings(max_examples=EXAMPLES)
def test_any_mesh_to_any_mesh(
    tmp_path_factory: pytest.TempPathFactory, shape: list[int], data: st.DataObject
) -> None:
    """Simulated or of processes, on both sides."""
    run = tmp_path_factory.mktemp("run")
    x = torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape)
    before, spec = data.draw(placed(shape, data.draw(st.sampled_from(["simulated", "process"]))))
    after, wanted = data.draw(placed(shape, data.draw(st.sampled_from(["simulated", "process"]))))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(boxes, "LARGEST", data.draw(st.sampled_from([16 << 20, 64])))
        patch.setattr(boxes, "SMALLEST", data.draw(st.sampled_from([1, 64])))
        if before.kind == "simulated":
            checkpoint.save(run, 1, {"x": pfx.device_put(x, before, spec)})
        else:
            save = lambda world: checkpoint.save(
                run, 1, {"x": held(x, before, spec, world.rank)}, world=world
            )
            ok(ranks(before.size, save))
    assert checkpoint.verify(run) == []
    like = {"x": ShapeDtype(tuple(shape), torch.float64)}
    if after.kind == "simulated":
        found = checkpoint.restore(run, like=like, mesh=after, specs=wanted)["x"]
        assert torch.equal(pfx.device_get(found), x)
        assert found.layout == layout_of(wanted, shape, after)
        return
    restore = lambda world: checkpoint.restore(
        run, like=like, mesh=after, specs={"x": wanted}, world=world
    )
    for rank, each in enumerate(ok(ranks(after.size, restore))):
        want = held(x, after, wanted, rank)
        assert each["x"].layout == want.layout and each["x"].coordinate == want.coordinate
        assert torch.equal(each["x"].parts[0], want.parts[0])


def test_each_process_reads_only_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written on dp=2 x tp=2, read on tp=4: rows and columns of a matrix, and a replicated vector.

    What all read in part, one reads once more, to check it.
    """
    before, after = (make_mesh("process", **axes) for axes in ({"dp": 2, "tp": 2}, {"tp": 4}))
    tree = {"w": torch.randn(64, 32 << 10), "v": torch.randn(32 << 10, 64), "b": torch.randn(100)}
    specs = {"w": P("dp", "tp"), "v": P("tp"), "b": P()}
    hold = lambda mesh, specs, rank: {
        key: held(x, mesh, specs[key], rank) for key, x in tree.items()
    }
    save = lambda world: checkpoint.save(tmp_path, 1, hold(before, specs, world.rank), world=world)
    ok(ranks(4, save))
    counted: dict[int, list[int]] = {}
    close = Shards.__exit__

    def count(shards: Shards, *args: Any) -> None:
        counted.setdefault(threading.get_ident(), []).append(shards.bytes_read)
        close(shards, *args)

    monkeypatch.setattr(Shards, "__exit__", count)
    wanted = {"w": P(None, "tp"), "v": P("tp"), "b": P()}
    like = {key: ShapeDtype(tuple(x.shape)) for key, x in tree.items()}

    def restore(world: Processes) -> list[int]:
        found = checkpoint.restore(tmp_path, like=like, mesh=after, specs=wanted, world=world)
        for key, array in hold(after, wanted, world.rank).items():
            assert torch.equal(found[key].parts[0], array.parts[0])
        return counted[threading.get_ident()]

    own = sum(
        local_bytes(x.shape, x.dtype, layout_of(wanted[key], x.shape, after), after)
        for key, x in tree.items()
    )
    read = ok(ranks(4, restore))
    assert [first for first, _ in read] == [own] * 4
    assert own < sum(x.nbytes for x in tree.values()) / 3.9
    assert sum(again for _, again in read) == tree["w"].nbytes


@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=20)
def test_a_flipped_bit_is_found_wherever_its_piece_goes(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    run = tmp_path_factory.mktemp("run")
    shape = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    before, spec = data.draw(placed(shape, "simulated"))
    after, wanted = data.draw(placed(shape, "process"))
    x = torch.randn(shape, dtype=torch.float64)
    checkpoint.save(run, 1, {"x": pfx.device_put(x, before, spec)})
    place = places.place_of(run, 1)
    pieces = places.manifest_of(place).leaves[0].pieces
    piece = data.draw(st.sampled_from(pieces))
    path = place.path / piece.file
    written = bytearray(path.read_bytes())
    at = piece.offset + data.draw(st.integers(0, piece.length - 1))
    written[at] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(written)
    restore = lambda world: checkpoint.restore(
        run, like={"x": ShapeDtype(x.shape, x.dtype)}, mesh=after, specs={"x": wanted}, world=world
    )
    for error in ranks(after.size, restore):
        assert isinstance(error, CheckpointError) and "is damaged" in str(error)


def test_what_several_processes_hold_is_written_once_and_shared_evenly(tmp_path: Path) -> None:
    mesh = make_mesh("process", dp=4)
    tree = {"large": torch.randn(1 << 12, 1 << 10), **{f"x{i}": torch.randn(9) for i in range(40)}}
    save = lambda world: checkpoint.save(
        tmp_path,
        1,
        {key: held(x, mesh, P(), world.rank) for key, x in tree.items()} | {"plain": tree["x0"]},
        world=world,
    )
    ok(ranks(4, save))
    sizes = places.head_of(places.place_of(tmp_path, 1)).files
    pages = sum(-(-x.nbytes // 4096) for x in tree.values()) + 1
    assert len(sizes) == 4 and sum(sizes.values()) == 4096 * pages
    assert max(sizes.values()) - min(sizes.values()) <= 4096
    assert checkpoint.verify(tmp_path) == []


def test_sums_that_devices_still_owe_are_added_up(tmp_path: Path) -> None:
    mesh = make_mesh(dp=2)
    parts = (torch.ones(3), torch.tensor([1.0, 2.0, 3.0]))
    owed = Array((3,), torch.float32, mesh, Layout(((),), ("dp",)), parts)
    checkpoint.save(tmp_path, 1, {"g": owed})
    found = checkpoint.restore(tmp_path, like={"g": owed})["g"]
    assert pfx.device_get(found).tolist() == [2.0, 3.0, 4.0] and found.layout.partial == ()


def test_arrays_come_back_where_those_of_like_lie(tmp_path: Path) -> None:
    mesh = make_mesh(dp=2)
    tree = {"x": pfx.device_put(torch.arange(4), mesh, P("dp")), "n": None, "y": torch.ones(2)}
    checkpoint.save(tmp_path, 1, tree)
    found = checkpoint.restore(tmp_path, like=tree)
    assert found["x"].layout == tree["x"].layout and isinstance(found["y"], torch.Tensor)
    everywhere = checkpoint.restore(tmp_path, like=tree, mesh=make_mesh(x=3))
    assert all(everywhere[key].spec == P(None) for key in "xy") and everywhere["n"] is None
    with pytest.raises(ValueError, match="is abstract: it holds no data"):
        checkpoint.restore(tmp_path, like=tree, mesh=make_mesh("abstract", x=3))


def test_a_cast_array_is_cast_on_every_device(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 1, {"x": torch.tensor([0.1, 0.2])})
    like = {"x": ShapeDtype((2,), torch.bfloat16)}
    mesh = make_mesh(dp=2)
    found = checkpoint.restore(tmp_path, like=like, mesh=mesh, specs=P("dp"), cast=True)["x"]
    assert found.dtype == torch.bfloat16 and pfx.device_get(found)[0].item() == 0.10009765625
    assert all(part.dtype == torch.bfloat16 for part in found.parts)


def test_fused_gate_and_up_weights_change_their_tensor_parallelism(tmp_path: Path) -> None:
    """Megatron-DeepSpeed#338: naive merging gives [g0, g1, u0, u1, g2, g3, u2, u3]."""
    g0, g1, g2, g3, u0, u1, u2, u3 = map(float, range(8))
    of_rank = [torch.tensor([[g0, g1], [u0, u1]]), torch.tensor([[g2, g3], [u2, u3]])]
    two, four = make_mesh(tp=2), make_mesh(tp=4)
    rows = Array((2, 4), torch.float32, two, layout_of(P(None, "tp"), (2, 4), two), tuple(of_rank))
    checkpoint.save(tmp_path, 1, {"gate_up": rows})
    like = {"gate_up": ShapeDtype((2, 4))}
    merged = checkpoint.restore(tmp_path, like=like)["gate_up"]
    assert merged.flatten().tolist() == [g0, g1, g2, g3, u0, u1, u2, u3]
    split = checkpoint.restore(tmp_path, like=like, mesh=four, specs=P(None, "tp"))["gate_up"]
    assert split.parts[1].flatten().tolist() == [g1, u1]


# All ranks alike ----------------------------------------------------------------------------------------


def plain(rank: int, **changes: Any) -> dict[str, Any]:
    return {"w": torch.ones(4), "n": 1, **changes}


def test_ranks_that_would_save_different_trees_all_say_where(tmp_path: Path) -> None:
    save = lambda world: checkpoint.save(
        tmp_path, 1, plain(world.rank, n=7 if world.rank == 1 else 1), world=world
    )
    found = ranks(3, save)
    assert {str(error) for error in found} == {f"""\
save: step 1 in {tmp_path} differs between ranks 0 and 1.
  on rank 0: ['n']: int b'\\x01'
  on rank 1: ['n']: int b'\\x07'
  fix: save the same tree on every rank; what differs belongs into an Array's shards"""}  # fmt: skip
    steps = lambda world: checkpoint.save(tmp_path, world.rank, plain(0), world=world)
    for error in ranks(2, steps):
        assert "on rank 0: step 0" in str(error) and "on rank 1: step 1" in str(error)


def test_what_one_rank_cannot_save_no_rank_saves(tmp_path: Path) -> None:
    save = lambda world: checkpoint.save(
        tmp_path, 1, plain(world.rank, n=1j if world.rank == 2 else 1), world=world
    )
    for error in ranks(3, save):
        assert isinstance(error, CheckpointError)
        assert "cannot be saved; rank 2 says:" in str(error) and "['n']" in str(error)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_cannot_write_fails_the_save_on_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    from pfx.checkpoint import saving

    written = saving._written

    def full(attempt: Any, *args: Any) -> Any:
        if attempt.world.rank == failing and attempt.step == 2:
            raise OSError(28, "No space left on device")
        return written(attempt, *args)

    save = lambda step: lambda world: checkpoint.save(tmp_path, step, plain(0), world=world)
    ok(ranks(3, save(1)))
    monkeypatch.setattr(saving, "_written", full)
    for error in ranks(3, save(2)):
        assert isinstance(error, CheckpointError), error
        assert f"rank {failing}" in str(error) or "No space left" in str(error)
    assert checkpoint.latest(tmp_path) == 1
    ok(ranks(3, save(3)))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "latest", "step-00000001", "step-00000003"]  # fmt: skip


def test_a_rank_that_never_hands_in_its_part_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pfx.checkpoint import saving

    finish = saving.finish

    def lost(attempt: Any, *args: Any) -> Any:
        if attempt.world.rank == 1:
            raise SystemExit  # as if killed: it says nothing
        return finish(attempt, *args)

    monkeypatch.setattr(saving, "finish", lost)
    monkeypatch.setattr(saving, "fail", lambda *_: None)

    def save(world: Processes) -> Any:
        try:
            return checkpoint.save(tmp_path, 2, plain(0), world=world)
        except SystemExit:
            return world.exchange("", "the end")

    errors = ranks(3, save, patience=0.5)
    text = str(errors[0])
    assert "a rank's part did not come in time" in text and "waited for: ranks 1" in text
    assert checkpoint.latest(tmp_path) is None


@pytest.mark.parametrize("what", ["truncated", "flipped", "not asked for", "no step"])
def test_a_restore_fails_on_all_ranks_alike(tmp_path: Path, what: str) -> None:
    mesh = make_mesh("process", dp=2)
    x = torch.randn(1 << 10)
    save = lambda world: checkpoint.save(
        tmp_path, 1, {"x": held(x, mesh, P("dp"), world.rank)}, world=world
    )
    ok(ranks(2, save))
    shard = tmp_path / "step-00000001/00001.bin"  # rank 1's, which rank 0 does not read
    data = bytearray(shard.read_bytes())
    data[0] ^= 1
    if what in ("truncated", "flipped"):
        shard.write_bytes(data[:-1] if what == "truncated" else data)
    like = {"x": ShapeDtype((1 << 10,)), **({"y": 1} if what == "not asked for" else {})}
    restore = lambda world: checkpoint.restore(
        tmp_path, 2 if what == "no step" else 1, like=like, mesh=mesh, specs=P("dp"), world=world
    )
    errors = ranks(2, restore)
    assert all(isinstance(error, CheckpointError) for error in errors), errors
    said = {"truncated": "00001.bin has 4095 bytes", "flipped": "00001.bin is damaged",
            "not asked for": "['y']: missing", "no step": "there is no step 2"}[what]  # fmt: skip
    assert all(said in str(error) for error in errors)


def test_a_rank_that_sees_another_directory_says_so(tmp_path: Path) -> None:
    for name in ("0", "1"):
        checkpoint.save(tmp_path / name, 1, plain(0))
    restore = lambda world: checkpoint.restore(
        tmp_path / str(world.rank), like=plain(0), world=world
    )
    for error in ranks(2, restore):
        assert "is another one than rank 0 sees" in str(error)

"""Saving and restoring trees: exact, strict, atomic, tiered; and every error that says why not."""

from __future__ import annotations

import math
import struct
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st

import pfx
from pfx import P, ShapeDtype, checkpoint
from pfx.checkpoint import directory as places
from pfx.checkpoint.manifest import Head, Leaf, Manifest, read_manifest, write_manifest
from pfx.checkpoint.values import DTYPES
from pfx.errors import CheckpointError, ShardingError


class Pair(NamedTuple):
    left: Any
    right: Any


FLOATS = st.binary(min_size=8, max_size=8).map(lambda data: struct.unpack("<d", data)[0])
PYTHON = (
    st.none() | st.booleans() | st.integers() | st.integers(-(2**200), 2**200) | FLOATS
    | st.text(st.characters(codec=None)) | st.binary()
)  # fmt: skip
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
SHAPES = st.lists(st.integers(0, 4), max_size=3)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Any bits of any dtype, in any order of strides."""
    dtype, shape = draw(st.sampled_from(sorted(DTYPES.values(), key=str))), draw(SHAPES)
    nbytes = math.prod(shape) * dtype.itemsize
    data = draw(st.binary(min_size=nbytes, max_size=nbytes))
    if dtype == torch.bool:
        data = bytes(byte & 1 for byte in data)
    flat = torch.tensor(list(data), dtype=torch.uint8)
    x = (flat.view(dtype) if nbytes else torch.empty(0, dtype=dtype)).view(shape)
    return x.permute(*draw(st.permutations(range(len(shape))))) if shape else x


TREES = st.recursive(
    PYTHON | tensors() | tensors().filter(lambda x: x.dtype != torch.bfloat16),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=3)
        | st.tuples(inner, inner)
        | st.builds(Pair, inner, inner)
    ),
    max_leaves=6,
)


def bits(leaf: Any) -> Any:
    """What makes a leaf the same bit for bit."""
    if isinstance(leaf, torch.Tensor):
        words = leaf.view(WORDS[leaf.itemsize])  # not every dtype can be copied or compared
        return "tensor", leaf.dtype, tuple(leaf.shape), words.reshape(-1).view(torch.uint8).tolist()
    if isinstance(leaf, np.ndarray):
        return "numpy", leaf.dtype, leaf.shape, leaf.tobytes()
    return type(leaf), struct.pack("<d", leaf) if type(leaf) is float else leaf


def same(one: Any, other: Any) -> bool:
    none = lambda node: node is None
    left, left_def = pfx.tree.flatten(one, none)
    right, right_def = pfx.tree.flatten(other, none)
    return left_def == right_def and list(map(bits, left)) == list(map(bits, right))


@hypothesis.given(tree=TREES.map(lambda tree: [tree]), background=st.booleans())
def test_any_tree_comes_back_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, tree: Any, background: bool
) -> None:
    run = tmp_path_factory.mktemp("run")
    if background:
        checkpoint.save_async(run, 3, tree).wait()
    else:
        checkpoint.save(run, 3, tree)
    assert same(checkpoint.restore(run, like=tree), tree)
    assert checkpoint.verify(run) == [] and checkpoint.latest(run) == 3
    found = checkpoint.restore(run)
    pairs, _ = pfx.tree.flatten_with_path(tree, lambda node: node is None)
    assert {pfx.tree.path_string(path) for path, _ in pairs} == found.keys()
    assert all(bits(found[pfx.tree.path_string(p)]) == bits(x) for p, x in pairs)


@pytest.mark.parametrize("dtype", ["<f4", ">f4", "<i8", ">u2", "?", "<c8", "<f2", "u4"])
def test_numpy_arrays_stay_numpy_arrays(tmp_path: Path, dtype: str) -> None:
    x = np.arange(6).reshape(2, 3).astype(dtype)
    x.flags.writeable = False
    tree = {"x": x, "turned": x.T, "number": np.float64(0.1), "backwards": x[::-1]}
    checkpoint.save(tmp_path, 0, tree)
    found = checkpoint.restore(tmp_path, like=tree)
    assert isinstance(found["x"], np.ndarray) and found["x"].dtype == x.dtype.newbyteorder("=")
    assert (found["x"] == x).all() and (found["turned"] == x.T).all()
    assert found["number"] == np.float64(0.1) and (found["backwards"] == x[::-1]).all()
    tensor = checkpoint.restore(tmp_path, like={**tree, "x": torch.from_numpy(found["x"])})["x"]
    assert isinstance(tensor, torch.Tensor) and (tensor.numpy() == x).all()


def test_parameters_and_lazy_views_are_saved_as_what_they_say(tmp_path: Path) -> None:
    z = torch.randn(3, dtype=torch.complex64)
    tree = {"w": torch.nn.Parameter(torch.ones(2)), "conj": z.conj(), "neg": z.conj().imag}
    checkpoint.save(tmp_path, 1, tree)
    found = checkpoint.restore(tmp_path, like=tree)
    assert torch.equal(found["conj"], z.conj()) and torch.equal(found["neg"], -z.imag)
    assert torch.equal(found["w"], torch.ones(2)) and not found["w"].requires_grad


# Files larger than one piece, many pieces, threads ---------------------------------------------------


def test_large_and_many_tensors(tmp_path: Path) -> None:
    tree = {f"x{i}": torch.randn(37, i % 7 + 1) for i in range(200)}
    tree["large"] = torch.randn(3000, 2001)  # 24 MB: two pieces, and written past the cache
    tree["turned"] = torch.randn(500, 400).T
    checkpoint.save_async(tmp_path, 1, tree).wait()
    found = checkpoint.restore(tmp_path, like=tree)
    assert all(torch.equal(found[key], tree[key]) for key in tree)
    assert found["large"].data_ptr() % 64 == 0  # as torch aligns its own
    checkpoint.save(tmp_path, 2, tree)
    found = checkpoint.restore(tmp_path, like=tree)
    assert all(torch.equal(found[key], tree[key]) for key in tree)
    manifest = places.manifest_of(places.place_of(tmp_path, 2))
    pieces = [piece for leaf in manifest.leaves for piece in leaf.pieces]
    assert all(piece.offset % 4096 == 0 for piece in pieces) and len(pieces) > len(tree)


# Later updates, B77 -----------------------------------------------------------------------------------


def test_a_background_save_does_not_see_later_updates(tmp_path: Path) -> None:
    """pytorch#144657, torchtitan#930, pytorch-lightning#21079."""
    w, count = torch.tensor([1.0]), np.array([1])
    extra = {"seen": [1]}
    handle = checkpoint.save_async(tmp_path, 1, {"w": w, "n": count}, metadata=extra)
    w += 1
    count += 1
    extra["seen"].append(2)
    assert handle.wait() == tmp_path / "step-00000001"
    found = checkpoint.restore(tmp_path, like={"w": w, "n": count})
    assert found["w"].item() == 1.0 and found["n"].item() == 1
    assert checkpoint.metadata(tmp_path) == {"seen": [1]}


def test_a_background_save_does_not_see_what_a_donated_step_writes(tmp_path: Path) -> None:
    mesh = pfx.make_mesh(dp=2)
    step = pfx.jit(lambda x: x + 1, mesh=mesh, in_specs=(P("dp"),), out_specs=P("dp"), donate=(0,))
    x = pfx.device_put(torch.zeros(8), mesh, P("dp"))
    handle = checkpoint.save_async(tmp_path, 1, {"x": x})
    x = step(x)
    handle.wait()
    assert checkpoint.restore(tmp_path, like={"x": torch.empty(8)})["x"].tolist() == [0.0] * 8
    gone = pfx.device_put(torch.zeros(8), mesh, P("dp"))
    step(gone)
    with pytest.raises(CheckpointError, match=r"save: \['x'\] was donated to a step"):
        checkpoint.save(tmp_path, 2, {"x": gone})


class Held:
    """A background save that starts only when it is let."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import threading

        from pfx.checkpoint import saving

        self.gate, begin = threading.Event(), saving.begin

        def wait(attempt: Any) -> None:
            assert self.gate.wait(20)
            begin(attempt)

        monkeypatch.setattr(saving, "begin", wait)

    def let_soon(self) -> None:
        import threading

        threading.Timer(0.1, self.gate.set).start()


def test_a_load_while_a_save_is_pending_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(monkeypatch)
    handle = checkpoint.save_async(tmp_path, 7, {"w": torch.ones(1)})
    handle.check()
    assert not handle.done()
    held.let_soon()
    assert checkpoint.restore(tmp_path, like={"w": torch.empty(1)})["w"].item() == 1.0
    assert handle.done() and checkpoint.latest(tmp_path) == 7


def test_one_save_is_pending_at_a_time_and_the_memory_is_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pfx.checkpoint.saving import writer_of

    held = Held(monkeypatch)
    first = checkpoint.save_async(tmp_path, 1, {"w": torch.ones(100)})
    room = writer_of(tmp_path.resolve()).room
    held.let_soon()
    second = checkpoint.save_async(tmp_path, 2, {"v": torch.zeros(50)})
    assert first.done() and writer_of(tmp_path.resolve()).room is room
    second.wait()
    assert checkpoint.steps(tmp_path) == [1, 2] and checkpoint.verify(tmp_path) == []


@pytest.mark.parametrize("how", ["check", "wait", "save_async", "save"])
def test_an_error_in_the_background_is_raised_at_the_next_call(tmp_path: Path, how: str) -> None:
    run = tmp_path / "run"
    tree = {"w": torch.ones(1)}
    run.write_text("a file where a folder belongs")
    handle = checkpoint.save_async(run, 1, tree)
    while not handle.done():
        pass
    act = {
        "check": handle.check,
        "wait": handle.wait,
        "save_async": lambda: checkpoint.save_async(run, 2, tree),
        "save": lambda: checkpoint.save(run, 2, tree),
    }[how]
    with pytest.raises(CheckpointError, match="cannot make a folder: File exists"):
        act()
    run.unlink()
    checkpoint.save(run, 3, tree)  # it has been said once
    assert checkpoint.steps(run) == [3]


# Steps that are not complete, B78 ----------------------------------------------------------------------


def two_steps(run: Path) -> dict[str, torch.Tensor]:
    """Steps 10 and 20, whose values are their numbers."""
    for step in (10, 20):
        checkpoint.save(run, step, {"w": torch.full((4,), float(step)), "v": torch.ones(3)})
    return {"w": torch.empty(4), "v": torch.empty(3)}


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


BROKEN = {
    "shard truncated by a byte": (
        lambda step: truncate(step / "00000.bin"),
        r"step-00000020/00000.bin has 8191 bytes; the manifest says 8192",
    ),
    "shard of no bytes": (
        lambda step: (step / "00000.bin").write_bytes(b""),
        r"00000.bin has 0 bytes; the manifest says 8192",
    ),
    "no shard": (lambda step: (step / "00000.bin").unlink(), r"00000.bin is missing"),
    "no manifest": (
        lambda step: (step / "manifest.msgpack").unlink(),
        r"step-00000020/manifest.msgpack is missing",
    ),
    "manifest truncated by a byte": (
        lambda step: truncate(step / "manifest.msgpack"),
        r"manifest.msgpack is cut off or damaged",
    ),
    "manifest of no bytes": (
        lambda step: (step / "manifest.msgpack").write_bytes(b""),
        r"manifest.msgpack is cut off or damaged",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_step_is_passed_over_and_named(tmp_path: Path, what: str) -> None:
    """NeMo Automodel#3254, pytorch-lightning#688, diffusion-pipe#159."""
    like = two_steps(tmp_path)
    breaks, named = BROKEN[what]
    breaks(tmp_path / "step-00000020")
    with pytest.warns(UserWarning, match=r"(?s)step 10 is used.*" + named):
        assert checkpoint.latest(tmp_path) == 10
    with pytest.warns(UserWarning, match=named):
        assert checkpoint.restore(tmp_path, like=like)["w"].tolist() == [10.0] * 4
    assert checkpoint.steps(tmp_path) == [10]
    with pytest.raises(CheckpointError, match=r"(?s)step 20 is not complete.*" + named):
        checkpoint.restore(tmp_path, 20, like=like)
    with pytest.raises(CheckpointError, match=r"(?s)step 20 is not complete.*complete: 10"):
        checkpoint.metadata(tmp_path, 20)
    (problem,) = checkpoint.verify(tmp_path)
    assert "step-00000020" in problem
    assert "incomplete" in checkpoint.listing(tmp_path)


@pytest.mark.parametrize("how", ["missing", "broken", "names nothing", "names a missing step"])
def test_without_a_good_pointer_the_newest_complete_step_is_used(tmp_path: Path, how: str) -> None:
    like, pointer = two_steps(tmp_path), tmp_path / "latest"
    act, said = {
        "missing": (pointer.unlink, "latest is missing"),
        "broken": (lambda: pointer.write_bytes(b"\xff\xfe"), "latest names no step"),
        "names nothing": (lambda: pointer.write_text("../elsewhere"), r"names no step: '\.\./else"),
        "names a missing step": (
            lambda: pointer.write_text("step-00000030"),
            r"step-00000030/manifest.msgpack is missing",
        ),
    }[how]
    act()
    with pytest.warns(UserWarning, match=r"(?s)step 20 is used.*" + said):
        assert checkpoint.latest(tmp_path) == 20
    with pytest.warns(UserWarning, match=said):
        assert checkpoint.restore(tmp_path, like=like)["w"].tolist() == [20.0] * 4
    checkpoint.save(tmp_path, 30, like)
    assert checkpoint.latest(tmp_path) == 30  # and no warning: they are errors here


def test_the_pointer_decides_even_if_a_later_step_is_there(tmp_path: Path) -> None:
    two_steps(tmp_path)
    (tmp_path / "latest").write_text("step-00000010\n")
    assert checkpoint.latest(tmp_path) == 10


def test_nothing_saved(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path) is None and checkpoint.steps(tmp_path) == []
    assert checkpoint.latest(tmp_path / "none") is None
    assert checkpoint.listing(tmp_path) == f"no steps in {tmp_path}"
    with pytest.raises(CheckpointError, match="there is no complete step"):
        checkpoint.restore(tmp_path, like=1)
    with pytest.raises(CheckpointError, match=r"(?s)there is no step 5\..*complete: none"):
        checkpoint.restore(tmp_path, 5, like=1)
    with pytest.raises(CheckpointError, match="there is no step 5"):
        checkpoint.verify(tmp_path, 5)


def test_a_flipped_bit_is_named_by_verify_and_by_restore(tmp_path: Path) -> None:
    like = two_steps(tmp_path)
    shard = tmp_path / "step-00000020/00000.bin"
    data = bytearray(shard.read_bytes())
    data[4096 + 5] ^= 4  # of 'w', which follows the page of 'v'
    shard.write_bytes(data)
    text = r"00000.bin is damaged: \['w'\] \(bytes 4096 to 4112\) has another checksum"
    (problem,) = checkpoint.verify(tmp_path)
    with pytest.raises(CheckpointError, match=text) as raised:
        checkpoint.restore(tmp_path, like=like)
    assert str(raised.value) == problem
    found = checkpoint.restore(tmp_path, like={"v": like["v"]}, partial=True)
    assert found["v"].tolist() == [1.0] * 3
    sound, said = checkpoint.verdict(tmp_path)
    assert not sound and "['w']" in said
    sound, said = checkpoint.verdict(tmp_path, 10)
    assert sound and "is sound" in said


def test_leftovers_of_killed_saves_are_no_steps_and_go_at_the_next_save(tmp_path: Path) -> None:
    like = two_steps(tmp_path)
    for name in (".tmp-step-00000030-0123", ".old-step-00000010-89ab"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "00000.bin").write_bytes(b"half")
    (tmp_path / ".latest-89ab").write_text("step-00000030")
    (tmp_path / "notes.txt").write_text("mine")
    assert checkpoint.steps(tmp_path) == [10, 20] and checkpoint.latest(tmp_path) == 20
    checkpoint.save(tmp_path, 40, like)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["latest", "notes.txt", "step-00000010", "step-00000020", "step-00000040"]


def test_a_step_saved_again_replaces_the_one_before(tmp_path: Path) -> None:
    for value in (1.0, 2.0, 3.0):
        path = checkpoint.save(tmp_path, 5, {"w": torch.tensor(value)})
        assert checkpoint.restore(tmp_path, 5, like={"w": torch.tensor(0.0)})["w"] == value
    assert path.name == "step-00000005~2"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", path.name]
    assert checkpoint.steps(tmp_path) == [5]
    (path / "00000.bin").unlink()  # a damaged one is replaced as well
    checkpoint.save(tmp_path, 5, {"w": torch.tensor(4.0)})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000005~3"]


# Strictness, B79 and B84 -------------------------------------------------------------------------------


def test_every_difference_is_listed_with_its_path(tmp_path: Path) -> None:
    tree = {"a": torch.zeros(2, 3), "b": torch.zeros(4), "c": 1, "d": [torch.zeros(1)], "e": None}
    checkpoint.save(tmp_path, 1, tree)
    like = {"a": ShapeDtype((3, 2)), "b": ShapeDtype((4,), torch.bfloat16), "c": 1.0,
            "d": [torch.zeros(1), torch.zeros(1)], "f": True}  # fmt: skip
    with pytest.raises(CheckpointError) as raised:
        checkpoint.restore(tmp_path, like=like)
    assert (
        str(raised.value)
        == f"""\
restore: {tmp_path}/step-00000001 does not hold what is asked for.
  ['a']: f32[2, 3] is saved, f32[3, 2] is asked for
  ['b']: f32[4] is saved, bf16[4] is asked for
  ['c']: int is saved, float is asked for
  ['d'][1]: missing: f32[1] is asked for, nothing is saved
  ['f']: missing: bool is asked for, nothing is saved
  ['e']: unexpected: none is saved, nothing is asked for
  fix: cast=True to convert dtypes; ask for every saved leaf, or partial=True to leave the others unread"""
    )


@pytest.mark.parametrize(
    ("saved", "asked", "cast"),
    [
        (torch.tensor(16777217, dtype=torch.int32), torch.tensor(0.0), 16777216.0),
        (torch.tensor([0.1]), torch.zeros(1, dtype=torch.bfloat16), 0.10009765625),
        (np.array(16777217, np.int32), np.array(0.0, np.float32), 16777216.0),
        (torch.tensor(True), torch.tensor(0), 1),
    ],
)
def test_a_dtype_changes_only_when_asked(
    tmp_path: Path, saved: Any, asked: Any, cast: float
) -> None:
    """pytorch#187138."""
    checkpoint.save(tmp_path, 1, {"count": saved})
    with pytest.raises(
        CheckpointError, match=r"\['count'\]: \w+\[1?\] is saved, \w+\[1?\] is asked"
    ):
        checkpoint.restore(tmp_path, like={"count": asked})
    found = checkpoint.restore(tmp_path, like={"count": asked}, cast=True)["count"]
    assert found.dtype == asked.dtype and found.item() == cast
    exact = checkpoint.restore(tmp_path, like={"count": saved})["count"]
    assert exact.item() == saved.item() and exact.dtype == saved.dtype


@pytest.mark.parametrize("count", [2**53 + 1, -(2**63) - 1, 2**64, 10**100])
def test_counters_stay_exact(tmp_path: Path, count: int) -> None:
    checkpoint.save(tmp_path, 1, {"count": count}, metadata={"count": count, "more": [count]})
    assert checkpoint.restore(tmp_path, like={"count": 0}) == {"count": count}
    assert checkpoint.metadata(tmp_path) == {"count": count, "more": [count]}
    with pytest.raises(CheckpointError, match="int is saved, float is asked for"):
        checkpoint.restore(tmp_path, like={"count": 0.0}, cast=True)
    with pytest.raises(CheckpointError, match="int is saved, bool is asked for"):
        checkpoint.restore(tmp_path, like={"count": False})
    with pytest.raises(CheckpointError, match=r"int is saved, i64\[\] is asked for"):
        checkpoint.restore(tmp_path, like={"count": torch.tensor(0)}, cast=True)


def test_leaves_are_matched_by_path_not_by_position(tmp_path: Path) -> None:
    """nanotron#37."""
    moments = {"b": torch.full((2,), 2.0), "a": torch.full((2,), 1.0)}
    checkpoint.save(tmp_path, 1, {"params": moments, "mu": moments})
    like = {"mu": {"a": torch.empty(2), "b": torch.empty(2)},
            "params": {"a": torch.empty(2), "b": torch.empty(2)}}  # fmt: skip
    found = checkpoint.restore(tmp_path, like=like)
    assert found["mu"]["a"].tolist() == [1.0] * 2 and found["mu"]["b"].tolist() == [2.0] * 2


class Opaque:
    pass


@pytest.mark.parametrize(
    ("leaf", "said"),
    [
        (Opaque(), "it is a .*Opaque"),
        (torch.zeros(2).to_sparse(), "it is a torch.Tensor of dtype torch.float32"),
        (torch.empty(2, device="meta"), "it is a torch.Tensor"),
        (np.array(["a"]), "it is a numpy.ndarray of dtype <U1"),
        (np.ma.masked_array([1.0], [True]), "it is a numpy.ma"),
        (1 + 2j, "it is a builtins.complex"),
    ],
)
def test_what_cannot_be_saved_is_refused_with_its_path(
    tmp_path: Path, leaf: Any, said: str
) -> None:
    for save in (checkpoint.save, checkpoint.save_async):
        with pytest.raises(CheckpointError, match=r"save: \['x'\] cannot be saved: " + said):
            save(tmp_path, 1, {"x": leaf})
    assert list(tmp_path.iterdir()) == []


def test_two_leaves_with_one_path_are_refused(tmp_path: Path) -> None:
    class Key(str):
        def __repr__(self) -> str:
            return "same"

    with pytest.raises(CheckpointError, match="two leaves with one path"):
        checkpoint.save(tmp_path, 1, {Key("a"): 1, Key("b"): 2})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"step": -1}, "save: step=-1 must be an integer of at least 0"),
        ({"step": 1.0}, "save: step=1.0 must be"),
        ({"tier": "gold"}, "tier='gold' is unknown"),
        ({"tier": "best"}, "tier='best' needs a metric"),
        ({"metric": 1.0}, "tier='regular' has no use for a metric"),
        ({"keep": 0}, "keep=0 must be an integer of at least 1"),
        ({"tier": "final", "keep": 1}, "keep=1 has no meaning for tier='final': all are kept"),
        ({"metadata": {"x": torch.ones(1)}}, "metadata cannot be saved: a Tensor is not plain"),
    ],
)
def test_what_save_refuses(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    step = options.pop("step", 1)
    with pytest.raises(CheckpointError, match=said):
        checkpoint.save(tmp_path, step, {}, **options)


def test_what_restore_refuses(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 1, {"w": torch.ones(3)})
    with pytest.raises(CheckpointError, match="specs are given without a mesh"):
        checkpoint.restore(tmp_path, like={"w": ShapeDtype((3,))}, specs=P())
    with pytest.raises(CheckpointError, match=r"like\['w'\] asks for a complex"):
        checkpoint.restore(tmp_path, like={"w": 1j})
    mesh = pfx.make_mesh(dp=2)
    with pytest.raises(ShardingError, match=r"restore: like\['w'\] cannot be split"):
        checkpoint.restore(tmp_path, like={"w": ShapeDtype((3,))}, mesh=mesh, specs=P("dp"))
    with pytest.raises(ShardingError, match="restore: specs do not match"):
        checkpoint.restore(tmp_path, like={"w": ShapeDtype((3,))}, mesh=mesh, specs={"v": P()})


# Tiers --------------------------------------------------------------------------------------------------


def test_tiers(tmp_path: Path) -> None:
    save = lambda step, **options: checkpoint.save(tmp_path, step, {"n": step}, **options)
    for step in (1, 2, 3):
        save(step, keep=2)
    assert checkpoint.steps(tmp_path) == [2, 3]
    for step in (4, 5):
        save(step, tier="temporary")
    assert checkpoint.steps(tmp_path) == [2, 3, 5]
    for step, loss in ((6, 2.0), (7, 1.0), (8, 3.0)):
        save(step, tier="best", metric=loss)
    assert checkpoint.steps(tmp_path) == [2, 3, 5, 7, 8]  # 8 is where the pointer is
    assert checkpoint.best(tmp_path) == 7
    save(9, tier="best", metric=0.5)
    assert checkpoint.steps(tmp_path) == [2, 3, 5, 9] and checkpoint.best(tmp_path) == 9
    save(10, tier="final")  # after which none goes on from a temporary one
    save(11, keep=1)
    assert checkpoint.steps(tmp_path) == [9, 10, 11]
    text = checkpoint.listing(tmp_path).splitlines()
    assert [line.split()[:2] for line in text[1:]] == [
        ["step-00000009", "best"], ["step-00000010", "final"], ["step-00000011", "regular"]]  # fmt: skip


def test_a_step_in_two_tiers_is_kept_by_each(tmp_path: Path) -> None:
    save = lambda step, **options: checkpoint.save(tmp_path, step, {"n": step}, **options)
    save(1, tier="temporary")
    save(1, tier="best", metric=0.5)
    save(1, keep=1)
    assert checkpoint.best(tmp_path) == 1 and len(list(tmp_path.iterdir())) == 3
    save(2, keep=1)
    assert checkpoint.steps(tmp_path) == [1, 2] and checkpoint.best(tmp_path) == 1
    save(3, tier="best", metric=0.4)
    assert checkpoint.steps(tmp_path) == [2, 3] and checkpoint.best(tmp_path) == 3


def test_the_best_can_be_the_largest_and_is_never_a_nan(tmp_path: Path) -> None:
    for step, score in ((1, 0.5), (2, math.nan), (3, 0.7), (4, 0.6)):
        tier = {"tier": "best", "metric": score, "higher_is_better": True, "keep": 2}
        checkpoint.save(tmp_path, step, {}, **tier)
    assert checkpoint.best(tmp_path) == 3 and checkpoint.steps(tmp_path) == [3, 4]


@hypothesis.given(
    st.lists(
        st.tuples(
            st.integers(0, 5),
            st.sampled_from(["regular", "temporary", "best", "final"]),
            st.sampled_from([None, 1, 2]),
            st.floats(allow_nan=True),
        ),
        max_size=8,
    )
)
def test_what_has_just_been_saved_is_always_the_latest(
    tmp_path_factory: pytest.TempPathFactory, saves: list[tuple[int, str, int | None, float]]
) -> None:
    run = tmp_path_factory.mktemp("tiers")
    finals = set()
    for number, (step, tier, keep, metric) in enumerate(saves):
        options = {"keep": keep} if tier in ("regular", "best") else {}
        options |= {"metric": metric} if tier == "best" else {}
        checkpoint.save(run, step, {"n": number}, tier=tier, **options)
        finals |= {step} if tier == "final" else set()
        assert checkpoint.latest(run) == step and finals <= set(checkpoint.steps(run))
        assert checkpoint.restore(run, like={"n": 0}) == {"n": number}
        assert not [path for path in run.iterdir() if path.name.startswith(".")]


# Manifests by strangers ---------------------------------------------------------------------------------


def manifest_bytes(**changes: Any) -> bytes:
    return write_manifest(
        Manifest(Head(1, "n", 0, files={}), (Leaf(("['x']",), "int", value=b"\1"),), **changes)
    )


@hypothesis.given(st.binary(max_size=200), st.data())
@hypothesis.settings(max_examples=100)
def test_a_manifest_of_any_bytes_is_read_or_refused(noise: bytes, data: st.DataObject) -> None:
    """Never another exception than the one that names the file."""
    good = manifest_bytes()
    start = data.draw(st.integers(0, len(good)))
    for text in (noise, good[:start] + noise, good[:start] + noise + good[start + len(noise) :]):
        try:
            read_manifest(text, "the file")
        except CheckpointError as error:
            assert str(error).startswith("the file ")


def forged(**changes: Any) -> bytes:
    """A manifest with a right checksum and a wrong leaf: 4 bytes at 0 of a file of 4096."""
    from pfx.checkpoint.manifest import sealed

    piece = changes.pop("piece", [0, 0, 4, b"12345678", [[0, 1]]])
    head = {"step": 1, "nonce": "n", "saved": 0, "files": [["00000.bin", 4096]]}
    leaf = [["['w']"], "tensor", "float32", [1], [], [piece]]
    for number, value in changes.pop("leaf", {}).items():
        leaf[number] = value
    leaves = [leaf, *changes.pop("more", [])]
    head |= changes.pop("head", {})
    return sealed(head, {"leaves": leaves, "mesh": {}, "metadata": None, **changes})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"head": {"files": [["../x", 4096]]}}, "names the file '../x', which is no shard"),
        ({"head": {"files": [["00000.bin", -1]]}}, "has -1 where a size belongs"),
        ({"head": {"files": 3}}, "is not a manifest that pfx wrote"),
        ({"head": {"step": 2**80}}, "where a size belongs"),
        ({"head": {"extra": 1}}, "is not a manifest that pfx wrote"),
        ({"leaf": {2: "float33"}}, "this torch has no tensor of dtype 'float33'"),
        ({"leaf": {1: "pickle"}}, "this torch has no pickle"),
        ({"leaf": {3: [2**62]}}, "do not make up the shape"),
        ({"leaf": {3: [2]}}, "its pieces do not make up the shape"),
        ({"leaf": {4: [[], []]}}, "a spec of 2 dims for the shape"),
        ({"leaf": {5: []}}, "its pieces do not make up the shape"),
        ({"piece": [1, 0, 4, b"", [[0, 1]]]}, "has a piece in no file"),
        ({"piece": ["x", 0, 4, b"", [[0, 1]]]}, "has a piece in no file"),
        ({"piece": [0, 4093, 4, b"", [[0, 1]]]}, "puts a piece at bytes 4093 to 4097"),
        ({"piece": [0, 2**62, 4, b"", [[0, 1]]]}, "where none fits"),
        ({"piece": [0, 0, 8, b"", [[0, 1]]]}, "a piece of 8 bytes"),
        ({"piece": [0, 0, 2**62, b"", [[0, 2**60]]]}, "do not make up the shape"),
        ({"piece": [0, -4, 4, b"", [[0, 1]]]}, "has -4 where a size belongs"),
        (
            {"more": [[["['v']"], "tensor", "uint8", [9], [], [[0, 2, 9, b"", [[0, 9]]]]]]},
            "where none fits",
        ),
        ({"more": [[["['w']"], "none", b""]]}, "has a leaf twice"),
        ({"more": [[["['v']"], "float", b"123"]]}, "is not a manifest that pfx wrote"),
        ({"more": [[[3], "none", b""]]}, "has a leaf whose path is"),
        ({"leaves": None}, "is not a manifest that pfx wrote"),
    ],
)
def test_a_forged_manifest_is_refused_before_anything_is_read_by_it(
    changes: dict[str, Any], said: str
) -> None:
    assert read_manifest(forged(), "the file").leaves[0].shape == (1,)
    with pytest.raises(CheckpointError, match=said):
        read_manifest(forged(**changes), "the file")


def test_manifests_of_other_formats_and_versions_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from pfx.checkpoint import manifest

    with pytest.raises(CheckpointError, match="the file is no manifest of a checkpoint"):
        read_manifest(b"\x80", "the file")
    monkeypatch.setattr(manifest, "VERSION", 2)
    later = manifest_bytes()
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="has version 2; this pfx reads version 1"):
        read_manifest(later, "the file")
    flipped = bytearray(manifest_bytes(metadata="something long enough"))
    flipped[flipped.index(b"something")] ^= 1
    with pytest.raises(CheckpointError, match="is damaged: its checksum differs"):
        read_manifest(bytes(flipped), "the file")


def test_a_manifest_in_the_wrong_folder_is_refused(tmp_path: Path) -> None:
    two_steps(tmp_path)
    (tmp_path / "step-00000010").rename(tmp_path / "step-00000030")
    with pytest.raises(CheckpointError, match="is of step 10, in a folder named step-00000030"):
        checkpoint.restore(tmp_path, 30)


def test_contents_as_text(tmp_path: Path) -> None:
    mesh = pfx.make_mesh(dp=2)
    tree = {"w": pfx.device_put(torch.zeros(4, 2), mesh, P("dp")), "seen": 7, "name": "x" * 99}
    checkpoint.save(tmp_path, 3, tree, metadata={"config": {"lr": 0.1}})
    lines = checkpoint.contents(tmp_path).splitlines()
    assert lines[0] == ("step-00000003: regular, 8.0 KiB in 1 files, 1 tensors of 32 B, "
                        "saved on dp=2")  # fmt: skip
    assert lines[1].split()[:2] == ["['name']", "str"] and lines[1].endswith("…")
    assert lines[2].split() == ["['seen']", "int", "7"]
    assert lines[3].split() == ["['w']", "f32[4/dp,", "2]", "32", "B"]
    assert lines[4:] == ["metadata:", "{", '  "config": {', '    "lr": 0.1', "  }", "}"]


def test_no_warning_where_all_is_well(tmp_path: Path) -> None:
    two_steps(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert checkpoint.latest(tmp_path) == 20

"""Checkpoints of odd trees, and directories in which others have put what pfx never would."""

from __future__ import annotations

import os
from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

import pfx
from pfx import P, checkpoint, tree
from pfx.checkpoint import retention
from pfx.checkpoint.directory import MANIFEST, manifest_of, name_of, place_of
from pfx.checkpoint.manifest import sealed
from pfx.errors import CheckpointError, TreeError

NAMES = st.lists(st.sampled_from(["a", "b", "a.b", "['a']", 0, 1]), min_size=2, unique=True)


def ordered(kind: str, pairs: list[tuple[Any, Any]]) -> Any:
    if kind == "default":
        return defaultdict(list, pairs)
    return OrderedDict(pairs) if kind == "ordered" else dict(pairs)


@hypothesis.given(NAMES, st.data())
def test_every_mapping_is_matched_by_its_keys(tmp_path_factory, names, data):
    """[huggingface/nanotron PR #37] for each kind of mapping, saved in one order, asked in another."""
    kind = st.sampled_from(["plain", "ordered", "default"])
    saved, asked = data.draw(kind), data.draw(kind)
    directory = tmp_path_factory.mktemp("run")
    values = {name: torch.tensor([float(i)]) for i, name in enumerate(names)}
    checkpoint.save(directory, 1, ordered(saved, list(values.items())))
    other = data.draw(st.permutations(names))
    like = ordered(asked, [(name, torch.zeros(1)) for name in other])
    found = checkpoint.restore(directory, like=like)
    assert type(found) is type(like) and {n: float(found[n]) for n in found} == values


def test_two_orders_of_a_mapping_are_not_matched_by_position():
    one, other = OrderedDict(a=1, b=2), OrderedDict(b=2, a=1)
    with pytest.raises(TreeError, match="keys differ; their order"):
        tree.map(lambda x, y: x, one, other)


@hypothesis.given(
    st.lists(st.integers(0, 3), max_size=3), st.data(),
    st.sampled_from([torch.float32, torch.int8, torch.complex64, torch.bfloat16, torch.bool]),
)  # fmt: skip
def test_what_a_tensor_is_a_view_of_does_not_matter(tmp_path_factory, shape, data, dtype):
    """Any strides, overlapping ones and those of a single element among them."""
    strides = [data.draw(st.integers(0, 4)) for _ in shape]
    base = torch.arange(40).to(dtype)
    view = base.as_strided(shape, strides, data.draw(st.integers(0, 3)))
    directory = tmp_path_factory.mktemp("run")
    checkpoint.save(directory, 1, {"x": view})
    found = checkpoint.restore(directory, like={"x": view})["x"]
    assert found.dtype == dtype and found.shape == view.shape and torch.equal(found, view)


@pytest.mark.parametrize("part", ["real", "imag"])
@pytest.mark.parametrize("count", [1, 2])
def test_parts_of_a_conjugate(tmp_path: Path, part: str, count: int):
    view = getattr(torch.tensor([1 + 2j] * count).conj(), part)
    checkpoint.save(tmp_path, 1, view)
    assert torch.equal(checkpoint.restore(tmp_path, like=view), view)


def forged(directory: Path, *leaves: Any, **head: Any) -> Path:
    """A step whose manifest is not what pfx writes, checksum and all."""
    usual: dict[str, Any] = {"nonce": "x", "saved": 1, "tier": "regular", "metric": None}
    first = {"step": 1, "higher": False, "files": [], **usual, **head}
    folder = directory / name_of(1)
    folder.mkdir(exist_ok=True)
    body = {"leaves": list(leaves), "mesh": {}, "metadata": None}
    (folder / MANIFEST).write_bytes(sealed(first, body))
    return folder


def refused(directory: Path, text: str) -> None:
    with pytest.raises(CheckpointError, match=text) as error:
        checkpoint.restore(directory, 1)
    assert MANIFEST in str(error.value)
    assert checkpoint.verify(directory) != []


HEADS: list[dict[str, Any]] = [
    {"saved": "x"}, {"saved": -1}, {"metric": "x"}, {"tier": 3}, {"nonce": [1]}, {"higher": 1},
]  # fmt: skip


@pytest.mark.parametrize("head", HEADS, ids=str)
def test_a_head_of_other_types_is_no_complete_step(tmp_path: Path, head: dict[str, Any]):
    forged(tmp_path, **head)
    refused(tmp_path, next(iter(head)) if head != {"saved": -1} else "-1")
    assert checkpoint.steps(tmp_path) == [] and checkpoint.best(tmp_path) is None


def test_a_date_beyond_all_years_is_still_listed(tmp_path: Path):
    forged(tmp_path, saved=2**62)
    assert "UTC" in checkpoint.listing(tmp_path) or "no date" in checkpoint.listing(tmp_path)


LEAVES: list[tuple[Any, str]] = [
    ([["['a']"], "bytes", 10**15], "a bytes that is no bytes"),  # would be so many zeros
    ([["['a']"], "int", [1, 2]], "an? int that is no bytes"),
    ([["['a']"], "none", 5], "a none that is no bytes"),
    ([["['a']"], "tensor", "float32", [0, 2**62, 2**62], [], []], "where a size belongs"),
]


@pytest.mark.parametrize(("leaf", "text"), LEAVES, ids=lambda x: str(x)[:20])
def test_a_leaf_that_pfx_would_not_write(tmp_path: Path, leaf: Any, text: str):
    forged(tmp_path, leaf)
    refused(tmp_path, text)


def test_a_pipe_for_a_file_is_not_waited_for(tmp_path: Path):
    (tmp_path / name_of(1)).mkdir()
    os.mkfifo(tmp_path / name_of(1) / MANIFEST)
    os.mkfifo(tmp_path / "latest")
    assert checkpoint.steps(tmp_path) == []
    with pytest.raises(CheckpointError, match="is no ordinary file"):
        checkpoint.restore(tmp_path, 1)


def test_hidden_files_of_others_stay(tmp_path: Path):
    others = {".old-thesis", ".tmp-notes", ".latest-paper.tex", ".tmp-step-by-step"}
    for name in others:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("not ours")
    checkpoint.save(tmp_path, 1, {"a": 1})
    assert others < {path.name for path in tmp_path.iterdir()}
    assert all((tmp_path / name / "file").exists() for name in others)


def test_metadata_with_any_keys_are_shown(tmp_path: Path):
    checkpoint.save(tmp_path, 1, {"a": 1}, metadata={b"k": [{3: 4}], "z": 1.5})
    assert checkpoint.metadata(tmp_path) == {b"k": [{3: 4}], "z": 1.5}
    text = checkpoint.contents(tmp_path)
    assert "\"b'k'\": [" in text and '"3": 4' in text


def test_a_step_that_another_removes_at_once_is_an_error(tmp_path: Path, monkeypatch):
    def removing(directory: Path, saved: Any, keep: Any) -> None:
        retention.discard(saved.path)
        retention.retire(directory, saved, keep)

    monkeypatch.setattr("pfx.checkpoint.saving.retire", removing)
    with pytest.raises(CheckpointError, match="is gone again"):
        checkpoint.save(tmp_path, 1, {"a": 1})


@hypothesis.given(st.lists(st.integers(-100, 100), min_size=1, max_size=8), st.integers(1, 3))
def test_the_newest_are_kept_whatever_the_clock_says(tmp_path_factory, moves, keep):
    """Another host's clock may be behind that of the last one."""
    directory, now = tmp_path_factory.mktemp("run"), 10**9
    for step, move in enumerate(moves):
        now += move
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("time.time_ns", lambda now=now: now)
            checkpoint.save(directory, step, {"a": step}, keep=keep)
    assert checkpoint.steps(directory) == list(range(len(moves)))[-keep:]


SPECS = [P("tp"), P(None, "tp"), P(("tp", "dp")), P("dp", "tp"), P()]


@hypothesis.given(
    st.sampled_from(SPECS), st.sampled_from(SPECS), st.integers(0, 8 * 12 * 4 * 8 - 1)
)
def test_a_flipped_bit_is_seen_by_a_process_that_reads_all(tmp_path_factory, saved, asked, bit):
    """However it cuts what it reads among the devices that it simulates."""
    directory = tmp_path_factory.mktemp("run")
    mesh = pfx.make_mesh(dp=2, tp=2, kind="simulated")
    values = torch.arange(8.0 * 12).reshape(8, 12)
    folder = checkpoint.save(directory, 1, pfx.device_put(values, mesh, saved))
    like = pfx.ShapeDtype((8, 12), torch.float32)
    found = checkpoint.restore(directory, like=like, mesh=mesh, specs=asked)
    assert torch.equal(found.full_tensor(), values)
    pieces = manifest_of(place_of(directory, 1)).leaves[0].pieces
    piece = pieces[bit % len(pieces)]
    data = bytearray((folder / piece.file).read_bytes())
    data[piece.offset + bit // 8 % piece.length] ^= 1 << bit % 8
    (folder / piece.file).write_bytes(data)
    with pytest.raises(CheckpointError, match="is damaged"):
        checkpoint.restore(directory, like=like, mesh=mesh, specs=asked)

"""Files of weights are not trusted: what is wrong with them is one clear error that names it."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import pfx
from pfx.interop.hf import Table, WeightsError, load_params, save_params
from pfx.interop.hf.json_files import read_json
from pfx.interop.hf.problems import collapsed

safetensors_torch = pytest.importorskip("safetensors.torch")

TABLE = Table(
    {"w": "layers.{layers}.w: out in", "b": "b: out"},
    {"w": "layers in out", "b": "out"},
    {"layers": 3, "in": 2, "out": 4},
    ignored=[r"layers\.\d+\.mask"],
)
INDEX = "model.safetensors.index.json"


def weights(**changes: Any) -> dict[str, torch.Tensor]:
    made = {f"layers.{i}.w": torch.full((4, 2), float(i)) for i in range(3)}
    changed = {name.replace("__", "."): value for name, value in changes.items()}
    made |= {"b": torch.ones(4), **changed}
    return {name: value for name, value in made.items() if value is not None}


def one_file(folder: Path, **changes: Any) -> Path:
    safetensors_torch.save_file(weights(**changes), folder / "model.safetensors")
    return folder


def two_files(folder: Path, **listed: Any) -> Path:
    """Layer 0 in one file and the rest in another; the index with changes, None for no entry."""
    made = weights()
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    safetensors_torch.save_file({"layers.0.w": made.pop("layers.0.w")}, folder / first)
    safetensors_torch.save_file(made, folder / second)
    index = {"layers.0.w": first, **dict.fromkeys(made, second)}
    index |= {name.replace("__", "."): file for name, file in listed.items()}
    index = {name: file for name, file in index.items() if file is not None}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


def error_of(folder: Path, **options: Any) -> str:
    with pytest.raises(WeightsError) as error:
        load_params(folder, TABLE, **options)
    return str(error.value).replace(str(folder), "FOLDER")


def test_one_file_and_several_hold_the_same(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    one = load_params(one_file(tmp_path / "one"), TABLE)
    two = load_params(two_files(tmp_path / "two"), TABLE)
    assert torch.equal(one["w"], torch.arange(3.0).reshape(3, 1, 1).expand(3, 2, 4))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_all_that_does_not_fit_is_in_one_error(tmp_path: Path) -> None:
    changes = {
        "layers__1__w": None, "layers__2__w": torch.zeros(4, 3), "b": torch.zeros(4).to(torch.int8),
        "extra": torch.zeros(1), "layers__7__w": torch.zeros(1), "layers__0__mask": torch.zeros(1),
    }  # fmt: skip
    assert error_of(one_file(tmp_path, **changes)) == (
        "load('FOLDER'): does not hold this model.\n"
        "  missing: layers.1.w\n"
        "  unexpected: extra\n"
        "  unexpected: layers.7.w\n"
        "  b is I8; only F64, F32, F16, BF16 are read\n"
        "  layers.2.w has shape [4, 3]; the model's: [4, 2]\n"
        "  fix: the model's own config.json; a head that is the embedding: tie_word_embeddings"
    )


def test_a_transposed_tensor_is_not_read(tmp_path: Path) -> None:
    text = error_of(one_file(tmp_path, layers__0__w=torch.zeros(2, 4)))
    assert "layers.0.w has shape [2, 4]; the model's: [4, 2]" in text


def test_layers_of_several_dtypes_are_cast_on_request_only(tmp_path: Path) -> None:
    one_file(tmp_path, layers__1__w=torch.full((4, 2), 0.1).bfloat16())
    assert "['w'] is BF16 and F32 by layer; cast with dtype=" in error_of(tmp_path)
    found = load_params(tmp_path, TABLE, dtype=torch.float32)
    assert (found["w"][1] == 0.10009765625).all()


def test_sizes_are_checked_before_names_are_made(tmp_path: Path) -> None:
    one_file(tmp_path)
    many = Table(TABLE.entries, TABLE.axes, {"layers": 10**12, "in": 2, "out": 4})
    with pytest.raises(WeightsError, match=r"1,000,000,000,000 layers; the files have 4 tensors"):
        load_params(tmp_path, many)
    large = Table(TABLE.entries, TABLE.axes, {"layers": 3, "in": 2**40, "out": 2**40})
    with pytest.raises(WeightsError, match=r"b has shape \[4\]; the model's: \[1099511627776\]"):
        load_params(tmp_path, large)


def header(entries: Any, data: bytes = b"", *, claimed: int | None = None) -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(text) if claimed is None else claimed) + text + data


def entry(shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"abc",
        header({}, claimed=2**62),
        header({}, claimed=99),
        header(b"not json"),
        header({"b": entry([2**62, 8], 0, 4)}, b"0000"),
        header({"b": entry([4], 0, 16)}, b"0000"),
        header({"b": entry([4], 0, 4)}, b"0000"),
        header({"b": entry([-1], 0, 4)}, b"0000"),
        header({"b": entry([1], 0, 4), "c": entry([1], 0, 4)}, b"0000"),
        header({"b": entry([1], 0, 4)}, b"00000000"),
    ],
)
def test_broken_files_are_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    assert error_of(tmp_path).startswith(
        "FOLDER/model.safetensors: cannot be read as safetensors.\n  "
    )


@pytest.mark.parametrize("cut", [1, 40, 10**6])
def test_a_file_that_is_cut_off_is_named(cut: int, tmp_path: Path) -> None:
    path = one_file(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[: max(0, path.stat().st_size - cut)])
    assert "FOLDER/model.safetensors: cannot be read as safetensors." in error_of(tmp_path)


@pytest.mark.parametrize(
    "file",
    ["../model.safetensors", "/etc/model.safetensors", "a/b.safetensors", "..\\b.safetensors",
     "C:b.safetensors", "..", "", "weights.bin", 3, None, ["b.safetensors"], "b\0.safetensors"],
)  # fmt: skip
def test_an_index_names_files_beside_itself_only(file: Any, tmp_path: Path) -> None:
    folder = two_files(tmp_path)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["b"] = file
    (folder / INDEX).write_text(json.dumps(index))
    text = error_of(folder)
    assert text == (
        f"FOLDER/{INDEX}: puts b into {file!r}, which is not the name of a safetensors file beside it."
    )


def test_an_index_and_its_files_say_the_same(tmp_path: Path) -> None:
    listed = {"layers__2__w": None, "layers__9__w": "model-00001-of-00002.safetensors"}
    text = error_of(two_files(tmp_path, **listed))
    assert "not there: layers.9.w in model-00001-of-00002.safetensors" in text
    assert "not listed: layers.2.w in model-00002-of-00002.safetensors" in text


def test_a_tensor_that_no_index_lists_is_an_error(tmp_path: Path) -> None:
    text = error_of(two_files(tmp_path, layers__2__w=None))
    assert "not listed: layers.2.w in model-00002-of-00002.safetensors" in text
    assert "not there" not in text


def test_a_tensor_in_the_wrong_file_is_an_error(tmp_path: Path) -> None:
    text = error_of(two_files(tmp_path, b="model-00001-of-00002.safetensors"))
    assert "not there: b in model-00001-of-00002.safetensors" in text


def test_a_tensor_in_two_files_is_an_error(tmp_path: Path) -> None:
    folder = two_files(tmp_path)
    path = folder / "model-00001-of-00002.safetensors"
    safetensors_torch.save_file(safetensors_torch.load_file(path) | {"b": torch.zeros(4)}, path)
    assert "b is in model-00001-of-00002.safetensors too." in error_of(folder)


def test_a_file_that_is_listed_and_missing_is_named(tmp_path: Path) -> None:
    two_files(tmp_path, b="model-00003-of-00003.safetensors")
    assert "FOLDER/model-00003-of-00003.safetensors: cannot be read" in error_of(tmp_path)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("{", "cannot be read as JSON."),
        ("[1]", "holds a list, not an object."),
        ('{"weight_map": []}', 'has no object "weight_map".'),
        ("{}", 'has no object "weight_map".'),
        (
            '{"weight_map": {"b": "x.safetensors", "b": "y.safetensors"}}',
            "the key 'b' is there twice",
        ),
        ("[" * 10**5, "cannot be read as JSON."),
    ],
)
def test_a_broken_index_is_named(text: str, what: str, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(text)
    found = error_of(tmp_path)
    assert found.startswith(f"FOLDER/{INDEX}:")
    assert what in found


def test_json_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"a": "x" * 100}))
    with pytest.raises(WeightsError, match="is larger than 50 bytes; not read"):
        read_json(path, limit=50)
    path.write_bytes(b'{"a": "\xff"}')
    with pytest.raises(WeightsError, match=r"config\.json: is not UTF-8"):
        read_json(path)
    with pytest.raises(WeightsError, match=r"other\.json: cannot be read: No such file"):
        read_json(tmp_path / "other.json")


def test_pickles_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    assert error_of(tmp_path) == (
        f"FOLDER: has neither model.safetensors nor {INDEX}.\n"
        "  it has pytorch_model.bin: pickles, which are not read\n"
        "  fix: model.save_pretrained(directory) in transformers writes safetensors"
    )


def test_a_spec_that_does_not_fit_is_named(tmp_path: Path) -> None:
    mesh = pfx.make_mesh("simulated", tp=3)
    with pytest.raises(pfx.errors.ShardingError, match=r"params\['b'\] cannot be split"):
        load_params(one_file(tmp_path), TABLE, mesh=mesh, specs=pfx.P("tp"))


# Writing


PARAMS = {"w": torch.arange(24.0).reshape(3, 2, 4), "b": torch.ones(4)}


def save_error(folder: Path, params: Any) -> str:
    with pytest.raises(WeightsError) as error:
        save_params(folder / "out", params, TABLE, config={})
    assert not (folder / "out" / "model.safetensors").exists()
    return str(error.value).replace(str(folder), "FOLDER")


def test_nothing_is_written_over(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("mine")
    assert save_error(tmp_path, PARAMS) == (
        "save('FOLDER/out'): there is something already.\n  fix: a directory that is new or empty"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    (tmp_path / "out" / "config.json").unlink()
    save_params(tmp_path / "out", PARAMS, TABLE, config={})
    assert torch.equal(load_params(tmp_path / "out", TABLE)["w"], PARAMS["w"])


def test_parameters_of_another_model_are_refused(tmp_path: Path) -> None:
    owed = pfx.device_put(PARAMS["b"], pfx.make_mesh("simulated", dp=2), pfx.P(unreduced="dp"))
    text = save_error(tmp_path, {"w": torch.zeros(3, 4, 2), "b": owed})
    assert "params['w'] has shape [3, 4, 2]; the model's: [3, 2, 4]" in text
    assert "params['b'] is an unreduced sum over dp" in text
    text = save_error(tmp_path, {"w": torch.zeros(3, 2, 4).int(), "b": 1.0})
    assert "params['w'] is torch.int32; only floats are written" in text
    assert "params['b'] is a float, not a tensor" in text
    with pytest.raises(pfx.errors.TreeError, match="missing"):
        save_params(tmp_path / "out", {"w": PARAMS["w"]}, TABLE, config={})


def test_a_save_that_fails_leaves_nothing_and_one_that_was_killed_does_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(safetensors_torch, "save_file", full)
        text = save_error(tmp_path, PARAMS)
    assert "cannot be written" in text
    assert "No space left on device" in text
    assert list(tmp_path.iterdir()) == []
    partial = tmp_path / ".out.partial"
    partial.mkdir()
    (partial / "model-00001-of-00009.safetensors").write_bytes(b"half")
    save_params(tmp_path / "out", PARAMS, TABLE, config={})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "config.json", "model.safetensors",
    ]  # fmt: skip


def test_files_are_as_large_as_asked(tmp_path: Path) -> None:
    save_params(tmp_path / "out", PARAMS, TABLE, config={}, max_shard_bytes=64)
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert index["metadata"]["total_size"] == 4 * (24 + 4)
    sizes: dict[str, int] = {}
    for name, file in index["weight_map"].items():
        value = safetensors_torch.load_file(tmp_path / "out" / file)[name]
        sizes[file] = sizes.get(file, 0) + value.nbytes
    assert sizes == {
        "model-00001-of-00002.safetensors": 16 + 32,
        "model-00002-of-00002.safetensors": 64,
    }


# Tables


@pytest.mark.parametrize(
    "make",
    [
        lambda: Table({"w": "w: a b"}, {"w": "a c"}, {"a": 1, "b": 1, "c": 1}),
        lambda: Table({"w": "w: (0/2 1/2 a)"}, {"w": "a"}, {"a": 1}),
        lambda: Table({"w": "w a"}, {"w": "a"}, {"a": 1}),
    ],
)
def test_tables_that_mean_nothing(make: Callable[[], Table]) -> None:
    with pytest.raises(AssertionError):
        make()


@pytest.mark.parametrize(
    "lines", [("w: (0/2 a)", "w: (0/2 a)"), ("w: (0/3 a)", "w: (1/3 a)"), ("w: a", "w: a")]
)
def test_parts_that_are_not_the_whole(lines: tuple[str, str], tmp_path: Path) -> None:
    table = Table({"x": lines[0], "y": lines[1]}, {"x": "a", "y": "a"}, {"a": 2})
    params = {"x": torch.zeros(2), "y": torch.zeros(2)}
    with pytest.raises(WeightsError, match="table: w is not made of all its parts"):
        save_params(tmp_path / "out", params, table, config={})


def test_names_that_differ_by_a_number_are_one_line() -> None:
    names = [f"h.{i}.mlp.0.w" for i in (0, 1, 2, 5, 7, 8)] + ["ln", "h.3.b"]
    assert collapsed(names) == ["h.3.b", "h.[0-2,5,7-8].mlp.0.w", "ln"]

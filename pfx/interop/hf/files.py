"""The safetensors files of a directory: which tensor lies where, and slices of them.

The `safetensors` library checks each header (its size, and that shapes, dtypes and byte ranges fit the
file) and maps the file, so a slice costs only what it covers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pfx.errors import message
from pfx.interop.hf.json_files import MEGABYTE, read_json
from pfx.interop.hf.problems import WeightsError, collapsed

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


@dataclass(frozen=True)
class Stored:
    """A tensor in a file."""

    path: Path
    shape: tuple[int, ...]
    dtype: str  # as the format calls it; those of `DTYPES` can be read
    data: Any  # what the library slices

    def read(self, slices: Sequence[slice]) -> torch.Tensor:
        """A slice, which may be a view of the mapped file."""
        return self.data[tuple(slices)]


@contextlib.contextmanager
def stored_tensors(directory: Path) -> Iterator[dict[str, Stored]]:
    """Open the files of a directory; yields every tensor by name.

    Raises:
        WeightsError: there are no such files, one is not what its header says, or the index names
            what is not there.
    """
    open_file = safe_open()
    paths, listed = _paths(directory)
    found: dict[str, Stored] = {}
    with contextlib.ExitStack() as stack:
        for path in paths:
            file = _opened(stack, open_file, path)
            for name in file.keys():  # noqa: SIM118  it is no dict
                if name in found:
                    where = f"{path}: {name}"
                    what = f"is in {found[name].path.name} too."
                    raise WeightsError(message(where, what, fix="remove one of the files"))
                data = file.get_slice(name)
                found[name] = Stored(path, tuple(data.get_shape()), data.get_dtype(), data)
        _check_listed(directory, listed, found)
        yield found


def safe_open() -> Any:
    """Import safetensors, or say how to get it."""
    try:
        from safetensors import safe_open
    except ImportError as error:
        what = "reads and writes with safetensors, which is not installed."
        raise ImportError(message("pfx.interop.hf:", what, fix="pip install 'pfx[hf]'")) from error
    return safe_open


def _opened(stack: contextlib.ExitStack, open_file: Any, path: Path) -> Any:
    from safetensors import SafetensorError

    try:
        return stack.enter_context(open_file(path, framework="pt"))
    except (OSError, SafetensorError) as error:
        what = "cannot be read as safetensors."
        raise WeightsError(message(f"{path}:", what, str(error))) from error


def _paths(directory: Path) -> tuple[list[Path], dict[str, str]]:
    """The files of a directory, and which of them the index says has which tensor."""
    if (directory / SINGLE).exists():
        return [directory / SINGLE], {}
    if not (directory / INDEX).exists():
        what = f"has neither {SINGLE} nor {INDEX}."
        others = [path.name for path in sorted(directory.glob("*.bin"))[:3]]
        why = f"it has {', '.join(others)}: pickles, which are not read" if others else ""
        fix = "model.save_pretrained(directory) in transformers writes safetensors"
        raise WeightsError(message(f"{directory}:", what, why, fix=fix))
    listed = read_json(directory / INDEX, limit=64 * MEGABYTE).get("weight_map")
    if not isinstance(listed, dict):
        raise WeightsError(message(f"{directory / INDEX}:", 'has no object "weight_map".'))
    for name, file in listed.items():
        _check_file_name(directory / INDEX, name, file)
    return [directory / file for file in sorted(set(listed.values()))], listed


def _check_file_name(index: Path, name: str, file: Any) -> None:
    """An index may name files beside itself and nothing else."""
    plain = isinstance(file, str) and not set(file) & set("/\\:\0")
    if not plain or not file.endswith(".safetensors"):
        what = f"puts {name} into {file!r}, which is not the name of a safetensors file beside it."
        raise WeightsError(message(f"{index}:", what))


def _check_listed(directory: Path, listed: dict[str, str], found: dict[str, Stored]) -> None:
    """An index and its files say the same."""
    if not listed:
        return
    missing = [
        f"{name} in {file}"
        for name, file in listed.items()
        if name not in found or found[name].path.name != file
    ]
    unlisted = [f"{name} in {found[name].path.name}" for name in found if name not in listed]
    if missing or unlisted:
        raise WeightsError(
            message(
                f"{directory / INDEX}:",
                "does not say what is in the files.",
                f"not there: {', '.join(collapsed(missing))}" if missing else "",
                f"not listed: {', '.join(collapsed(unlisted))}" if unlisted else "",
                fix="copy index and files anew, from one place",
            )
        )

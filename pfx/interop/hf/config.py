"""config.json, read strictly: every entry is used, known to change nothing, or an error."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from pfx.errors import message
from pfx.interop.hf.json_files import MEGABYTE, read_json
from pfx.interop.hf.problems import WeightsError

CONFIG = "config.json"
_MISSING = object()
Made = TypeVar("Made")
_DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "float16", "bfloat16")}


def read_config_json(directory: Path) -> dict[str, Any]:
    """Read config.json of a directory of weights.

    Raises:
        WeightsError: it is missing, too large, or no JSON object.
    """
    return read_json(directory / CONFIG, limit=MEGABYTE)


class Fields:
    """Takes the entries of a config.json one by one, and at the end refuses what was not taken.

    A problem does not end the reading: `finish` raises one error with all of them.

    >>> fields = Fields("config.json:", {"n_layer": 2, "activation": "relu", "speed": 1})
    >>> fields.size("n_layer")
    2
    >>> fields.expect("activation", ["gelu_new"])
    >>> fields.finish()
    Traceback (most recent call last):
    pfx.interop.hf.problems.WeightsError: config.json: is not of a model that can be read.
      activation = 'relu'; supported: 'gelu_new'
      speed = 1 is unknown
      fix: ignore=('speed',) if that changes nothing in the model
    """

    def __init__(
        self, where: str, entries: Mapping[str, Any], parent: Fields | None = None
    ) -> None:
        self.where = where
        self.entries = dict(entries)
        self.prefix = "" if parent is None else f"{where}."
        self.problems: list[str] = [] if parent is None else parent.problems
        self.groups: list[Fields] = []

    def group(self, name: str) -> Fields:
        """The entries of an object in an entry; none where it is missing or null."""
        value = self.take(name, None)
        if value is not None and not isinstance(value, dict):
            self._wrong(name, value, "an object")
            value = None
        self.groups.append(Fields(name, value or {}, self))
        return self.groups[-1]

    def take(self, name: str, default: Any = _MISSING) -> Any:
        """An entry as it stands."""
        value = self.entries.pop(name, default)
        if value is _MISSING:
            self.problems.append(f"{self.prefix}{name} is missing")
            return None
        return value

    def size(self, name: str, default: Any = _MISSING) -> int:
        """A positive integer; where it is null, the default."""
        value = self.take(name, default)
        if value is None and default is not _MISSING:
            value = default
        if type(value) is not int or value < 1:
            self._wrong(name, value, "an integer of at least 1")
            return 1
        return value

    def number(self, name: str, default: Any = _MISSING, *, above: float | None = 0.0) -> float:
        """A finite number."""
        value = self.take(name, default)
        if type(value) not in (int, float) or not abs(value) < float("inf"):
            self._wrong(name, value, "a number")
            return 1.0
        if above is not None and not value > above:
            self._wrong(name, value, f"a number above {above:g}")
            return 1.0
        return float(value)

    def flag(self, name: str, *, default: bool) -> bool:
        """A bool."""
        value = self.take(name, default)
        if type(value) is not bool:
            self._wrong(name, value, "true or false")
            return default
        return value

    def rate(self, name: str, default: float = 0.0) -> float:
        """A share of things dropped, at least 0 and below 1."""
        value = self.number(name, default, above=None)
        if not 0 <= value < 1:
            self._wrong(name, value, "a number from 0 to below 1")
            return 0.0
        return value

    def dtype(self) -> torch.dtype:
        """The dtype that the weights are said to have, under its new or its old name."""
        old = self.take("torch_dtype", None)
        name = self.take("dtype", None) or old or "float32"
        if name not in _DTYPES:
            self._wrong("dtype", name, ", ".join(_DTYPES))
            return torch.float32
        return _DTYPES[name]

    def expect(self, name: str, supported: Collection[Any]) -> None:
        """An entry that may be missing, or one of some values."""
        value = self.take(name, None)
        if value is not None and not any(
            type(value) is type(each) and value == each for each in supported
        ):
            texts = ", ".join(map(repr, supported)) or "null"
            self.problems.append(f"{self.prefix}{name} = {value!r}; supported: {texts}")

    def _wrong(self, name: str, value: Any, wanted: str) -> None:
        name = f"{self.prefix}{name}"
        if value is not None or f"{name} is missing" not in self.problems:
            self.problems.append(f"{name} = {value!r}; it must be {wanted}")

    def made(self, cls: type[Made], values: Mapping[str, Any]) -> Made:
        """A config of these values; raises with the name of the file where they do not fit together."""
        try:
            return cls(**values)
        except ValueError as error:
            what = "is not of a model that can be read."
            raise WeightsError(message(self.where, what, *str(error).splitlines())) from error

    def finish(self, *, harmless: Iterable[str] = (), ignore: Iterable[str] = ()) -> None:
        """Raise with all problems, and all entries that nobody took.

        Args:
            harmless: names that may have any value.
            ignore: more of them, as the user wants it.
        """
        known = {*harmless, *ignore}
        left = {f"{f.prefix}{k}": v for f in (self, *self.groups) for k, v in f.entries.items()}
        unknown = [name for name in left if name not in known]
        self.problems += [f"{name} = {left[name]!r} is unknown" for name in unknown]
        if not self.problems:
            return
        names = "".join(f"{name!r}, " for name in unknown)
        names = names.strip() if len(unknown) == 1 else names.removesuffix(", ")
        fix = f"ignore=({names}) if that changes nothing in the model" if unknown else ""
        what = "is not of a model that can be read."
        raise WeightsError(message(self.where, what, *self.problems, fix=fix))

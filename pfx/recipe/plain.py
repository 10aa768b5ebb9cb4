"""Settings as plain data and back: what is written with a run, and what ``--set`` reads.

A setting is a number, a string, a bool, None, a dtype, a schedule, or a tuple, mapping or dataclass
of settings. `plain` makes JSON of it; `decode` and `parse` make the setting again, from JSON and
from what someone typed, as the field's annotation says.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Union

import torch

from pfx.schedules import Schedule


def plain(value: Any) -> Any:
    """Return a setting as JSON has it.

    >>> plain({"dtype": torch.bfloat16, "betas": (0.9, 0.95)})
    {'dtype': 'bfloat16', 'betas': [0.9, 0.95]}
    """
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, Schedule):
        return str(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in settings(value)}
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if hasattr(value, "__qualname__"):
        return f"{value.__module__}:{value.__qualname__}"
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))  # the same in the next process


def settings(value: Any) -> list[dataclasses.Field[Any]]:
    """The fields of a dataclass that can be given."""
    return [field for field in dataclasses.fields(value) if field.init]


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """Return the plain settings of a nested dataclass by dotted name.

    >>> flat({"train": {"steps": 3}, "betas": [0.9, 0.95]})
    {'train.steps': 3, 'betas': [0.9, 0.95]}
    """
    return dict(_flat(plain(value), path))


def _flat(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict) or not value:
        yield path, value
        return
    for name, item in value.items():
        yield from _flat(item, f"{path}.{name}" if path else name)


def kind_name(kind: Any) -> str:
    """How an error calls an annotation: "int or None"."""
    if _is_union(kind):
        return " or ".join(map(kind_name, typing.get_args(kind)))
    if kind is type(None):
        return "None"
    if typing.get_origin(kind) is Literal:
        return " or ".join(repr(choice) for choice in typing.get_args(kind))
    if kind is torch.dtype:
        return "a dtype"
    return kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")


def parse(text: str, kind: Any) -> Any:
    """Read what was typed as a value of a field's annotation.

    Raises:
        ValueError: it is none.

    >>> parse("1_000", int), parse("none", int | None), parse("1,2", tuple[int, ...])
    (1000, None, (1, 2))
    """
    if _is_union(kind):
        # A string takes anything: it comes last.
        return _first(sorted(typing.get_args(kind), key=lambda k: k is str), parse, text)
    if kind in SCALARS:
        return SCALARS[kind](text)
    if kind is Any:
        return _first((type(None), bool, int, float, str), parse, text)
    if typing.get_origin(kind) is Literal:
        return _choice(text, kind, lambda choice: str(choice))
    if _is_sequence(kind):
        items = json.loads(text) if text.startswith("[") else text.split(",") if text else []
        texts = [item if isinstance(item, str) else json.dumps(item) for item in items]
        return _tuple([t.strip() for t in texts], kind, parse)
    if _is_mapping(kind):
        value = _mapping_kind(kind)
        pairs = [item.partition("=") for item in text.split(",") if item]
        if not all(found for _, found, _ in pairs):
            raise ValueError(text)
        return {name.strip(): parse(item.strip(), value) for name, _, item in pairs}
    raise ValueError(text)


def decode(value: Any, kind: Any) -> Any:
    """Make a setting again of what `plain` returned, as a field's annotation says.

    Raises:
        ValueError: it does not fit.

    >>> decode("bfloat16", torch.dtype), decode([1, 2], tuple[int, ...])
    (torch.bfloat16, (1, 2))
    """
    if kind is Any or (value is None and _takes_none(kind)):
        return value
    if _is_union(kind):
        return _first(typing.get_args(kind), decode, value)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _decode_dataclass(value, kind)
    if typing.get_origin(kind) is Literal:
        return _choice(value, kind, lambda choice: choice)
    if kind is torch.dtype:
        return _dtype(value)
    if kind is float and type(value) is int:
        return float(value)
    if kind in SCALARS:
        if type(value) is not kind:
            raise ValueError(value)
        return value
    if _is_sequence(kind) and isinstance(value, list):
        return _tuple(value, kind, decode)
    if _is_mapping(kind) and isinstance(value, dict):
        return {name: decode(item, _mapping_kind(kind)) for name, item in value.items()}
    raise ValueError(value)


def _decode_dataclass(value: Any, kind: type) -> Any:
    hints = typing.get_type_hints(kind)
    names = {field.name for field in settings(kind)}
    if not isinstance(value, dict) or not value.keys() <= names:
        raise ValueError(value)
    return kind(**{name: decode(item, hints[name]) for name, item in value.items()})


def _first(kinds: Sequence[Any], read: Callable[[Any, Any], Any], value: Any) -> Any:
    """The value as the first kind that takes it."""
    for kind in kinds:
        try:
            return read(value, kind)
        except ValueError:
            continue
    raise ValueError(value)


def _choice(value: Any, kind: Any, shown: Callable[[Any], Any]) -> Any:
    for choice in typing.get_args(kind):
        if shown(choice) == value:
            return choice
    raise ValueError(value)


def _tuple(items: Sequence[Any], kind: Any, read: Callable[[Any, Any], Any]) -> tuple[Any, ...]:
    kinds = typing.get_args(kind) or (Any, ...)
    if kinds[-1] is ... or typing.get_origin(kind) is not tuple:
        kinds = (kinds[0],) * len(items)
    if len(kinds) != len(items):
        raise ValueError(items)
    return tuple(read(item, one) for item, one in zip(items, kinds, strict=True))


def _is_union(kind: Any) -> bool:
    return typing.get_origin(kind) in (Union, types.UnionType)


def _takes_none(kind: Any) -> bool:
    return kind is type(None) or (_is_union(kind) and type(None) in typing.get_args(kind))


def _is_sequence(kind: Any) -> bool:
    return (typing.get_origin(kind) or kind) in (tuple, list, Sequence)


def _is_mapping(kind: Any) -> bool:
    return (typing.get_origin(kind) or kind) in (dict, Mapping)


def _mapping_kind(kind: Any) -> Any:
    return (typing.get_args(kind) or (str, Any))[1]


def _none(text: str) -> None:
    if text.lower() not in ("none", "null"):
        raise ValueError(text)


def _bool(text: str) -> bool:
    known = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
    if text.lower() not in known:
        raise ValueError(text)
    return known[text.lower()]


def _dtype(text: Any) -> torch.dtype:
    found = getattr(torch, str(text).removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(text)
    return found


SCALARS: Mapping[Any, Callable[[str], Any]] = {
    int: int, float: float, str: str, bool: _bool, type(None): _none, torch.dtype: _dtype,
}  # fmt: skip

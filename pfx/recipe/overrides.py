"""``--set train.steps=100``: settings replaced by dotted name, typed as their fields are annotated."""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from pfx.errors import PfxError, message
from pfx.recipe.plain import flat, kind_name, parse


class ConfigError(PfxError, ValueError):
    """Settings of a run that are unknown, of the wrong type, or do not fit each other."""


def overridden(run: Any, assignments: Sequence[str]) -> Any:
    """Return a config with settings replaced, all at once.

    Args:
        run: a dataclass of dataclasses.
        assignments: ``"name.of.setting=value"``, the later ones win.

    Raises:
        ConfigError: naming the nearest known name, or the value with the type that is wanted.

    >>> from pfx.recipe.config import Train
    >>> overridden(Train(steps=1, batch_size=4), ["steps=1_000", "seed=7"])
    Train(steps=1000, batch_size=4, seed=7, device='cpu', deterministic=False)
    """
    wanted: dict[str, Any] = {}
    for text in assignments:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(message(f"--set {text}:", "no value.", fix=f"--set {text}=..."))
        _put(wanted, name.strip().split("."), value.strip(), text)
    return _replaced(run, wanted, "", run)


def _put(tree: dict[str, Any], path: list[str], value: str, text: str) -> None:
    for name in path[:-1]:
        tree = tree.setdefault(name, {})
        if isinstance(tree, str):
            raise ConfigError(message(f"--set {text}:", "sets a part of what is set as a whole."))
    tree[path[-1]] = value


def _replaced(value: Any, wanted: Mapping[str, Any], path: str, root: Any) -> Any:
    """The dataclass or mapping with everything below it replaced."""
    if isinstance(value, Mapping):
        known: dict[str, Any] = dict.fromkeys(wanted, Any)
    else:
        hints = typing.get_type_hints(type(value))
        known = {field.name: hints[field.name] for field in dataclasses.fields(value) if field.init}
    changes = {}
    for name, item in wanted.items():
        where = f"{path}.{name}" if path else name
        if name not in known:
            raise _unknown(where, root)
        old = value.get(name) if isinstance(value, Mapping) else getattr(value, name)
        changes[name] = _changed(old, item, known[name], where, root)
    if isinstance(value, Mapping):
        return {**value, **changes}
    try:
        return dataclasses.replace(value, **changes)
    except ConfigError:
        raise
    except ValueError as error:  # of the dataclass itself: out of range, or not fitting together
        raise ConfigError(str(error)) from error


def _changed(old: Any, item: Any, kind: Any, where: str, root: Any) -> Any:
    nested = dataclasses.is_dataclass(old) or isinstance(old, Mapping)
    if isinstance(item, dict):
        if nested:
            return _replaced(old, item, where, root)
        raise _unknown(f"{where}.{next(iter(item))}", root)
    if dataclasses.is_dataclass(old):
        what, names = "is a group of settings.", ", ".join(flat(old, where))
        raise ConfigError(message(f"--set {where}={item}:", what, f"in it: {names}"))
    try:
        return parse(item, kind)
    except ValueError:
        what = f"{item!r} is not {kind_name(kind)}."
        raise ConfigError(message(f"--set {where}:", what, f"now: {where} = {old!r}")) from None


def _unknown(where: str, root: Any) -> ConfigError:
    names = list(flat(root))
    near = difflib.get_close_matches(where, names, n=1, cutoff=0.5)
    last = where.rpartition(".")[2]
    near = near or [name for name in names if name.rpartition(".")[2] == last]
    known = "" if near else f"settings: {', '.join(names)}"
    return ConfigError(
        message(
            f"--set {where}:", "no such setting.", known, fix=f"--set {near[0]}" if near else ""
        )
    )

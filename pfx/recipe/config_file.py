"""Read a config file: Python with one function, ``config() -> Run``."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from pfx.errors import PfxError, message
from pfx.recipe.config import Run
from pfx.recipe.overrides import ConfigError


def load(path: Path) -> Run:
    """Run a config file and return its Run.

    The file's folder is put on the import path, behind what is there: it may import its neighbours.

    Raises:
        ConfigError: there is no such file, or no such function in it, or it returns another thing.
    """
    spec = importlib.util.spec_from_file_location("pfx_config", path)
    if spec is None or spec.loader is None or not path.is_file():
        fix = "pfx train path/to/config.py"
        what = "is no Python file." if path.exists() else "is not there."
        raise ConfigError(message(f"{path}:", what, fix=fix))
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = getattr(module, "config", None)
    if not callable(config):
        fix = "def config() -> pfx.recipe.Run: ..."
        raise ConfigError(message(f"{path}:", "has no function config.", fix=fix))
    try:
        run = config()
    except ConfigError:
        raise
    except PfxError as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(run, Run):
        what = f"config() returned a {type(run).__name__}, not a pfx.recipe.Run."
        raise ConfigError(message(f"{path}:", what))
    return run


def module_of(name: str, setting: str) -> ModuleType:
    """Import a module that a setting names.

    Raises:
        ConfigError: there is none of that name.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # it is there, and imports something that is not
        fix = "start where it can be imported from, or PYTHONPATH=its/folder"
        raise ConfigError(message(f"{setting}={name!r}:", "no such module.", fix=fix)) from None


def function_of(name: str, setting: str) -> Callable[..., Any]:
    """Import a function that a setting names as "module:function".

    Raises:
        ConfigError: there is none of that name.
    """
    module, _, function = name.partition(":")
    found = getattr(module_of(module, setting), function, None) if function else None
    if not callable(found):
        fix = f'{setting}="my_module:my_function"'
        raise ConfigError(message(f"{setting}={name!r}:", "no such function.", fix=fix))
    return found

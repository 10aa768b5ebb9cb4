"""The files of a tokenizer that lie beside the weights: where they are and what they say of chats."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from pfx.errors import message
from pfx.interop.hf.json_files import MEGABYTE, read_json, read_text
from pfx.interop.hf.problems import WeightsError

TOKENIZER, CONFIG, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
_COPIED = (
    *(TOKENIZER, CONFIG, TEMPLATE, "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "tokenizer.model", "generation_config.json"),
)


def tokenizer_file(directory: str | os.PathLike[str]) -> Path:
    """Return the path of tokenizer.json.

    Raises:
        WeightsError: there is none.
    """
    path = Path(directory) / TOKENIZER
    if not path.is_file():
        fix = "AutoTokenizer.from_pretrained(directory).save_pretrained(directory) in transformers"
        raise WeightsError(message(f"{os.fspath(directory)}:", f"has no {TOKENIZER}.", fix=fix))
    return path


def chat_template(directory: str | os.PathLike[str]) -> str | None:
    """Return the Jinja template of chats; None where the model has none.

    It is in chat_template.jinja, or else in tokenizer_config.json: a string, or a list of named
    templates of which one is the default.

    Raises:
        WeightsError: the file cannot be read, or what it says is no template.
    """
    folder = Path(directory)
    if (folder / TEMPLATE).is_file():
        return read_text(folder / TEMPLATE, limit=MEGABYTE)
    if not (folder / CONFIG).is_file():
        return None
    found = read_json(folder / CONFIG).get("chat_template")
    if isinstance(found, list):
        named = {each.get("name"): each.get("template") for each in found if isinstance(each, dict)}
        found = named.get("default")
        if found is None:
            what = f"has the chat templates {', '.join(map(repr, named))}, and none is the default."
            raise WeightsError(message(f"{folder / CONFIG}:", what))
    if found is not None and not isinstance(found, str):
        what = f"has a chat_template that is a {type(found).__name__}, not a string."
        raise WeightsError(message(f"{folder / CONFIG}:", what))
    return found


def special_tokens(directory: str | os.PathLike[str]) -> dict[str, str]:
    """Return the special tokens that tokenizer_config.json names, such as ``eos_token``.

    Templates of chats use them. Without the file there are none.
    """
    path = Path(directory) / CONFIG
    if not path.is_file():
        return {}
    named = {name: _content(value) for name, value in read_json(path).items()}
    return {
        name: text
        for name, text in named.items()
        if name.endswith("_token") and isinstance(text, str)
    }


def _content(value: Any) -> Any:
    """A token is a string, or an object that holds it."""
    return value.get("content") if isinstance(value, dict) else value


def copy_tokenizer(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> list[str]:
    """Copy a tokenizer's files into an existing directory; returns their names."""
    names = [name for name in _COPIED if (Path(source) / name).is_file()]
    for name in names:
        shutil.copyfile(Path(source) / name, Path(target) / name)
    return names

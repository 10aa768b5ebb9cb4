"""Weights of GPT-2, Llama, Qwen2 and Qwen3 in and out of the files that transformers reads.

    config, params = hf.load("path/to/model")
    hf.save("path/to/other", params, config)

Each family's names, layouts and config.json are data in a file of this package; the engine that reads
and writes by them is `pfx.interop.hf`, which knows no model.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import pfx
from models import gpt, llama
from models.hf import gpt_format, llama_format
from pfx.interop import hf

Config = gpt.Config | llama.Config
Params = dict[str, Any]

_READERS = {
    "gpt2": gpt_format,
    "llama": llama_format,
    "qwen2": llama_format,
    "qwen3": llama_format,
}  # by "model_type"
_WRITERS = {gpt.Config: gpt_format, llama.Config: llama_format}


def family_of(config: Config) -> ModuleType:
    """Return the module of `models` that a config belongs to.

    >>> family_of(gpt.GPT2).__name__
    'models.gpt'
    """
    return {gpt.Config: gpt, llama.Config: llama}[type(config)]


def table(config: Config) -> hf.Table:
    """Return the names and layouts of a model's parameters in the files."""
    return _WRITERS[type(config)].table(config)


def read_config(
    directory: str | os.PathLike[str], *, ignore: Iterable[str] = ()
) -> gpt.Config | llama.Config:
    """Read config.json as the config of a model here.

    Args:
        directory: has the file.
        ignore: entries that may be there though they are unknown.

    Raises:
        pfx.interop.hf.WeightsError: the model is of another family, or an entry is unknown or asks
            for what the family here does not have; all of them are named.
    """
    entries = hf.read_config_json(Path(directory))
    where, kind = f"{os.fspath(directory)}/config.json:", entries.get("model_type")
    if not isinstance(kind, str) or kind not in _READERS:
        raise hf.WeightsError(
            f"{where} is of another family.\n"
            f"  model_type = {kind!r}; supported: {', '.join(map(repr, _READERS))}"
        )
    return _READERS[kind].read_config(where, entries, ignore)


def load(
    directory: str | os.PathLike[str],
    *,
    mesh: pfx.Mesh | None = None,
    specs: Any = None,
    dtype: torch.dtype | None = None,
    ignore: Iterable[str] = (),
) -> tuple[Config, Params]:
    """Read a model: its config, and its parameters on a mesh or as whole tensors.

    Law: the logits are those of transformers. Each process reads the slices that it keeps, and
    nothing else; the vocabulary is padded with zeros.

    Args:
        directory: has config.json and safetensors files.
        mesh: where to put the parameters; None: whole tensors on the CPU.
        specs: of the parameters, as ``train.state_specs.params`` has them; None replicates.
        dtype: what to cast to; None: what the files have.
        ignore: as in `read_config`.

    Raises:
        pfx.interop.hf.WeightsError: the files are not those of a model that is supported.
    """
    with hf.together(f"load({os.fspath(directory)!r}):", mesh):
        config = read_config(directory, ignore=ignore)
    params = hf.load_params(directory, table(config), mesh=mesh, specs=specs, dtype=dtype)
    return replace(config, dtype=params["tok_embed"].dtype), params


def save(
    directory: str | os.PathLike[str],
    params: Params,
    config: Config,
    *,
    max_shard_bytes: int = 5 * 2**30,
    dtype: torch.dtype | None = None,
    extra: Mapping[str, Any] | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
) -> None:
    """Write a model that transformers loads: config.json and safetensors files.

    Law: `load` returns the same parameters bit for bit, with zeros as padding of the vocabulary.

    Args:
        directory: must not exist, or be empty; it appears when all is written.
        params: Arrays on any mesh, in any layout, or tensors.
        config: of the model.
        max_shard_bytes: of one file, and about the memory that is used.
        dtype: what to cast to; None: what the parameters have.
        extra: further entries of config.json, such as ``{"eos_token_id": 2}``.
        tokenizer: a directory whose tokenizer files are copied.

    Raises:
        pfx.interop.hf.WeightsError: the directory has something in it, or the parameters are not
            those of the config.
    """
    stored = str(dtype or params["tok_embed"].dtype).removeprefix("torch.")
    entries = {**_WRITERS[type(config)].write_config(config), "dtype": stored, **(extra or {})}
    hf.save_params(
        directory,
        params,
        table(config),
        config=entries,
        max_shard_bytes=max_shard_bytes,
        dtype=dtype,
        tokenizer=tokenizer,
    )

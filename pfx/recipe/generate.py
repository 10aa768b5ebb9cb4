"""Text from a trained model."""

from __future__ import annotations

import functools
from typing import Any

import torch

from pfx import random
from pfx.api import device_get, eval_shape, jit
from pfx.data import load_tokenizer
from pfx.errors import message
from pfx.plan import Plan
from pfx.recipe.build import check_device
from pfx.recipe.config_file import module_of
from pfx.recipe.overrides import ConfigError
from pfx.recipe.weights import Trained, read_params
from pfx.spec import P

SAMPLING = "models.sampling"


def tokenizer_of(run: Trained, given: str | None) -> Any:
    """The tokenizer that was asked for, else that of the run's config.

    Raises:
        ConfigError: there is none.
    """
    name = given or run.setting("data", "tokenizer")
    if name is None:
        fix = "--tokenizer path/to/tokenizer.json, or --tokenizer bytes"
        raise ConfigError(message(f"{run.directory}:", "its config names no tokenizer.", fix=fix))
    return load_tokenizer(name)


def write_on(
    run: Trained, tokenizer: Any, prompt: str, length: int, *, plan: Plan | None = None,
    seed: int = 0, device: str = "cpu", **settings: Any,
) -> str:  # fmt: skip
    """Continue a prompt by so many tokens; returns the prompt and what follows.

    Args:
        run: the trained model.
        tokenizer: text to ids and back.
        plan: how to spread the model; None: one device.
        seed: of the draws.
        settings: temperature, top_k, top_p, as `models.sampling.generate` has them.

    Raises:
        ConfigError: the prompt is empty, or has ids that the model does not know.
    """
    ids = torch.as_tensor([list(map(int, tokenizer.encode(prompt)))])
    _check(ids, run.functions.vocab_size)
    check_device(device, "--device")
    plan = plan or Plan()
    mesh = plan.mesh(device=device)
    shapes = eval_shape(run.functions.init, random.key(0))
    specs = plan.compute_specs(run.functions.axes, shapes, mesh, [])
    params = read_params(run, mesh, specs)
    generate = module_of(SAMPLING, "pfx generate").generate
    compiled = functools.partial(jit, mesh=mesh, out_specs=P(), names=plan.logical_names)
    written = generate(
        run.functions.module.apply, params, run.functions.config, ids, length, random.key(seed),
        stop=tokenizer.eod_id, compile=compiled, **settings,
    )  # fmt: skip
    row = device_get(written)[0].tolist()
    return tokenizer.decode(_before_end(row, ids.shape[1], tokenizer.eod_id))


def _before_end(row: list[int], start: int, end: int | None) -> list[int]:
    """What comes before the end of the document, of what was written."""
    return row[: row.index(end, start)] if end in row[start:] else row


def _check(ids: torch.Tensor, vocab_size: int | None) -> None:
    if not ids.numel():
        raise ConfigError(
            message("pfx generate:", "the prompt has no token.", fix='--prompt "The"')
        )
    if vocab_size is not None and int(ids.max()) >= vocab_size:
        what = f"the prompt has token {int(ids.max())}; the model knows {vocab_size}."
        raise ConfigError(message("pfx generate:", what, fix="the tokenizer of the training data"))

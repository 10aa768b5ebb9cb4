"""Text from a model: the most probable token, or a draw among the probable ones, again and again.

A pure function of the parameters, the prompt and a key. Nothing is cached: each token costs a forward
pass over the window, which has one shape for all of them, so a mesh compiles it once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

import pfx
from models import common
from models.common import Params

Apply = Callable[..., torch.Tensor]
Function = Callable[..., Any]


def generate(
    apply: Apply,
    params: Params,
    config: Any,
    prompt: torch.Tensor,
    length: int,
    key: torch.Tensor | None = None,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: int | None = None,
    compile: Callable[[Function], Function] | None = None,
) -> torch.Tensor:
    """Continue each row of a prompt by `length` tokens.

    Law: with temperature 0 it is the greedy search of transformers; else a draw depends on the key,
    the row and the position only, so any mesh writes the same.

    Args:
        apply: ``apply(params, tokens, config) -> logits``, of a module of this package.
        params: tensors, or Arrays on the mesh that `compile` makes a program for.
        config: of the model; beyond its ``max_seq_len`` the earliest tokens are no longer seen.
        prompt: (batch, seq) int64, seq at least 1.
        length: how many tokens to add.
        key: for the draws; not needed at temperature 0.
        temperature: what logits are divided by; 0 takes the most probable token.
        top_k: draw among this many most probable tokens only.
        top_p: draw among the most probable tokens that together have this probability only.
        stop: a token after which a row has nothing but this token.
        compile: applied to the function that finds the next token, for parameters on a mesh:
            ``functools.partial(pfx.jit, mesh=mesh, out_specs=P(), names=plan.logical_names)``.
            None: a program for one device.

    Returns:
        (batch, seq + length) int64, the prompt first.

    Raises:
        ValueError: a setting is out of its range, or there is no key to draw with.

    >>> from models import gpt
    >>> config = gpt.Config(
    ...     num_layers=1, embed_dim=8, num_heads=2, mlp_dim=16, vocab_size=5, max_seq_len=4)
    >>> params = gpt.init(config, pfx.random.key(0))
    >>> prompt = torch.tensor([[3, 1]])
    >>> generate(gpt.apply, params, config, prompt, 3, temperature=0.0).shape
    torch.Size([1, 5])
    """
    _check(prompt, length, key, temperature, top_k, top_p)
    key = pfx.random.key(0) if key is None else key
    window = min(prompt.shape[1] + length, config.max_seq_len)

    def next_token(
        params: Params, tokens: torch.Tensor, last: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        logits = torch.index_select(apply(params, tokens, config), 1, last).squeeze(1)
        return choose(logits, key, temperature=temperature, top_k=top_k, top_p=top_p)

    step, tokens = (compile or _one_device(prompt.device.type))(next_token), prompt
    for position in range(prompt.shape[1], prompt.shape[1] + length):
        seen = tokens[:, -window:]
        padded = torch.nn.functional.pad(seen, (0, window - seen.shape[1]))  # no token sees it
        last = torch.tensor([seen.shape[1] - 1], device=prompt.device)
        drawn = step(params, padded, last, pfx.random.fold_in(key, position))
        drawn = pfx.device_get(drawn).to(prompt.device)
        if stop is not None and position > prompt.shape[1]:
            drawn = torch.where(tokens[:, -1] == stop, stop, drawn)
        tokens = torch.cat([tokens, drawn.unsqueeze(1)], 1)
    return tokens


def _one_device(device: str) -> Callable[[Function], Function]:
    return functools.partial(pfx.jit, mesh=pfx.make_mesh("simulated", device=device))


def choose(
    logits: torch.Tensor,
    key: torch.Tensor,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> torch.Tensor:
    """Choose a token of each row of logits (batch, vocab).

    >>> choose(torch.tensor([[0.0, 2.0, 1.0]]), pfx.random.key(0), temperature=0.0)
    tensor([1])
    """
    if temperature == 0:
        return logits.argmax(-1)
    scaled = common.at_least_float32(logits) / temperature
    return pfx.random.categorical(key, most_probable(scaled, top_k, top_p))


def most_probable(logits: torch.Tensor, top_k: int | None, top_p: float | None) -> torch.Tensor:
    """Set all logits to -inf but the `top_k` largest, and of these the fewest that have `top_p`.

    Equal logits are kept together. Holtzman et al., "The curious case of neural text
    degeneration" (2020), section 3.1.

    >>> most_probable(torch.tensor([0.0, 3.0, 2.0]), 2, None)
    tensor([-inf, 3., 2.])
    >>> most_probable(torch.tensor([0.0, 3.0, 2.0]), None, 0.5)
    tensor([-inf, 3., -inf])
    """
    if top_k is not None and top_k < logits.shape[-1]:
        least = logits.sort(-1, descending=True).values[..., top_k - 1 : top_k]
        logits = torch.where(logits >= least, logits, -torch.inf)
    if top_p is not None and top_p < 1:
        ordered = logits.sort(-1, descending=True).values
        shares = ordered.softmax(-1)
        more_probable = shares.cumsum(-1) - shares
        kept = torch.where(more_probable < top_p, ordered, torch.inf)
        logits = torch.where(logits >= kept.amin(-1, keepdim=True), logits, -torch.inf)
    return logits


def _check(
    prompt: torch.Tensor,
    length: int,
    key: torch.Tensor | None,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
) -> None:
    wrong = [
        ("prompt", tuple(prompt.shape), prompt.ndim == 2 and prompt.numel() > 0, "(batch, seq)"),
        ("length", length, length >= 0, "at least 0"),
        ("temperature", temperature, 0 <= temperature < float("inf"), "0 or more"),
        ("top_k", top_k, top_k is None or top_k >= 1, "at least 1, or None"),
        ("top_p", top_p, top_p is None or 0 < top_p <= 1, "above 0 and at most 1, or None"),
        ("key", key, key is not None or temperature == 0, "pfx.random.key(0), to draw with"),
    ]
    for name, value, fits, wanted in wrong:
        if not fits:
            raise ValueError(f"generate: {name} = {value}.\n  fix: {name}: {wanted}")

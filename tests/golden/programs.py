"""The functions whose compiled programs are kept as golden text; their lines appear in it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F


def mlp(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """A two-layer mlp and a loss: Megatron's column- then row-parallel pair."""
    hidden = F.relu(x @ params["w_up"])
    return ((hidden @ params["w_down"]) ** 2).sum()


def mlp_step(params: dict[str, torch.Tensor], x: torch.Tensor) -> dict[str, Any]:
    """One step of gradient descent on it."""
    grads = torch.func.grad(mlp)(params, x)
    return {name: params[name] - 0.1 * grads[name] for name in params}

"""Torch's side of pipeline.py: eager on one process, and `torch.distributed.pipelining` on two.

The pipeline is given what its documentation offers: shapes known ahead, so that no metadata crosses;
losses already divided by the batch's tokens, so that no gradient is scaled; outputs not merged; the
fused AdamW. The table of tokens is tied across the stages as in the model: each end keeps a copy, and
once a step the two gradients are added.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _torch_gpt import Model, model_of
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from models import gpt

LR, CLIP = 1e-3, 1.0
Step = Callable[[], float]
LossOf = Callable[[Tensor, Tensor], Tensor]


def loss_of(tokens_in_batch: int) -> LossOf:
    """A microbatch's share of the mean loss over a batch of so many tokens."""

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return total / tokens_in_batch

    return loss


def adamw(model: Model) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=1e-2, fused=True)


def clip(model: Model, *, counted: list[Tensor] | None = None) -> None:
    """Clip by the global norm; `counted` are this stage's gradients in it, None for one process."""
    params = list(model.parameters())
    grads = [p.grad for p in params if p.grad is not None]
    norm = get_total_norm(grads if counted is None else counted)
    if counted is not None:
        square = norm.square()
        dist.all_reduce(square)
        norm = square.sqrt()
    clip_grads_with_norm_(params, CLIP, norm)


def eager_step(params: gpt.Params, config: gpt.Config, data: dict[str, Tensor], count: int) -> Step:
    """One process, the gradients of `count` microbatches accumulated."""
    model, loss_fn = model_of(params, config), loss_of(data["labels"].numel())
    optimizer = adamw(model)
    cut = list(zip(data["tokens"].chunk(count), data["labels"].chunk(count), strict=True))

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for tokens, labels in cut:
            loss = loss_fn(model(tokens), labels)
            loss.backward()
            total += loss.item()
        clip(model)
        optimizer.step()
        return total

    return step


def stage_of(params: gpt.Params, config: gpt.Config) -> Model:
    """This process's equal share of the layers."""
    rank, stages = dist.get_rank(), dist.get_world_size()
    each = config.num_layers // stages
    return model_of(params, config, range(rank * each, (rank + 1) * each))


def pipeline_step(
    params: gpt.Params, config: gpt.Config, data: dict[str, Tensor], count: int
) -> Step:
    """A step of 1F1B over all processes; the last one returns the loss, the others 0."""
    model = stage_of(params, config)
    schedule = Schedule1F1B(
        pipelining_stage(model, config, data["tokens"].chunk(count)[0]),
        count,
        loss_fn=loss_of(data["labels"].numel()),
        scale_grads=False,
    )
    optimizer = adamw(model)
    inputs = (data["tokens"],) if model.is_first else ()
    target = data["labels"] if model.is_last else None

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        losses: list[Tensor] = []
        schedule.step(*inputs, target=target, losses=losses, return_outputs=False)
        clip(model, counted=tied_gradients(model))
        optimizer.step()
        return sum(loss.item() for loss in losses)

    return step


def pipelining_stage(model: Model, config: gpt.Config, tokens: Tensor) -> PipelineStage:
    """The module as a stage whose shapes are all given; it never infers or exchanges any."""
    inner = torch.empty(*tokens.shape, config.embed_dim, requires_grad=True)
    logits = torch.empty(*tokens.shape, config.vocab_size, requires_grad=True)
    return PipelineStage(
        model,
        dist.get_rank(),
        dist.get_world_size(),
        torch.device("cpu"),
        input_args=tokens if model.is_first else inner,
        output_args=logits if model.is_last else inner,
    )


def tied_gradients(model: Model) -> list[Tensor]:
    """Add the two ends' gradients of the table; return the gradients that this end counts."""
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    table = "tok_embed.weight" if model.is_first else "head.weight"
    dist.all_reduce(grads[table])
    return [grad for name, grad in grads.items() if name != "head.weight"]


def alone_step(params: gpt.Params, config: gpt.Config, data: dict[str, Tensor], count: int) -> Step:
    """Each process works on its stage without ever waiting: the floor of any pipeline of this code."""
    model, loss_fn = stage_of(params, config), loss_of(data["labels"].numel())
    optimizer = adamw(model)
    cut = list(zip(data["tokens"].chunk(count), data["labels"].chunk(count), strict=True))
    inner = torch.randn(*cut[0][0].shape, config.embed_dim)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        for tokens, labels in cut:
            out = model(tokens if model.is_first else inner.detach().requires_grad_())
            if model.is_last:
                loss_fn(out, labels).backward()
            else:
                out.backward(inner)
        clip(model)
        optimizer.step()
        return 0.0

    return step

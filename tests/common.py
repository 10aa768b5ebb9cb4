"""Training cases as values: a model, a plan, an optimizer and a batch, and how far two runs differ.

A `Case` prints as the line that makes it, so a failing example can be pasted into a test.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

import pfx
from models import gpt, llama

IGNORED = -100
FAMILIES: Mapping[str, Any] = {"gpt": gpt, "llama": llama}
GPT = {"num_layers": 2, "embed_dim": 16, "num_heads": 4, "mlp_dim": 32, "vocab_size": 50,
       "max_seq_len": 8, "init_std": 0.2}  # fmt: skip
LLAMA = {"num_layers": 2, "embed_dim": 16, "num_heads": 4, "num_kv_heads": 2, "head_dim": 4,
         "mlp_dim": 32, "vocab_size": 50, "max_seq_len": 8, "init_std": 0.2}  # fmt: skip


def optimizer_of(name: str, dtype: torch.dtype) -> pfx.optim.GradientTransformation:
    """The optimizers that the laws are tried with."""
    # The gradient of some parameters is zero but for rounding: a key's bias shifts every score of a
    # softmax alike. Adam divides it by its own size plus eps, and so makes a step of rounding alone,
    # up to 1/eps times larger. An eps well above that rounding keeps the law as strict as for SGD.
    eps = {torch.float64: 1e-6, torch.float32: 1e-3}[dtype]
    clip = pfx.optim.clip_by_global_norm(1.0)
    return {
        "adamw": lambda: pfx.optim.chain(clip, pfx.optim.adamw(1e-2, eps=eps)),
        "sgd": lambda: pfx.optim.sgd(1e-1, momentum=0.9),
    }[name]()


@dataclass(frozen=True)
class Case:
    """One training run; what it does not say is as in `GPT` or `LLAMA`."""

    family: str = "gpt"
    config: Mapping[str, Any] = field(default_factory=dict)
    plan: Mapping[str, Any] = field(default_factory=dict)
    optimizer: str = "sgd"
    dtype: torch.dtype = torch.float64
    rows: int = 1  # of the batch, for each data-parallel device and microbatch
    seq: int = 6
    masked: float = 0.0  # the share of the labels that is not counted

    @property
    def model(self) -> Any:
        """The config of the model."""
        sizes = {"gpt": GPT, "llama": LLAMA}[self.family]
        return FAMILIES[self.family].Config(**{**sizes, "dtype": self.dtype, **self.config})

    @property
    def loss_fn(self) -> Any:
        """The loss of the model, by the loss contract."""
        return FAMILIES[self.family].loss_fn(self.model)

    def init(self, key: torch.Tensor) -> Any:
        """Draw the parameters."""
        return FAMILIES[self.family].init(self.model, key)

    def train(self, **options: Any) -> pfx.train.TrainStep:
        """The compiled step."""
        axes = FAMILIES[self.family].axes(self.model)
        optimizer = optimizer_of(self.optimizer, self.dtype)
        plan = pfx.Plan(**self.plan)
        return pfx.make_train_step(
            self.loss_fn, optimizer, plan, init=self.init, axes=axes, **options
        )

    def batch(self, seed: int) -> dict[str, torch.Tensor]:
        """Tokens and labels; the first rows lose the most labels, so that shards weigh unequally."""
        plan = pfx.Plan(**self.plan)
        rows = self.rows * math.prod(plan.axes.values()) * plan.dp * plan.microbatches
        generator = torch.Generator().manual_seed(seed)
        shape = (rows, self.seq + 1)
        tokens = torch.randint(0, self.model.vocab_size, shape, generator=generator)
        labels = tokens[:, 1:].clone()
        order = torch.rand(labels.shape, generator=generator) + torch.arange(rows)[:, None] / rows
        count = round(self.masked * labels.numel())
        labels.view(-1)[order.view(-1).argsort()[:count]] = IGNORED
        return {"tokens": tokens[:, :-1].contiguous(), "labels": labels}


State = tuple[Any, Mapping[str, torch.Tensor]]


def run(train: pfx.train.TrainStep, case: Case, steps: int = 3) -> list[State]:
    """Train from key 0; the global state and metrics after every step."""
    state, found = train.init(pfx.random.key(0)), []
    for i in range(steps):
        state, metrics = train.step(state, case.batch(i))
        found.append((pfx.device_get(state), pfx.device_get(metrics)))
    return found


def run_eagerly(train: pfx.train.TrainStep, case: Case, steps: int = 3) -> list[State]:
    """The same in plain torch, nothing compiled: the step as a function that torch runs."""
    state, found = pfx.device_get(train.init(pfx.random.key(0))), []
    for i in range(steps):
        state, metrics = train.pure_step(state, case.batch(i))
        found.append((state, metrics))
    return found


def tolerance(dtype: torch.dtype) -> float:
    """How far two runs of one function may differ, relative to the size of what they return."""
    return {torch.float32: 1e-5, torch.float64: 1e-10}[dtype]


def differences(found: Any, expected: Any, floor: float = 1e-3) -> dict[str, float]:
    """The largest difference in each leaf, relative to the leaf's largest element.

    A leaf that is small next to its siblings is compared to `floor` times the largest of them: a
    gradient that is zero but for rounding has no size of its own.
    """
    pairs, _ = pfx.tree.flatten_with_path(expected)
    sizes = [_size(leaf) for _, leaf in pairs]
    least = floor * max(sizes, default=0.0)
    out = {}
    for (path, want), size, got in zip(pairs, sizes, pfx.tree.leaves(found), strict=True):
        assert want.shape == got.shape and want.dtype == got.dtype, pfx.tree.path_string(path)
        assert bool(torch.isfinite(got.double()).all()), pfx.tree.path_string(path)
        distance = _size(got.double() - want.double())
        out[pfx.tree.path_string(path)] = distance / (max(size, least) or 1.0)
    return out


def _size(x: torch.Tensor) -> float:
    return float(x.double().abs().max()) if x.numel() else 0.0


def assert_same_run(found: list[State], expected: list[State], tol: float) -> None:
    """Assert that two runs agree after every step: metrics, parameters, optimizer state, key."""
    for step, ((state, metrics), (state_, metrics_)) in enumerate(
        zip(found, expected, strict=True)
    ):
        assert_close(metrics, metrics_, tol, f"step {step}: metrics")
        assert_close(state.params, state_.params, tol, f"step {step}: params")
        assert_close(state.opt_state, state_.opt_state, tol, f"step {step}: opt_state")
        assert torch.equal(state.key, state_.key) and torch.equal(state.step, state_.step)


def assert_close(found: Any, expected: Any, tol: float, where: str) -> None:
    """Assert that two trees agree leaf by leaf, to `tol` as `differences` measures."""
    worst = {k: v for k, v in differences(found, expected).items() if not v <= tol}
    assert not worst, f"{where} differ by more than {tol}: {worst}"

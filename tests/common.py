"""Training cases as values: a model, a plan, an optimizer and a batch, and how far two runs differ.

A `Case` prints as the line that makes it, so a failing example can be pasted into a test.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st

import pfx
from models import gpt, llama
from tests.sim import toy

IGNORED = -100
FAMILIES: Mapping[str, Any] = {"gpt": gpt, "llama": llama}
GPT = {"num_layers": 2, "embed_dim": 16, "num_heads": 4, "mlp_dim": 32, "vocab_size": 50,
       "max_seq_len": 8, "init_std": 0.2}  # fmt: skip
LLAMA = {"num_layers": 2, "embed_dim": 16, "num_heads": 4, "num_kv_heads": 2, "head_dim": 4,
         "mlp_dim": 32, "vocab_size": 50, "max_seq_len": 8, "init_std": 0.2}  # fmt: skip
MODULES = {**FAMILIES, "toy": toy}
SIZES: Mapping[str, Any] = {"gpt": GPT, "llama": LLAMA, "toy": {}}


def optimizer_of(
    name: str, dtype: torch.dtype, axes: Any = None
) -> pfx.optim.GradientTransformation:
    """The optimizers that the laws are tried with."""
    # The gradient of some parameters is zero but for rounding: a key's bias shifts every score of a
    # softmax alike. Adam divides it by its own size plus eps, and so makes a step of rounding alone,
    # up to 1/eps times larger. An eps well above that rounding keeps the law as strict as for SGD.
    eps = {torch.float64: 1e-6, torch.float32: 1e-3}[dtype]
    optim = pfx.optim
    clip = optim.clip_by_global_norm(1.0)
    rate = optim.schedules.cosine(1e-2, 40, warmup_steps=2)
    roles = lambda dims: "embed" if "vocab" in dims else "decay"
    groups = {"decay": optim.adamw(rate, eps=eps), "embed": optim.sgd(1e-1, momentum=0.9)}
    return {
        "adamw": lambda: optim.chain(clip, optim.adamw(1e-2, eps=eps)),
        "sgd": lambda: optim.sgd(1e-1, momentum=0.9),
        "nesterov": lambda: optim.chain(
            clip, optim.add_decayed_weights(0.1), optim.sgd(1e-1, momentum=0.9, nesterov=True)
        ),
        "lion": lambda: optim.lion(1e-2, weight_decay=0.1, mask=optim.decay_mask(axes)),
        "lamb": lambda: optim.chain(clip, optim.lamb(1e-2, axes=axes, eps=eps)),
        "adafactor": lambda: optim.adafactor(
            1e-1, axes=axes, eps=(eps, 1e-3), weight_decay=0.1, mask=optim.decay_mask(axes)
        ),
        "muon": lambda: optim.chain(
            clip, optim.muon(rate, axes=axes, eps=eps, others=optim.adamw(1e-2, eps=eps))
        ),
        "groups": lambda: optim.chain(
            clip, optim.partition(groups, optim.role_labels(axes, roles))
        ),
        "accumulated": lambda: optim.accumulate(optim.adamw(rate, eps=eps), 2),
        "ema": lambda: optim.chain(optim.sgd(1e-1, momentum=0.9), optim.ema(0.9)),
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
        sizes = {**SIZES[self.family], "dtype": self.dtype, **self.config}
        return MODULES[self.family].Config(**sizes)

    @property
    def loss_fn(self) -> Any:
        """The loss of the model, by the loss contract."""
        return MODULES[self.family].loss_fn(self.model)

    def init(self, key: torch.Tensor) -> Any:
        """Draw the parameters."""
        return MODULES[self.family].init(self.model, key)

    def train(self, **options: Any) -> pfx.train.TrainStep:
        """The compiled step."""
        axes = MODULES[self.family].axes(self.model)
        optimizer = optimizer_of(self.optimizer, self.dtype, axes)
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


# What a further mesh axis may split: a dim with another axis, before or after it, or alone.
NAMES: tuple[Mapping[str, Any], ...] = (
    {"batch": ("dp", "x")},
    {"batch": ("x", "dp")},
    {"mlp": ("tp", "x"), "heads": ("tp", "x"), "vocab": ("tp", "x")},
    {"mlp": ("x", "tp"), "heads": ("x", "tp"), "kv_heads": ("x", "tp"), "vocab": "x"},
    {"embed": "x"},
    {"seq": "x"},
    {"seq": ("x", "tp"), "positions": "x"},
    {"tokens": "x"},
    {"head_dim": "x"},
    {"layers": "x"},
    {"embed": "dp", "vocab": "x"},
)


@st.composite
def plans(draw: st.DrawFn, max_devices: int) -> dict[str, Any]:
    """Arguments of a `Plan`: one to three axes on at most `max_devices` devices."""
    sizes = [
        (dp, tp, x)
        for dp in range(1, max_devices + 1)
        for tp in range(1, max_devices // dp + 1)
        for x in range(1, max_devices // (dp * tp) + 1)
    ]
    dp, tp, x = draw(st.sampled_from(sizes))
    plan: dict[str, Any] = {
        "dp": dp,
        "tp": tp,
        "zero": draw(st.integers(0, 3)),
        "sequence_parallel": draw(st.booleans()),
        "microbatches": draw(st.integers(1, 4)),
    }
    if x > 1:
        plan |= {"axes": {"x": x}, "names": draw(st.sampled_from(NAMES))}
    return plan


@st.composite
def cases(
    draw: st.DrawFn,
    max_devices: int = 8,
    dtypes: tuple[torch.dtype, ...] = (torch.float64, torch.float32),
) -> Case:
    """Small training runs whose sizes divide by the mesh, or do not."""
    size = lambda *sizes: draw(st.sampled_from(sizes))
    config = {
        "num_layers": size(2, 1, 3),
        "mlp_dim": size(24, 16, 12, 7),
        "vocab_size": size(50, 128, 129, 257, 5),
        "max_seq_len": size(8, 9, 12),
    }
    family = size("gpt", "llama")
    if family == "gpt":
        heads, width = size(4, 2, 6, 3, 1), size(4, 6, 3)
        # A LayerNorm over a handful of numbers, some of them dropped, divides by almost nothing:
        # float32 then loses more than 1e-5 on one device already.
        width *= max(1, 12 // (heads * width))
        config |= {
            "num_heads": heads,
            "embed_dim": heads * width,
            "dropout": size(0.0, 0.3),
        }
    else:
        kv_heads = size(2, 4, 1, 3)
        config |= {
            "num_heads": kv_heads * size(2, 1, 3),
            "num_kv_heads": kv_heads,
            "head_dim": size(4, 2, 6),
            "embed_dim": size(16, 12, 7),
            "qk_norm": draw(st.booleans()),
            "tied": draw(st.booleans()),
        }
    return Case(
        family,
        config,
        draw(plans(max_devices)),
        size("sgd", "adamw"),
        size(*dtypes),
        rows=size(1, 2, 3),
        seq=size(6, 8, 7, 5),
        masked=size(0.3, 0.0, 0.9),
    )


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

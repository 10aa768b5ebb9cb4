"""`Run`: everything that decides what a run does, as frozen dataclasses of plain values.

A config file is Python with one function, ``config() -> Run``. Nothing in a Run is a tensor, a file
or a function: what is built by name is named ("models.gpt", "adamw", "cosine", "my_module:batches").
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pfx.errors import message
from pfx.plan import Plan
from pfx.recipe.overrides import ConfigError


def _at_least(owner: Any, lowest: float, *names: str) -> None:
    """Raise unless every named setting that is given is at least `lowest`."""
    for name in names:
        value = getattr(owner, name)
        if value is not None and not value >= lowest:
            where = f"{type(owner).__name__}: {name}={value!r}"
            raise ConfigError(message(where, f"must be at least {lowest:g}."))


@dataclass(frozen=True, kw_only=True)
class Model:
    """Which model, of which sizes, and from which weights.

    Attributes:
        module: the importable name of a module with ``Config``, ``init``, ``apply``, ``axes`` and
            ``loss_fn``, as those in `models`.
        config: the module's Config.
        weights: what to start from, a folder of Hugging Face weights or the directory of another
            run; None draws the parameters from the seed.
        format: the module that reads and writes Hugging Face weights of this model, with ``load``,
            ``save`` and ``read_config`` as `models.hf` has them.
    """

    module: str
    config: Any
    weights: str | None = None
    format: str = "models.hf"


@dataclass(frozen=True, kw_only=True)
class Data:
    """What is read, and how it is cut into rows.

    Attributes:
        prefixes: of indexed files (``PREFIX.bin``, ``PREFIX.idx``) that `pfx preprocess` wrote.
        weights: the share of each prefix in a batch; empty: by its number of tokens.
        split: shares of the documents of each prefix for training and for evaluation.
        seq_len: tokens of a row.
        packing: "windows" cuts rows from all documents joined; "packed" fills rows with whole ones.
        reset_positions: positions start again with each document.
        block_diagonal: tokens attend to their own document only.
        mask_boundaries: no loss on the first token of the next document.
        tokenizer: a `tokenizers` JSON file or "bytes", for `pfx generate`.
        source: ``"module:function"``, called with the Run and "train" or "valid", instead of
            prefixes; what it returns is called with a step and returns the batch of that step.
    """

    prefixes: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()
    split: tuple[float, float] = (0.99, 0.01)
    seq_len: int = 1024
    packing: Literal["windows", "packed"] = "windows"
    reset_positions: bool = False
    block_diagonal: bool = False
    mask_boundaries: bool = False
    tokenizer: str | None = None
    source: str | None = None

    def __post_init__(self) -> None:
        _at_least(self, 1, "seq_len")
        if bool(self.prefixes) == bool(self.source):
            fix = 'prefixes=("data/text",), or source="my_module:batches"'
            raise ConfigError(message("Data:", "needs either prefixes or a source.", fix=fix))
        if self.weights and len(self.weights) != len(self.prefixes):
            what = f"are {len(self.weights)} for {len(self.prefixes)} prefixes."
            raise ConfigError(message("Data: weights", what))


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """The optimizer, its learning rate over the steps, and what guards an update.

    Attributes:
        name: of `pfx.optim`; or ``"module:function"``, called with the schedule and the options.
        lr: the highest learning rate.
        schedule: "constant", "linear", "cosine" or "wsd" of `pfx.optim.schedules`.
        warmup_steps: updates until `lr` is reached.
        total_steps: the update at which `min_lr` is reached; None: ``train.steps``.
        decay_steps: how long "wsd" falls; None: a tenth of all.
        min_lr: the learning rate at the end.
        weight_decay: of the parameters with at least two dims, where the optimizer has one.
        clip: the largest global norm of the gradients; None does not clip.
        skip_nonfinite: a step with a loss or gradient that is not finite changes nothing.
        skip_spikes: a step whose gradient norm is so many times the running mean changes nothing.
        options: further numbers by name: ``{"b2": 0.95}``.
    """

    name: str = "adamw"
    lr: float = 3e-4
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    warmup_steps: int = 0
    total_steps: int | None = None
    decay_steps: int | None = None
    min_lr: float = 0.0
    weight_decay: float = 0.1
    clip: float | None = 1.0
    skip_nonfinite: bool = True
    skip_spikes: float | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _at_least(self, 0, "lr", "min_lr", "warmup_steps", "weight_decay", "clip")


@dataclass(frozen=True, kw_only=True)
class Train:
    """How long, how much at once, and from which seed.

    Attributes:
        steps: updates of the whole run, those before a resume counted.
        batch_size: rows of the global batch, over all devices and microbatches.
        seed: of the weights, the dropout and the order of the data.
        device: "cpu" or "cuda".
        deterministic: on processes, add in the simulated mesh's order, bit for bit.
    """

    steps: int
    batch_size: int
    seed: int = 0
    device: str = "cpu"
    deterministic: bool = False

    def __post_init__(self) -> None:
        _at_least(self, 1, "steps", "batch_size")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """When the run is saved, and how many saves stay.

    Attributes:
        every: steps between regular checkpoints; None: only at the end and when stopped.
        keep: how many regular ones stay; None: all.
        temporary_every: steps between checkpoints of which only the last one stays.
        best: keep the one with the lowest evaluation loss.
        asynchronous: write while training goes on.
    """

    every: int | None = 1000
    keep: int | None = 3
    temporary_every: int | None = None
    best: bool = True
    asynchronous: bool = True

    def __post_init__(self) -> None:
        _at_least(self, 1, "every", "keep", "temporary_every")


@dataclass(frozen=True, kw_only=True)
class Log:
    """What is shown and written about steps.

    Attributes:
        every: steps between lines; every step is in ``metrics.jsonl``.
        progress: a bar, where the output is a terminal.
        tensorboard: also write TensorBoard's files.
        peak_flops: of one device in a second, for the MFU; None: looked up by the device's name.
    """

    every: int = 1
    progress: bool = True
    tensorboard: bool = False
    peak_flops: float | None = None

    def __post_init__(self) -> None:
        _at_least(self, 1, "every")


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """When the held-out split is evaluated.

    Attributes:
        every: steps between evaluations; None: never.
        batches: how many batches of it; None: all.
    """

    every: int | None = None
    batches: int | None = None

    def __post_init__(self) -> None:
        _at_least(self, 1, "every", "batches")


@dataclass(frozen=True, kw_only=True)
class Monitor:
    """What counts as a spike, and what is done about it.

    Attributes:
        factor: alarm when the loss or the gradient norm is so many times its running mean.
        window: steps that the running means reach back, about.
        warmup: steps without alarms of this kind at the beginning.
        max_skips: alarm when so many steps in a row were skipped.
        action: "rewind" to the last good checkpoint and go on behind the offending data, "stop",
            or only "report".
        max_rewinds: so many in a whole run, then it stops.
        replay: on an alarm, repeat up to so many steps from the checkpoint to see whether the same
            bits come out.
    """

    factor: float = 10.0
    window: int = 100
    warmup: int = 20
    max_skips: int = 10
    action: Literal["rewind", "stop", "report"] = "rewind"
    max_rewinds: int = 3
    replay: int = 100

    def __post_init__(self) -> None:
        _at_least(self, 1, "window", "max_skips")
        _at_least(self, 0, "warmup", "max_rewinds", "replay")
        if not self.factor > 1:
            raise ConfigError(message(f"Monitor: factor={self.factor!r}", "must be above 1."))


@dataclass(frozen=True, kw_only=True)
class Run:
    """A whole training run.

    Attributes:
        model: which model.
        data: what it learns from.
        train: how long, how much at once, from which seed.
        directory: where checkpoints, metrics, reports and the resolved config are written; a run
            that finds a checkpoint there goes on from it.
        optimizer: how it learns.
        plan: how it is spread over devices, and its precision.
        checkpoint: when it is saved.
        log: what is shown and written.
        evaluate: when held-out data are looked at.
        monitor: what is alarming, and what is done about it.
    """

    model: Model
    data: Data
    train: Train
    directory: str = "runs/run"
    optimizer: Optimizer = field(default_factory=Optimizer)
    plan: Plan = field(default_factory=Plan)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    log: Log = field(default_factory=Log)
    evaluate: Evaluate = field(default_factory=Evaluate)
    monitor: Monitor = field(default_factory=Monitor)

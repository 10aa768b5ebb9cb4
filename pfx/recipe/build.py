"""From a `Run` to what runs: the model's functions, the optimizer, the compiled step."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from pfx import optim
from pfx.errors import message
from pfx.recipe.config import Model, Optimizer, Run
from pfx.recipe.config_file import function_of, module_of
from pfx.recipe.overrides import ConfigError
from pfx.train import LossFn, TrainStep, make_train_step

NEEDED = ("init", "apply", "axes", "loss_fn", "Config")


@dataclass(frozen=True)
class Functions:
    """A model's functions, its sizes filled in."""

    module: ModuleType
    config: Any

    @property
    def loss_fn(self) -> LossFn:
        """``(params, batch, key) -> (loss_sum, weight, metrics)``."""
        return self.module.loss_fn(self.config)

    def init(self, key: Any) -> Any:
        """Draw the parameters."""
        return self.module.init(self.config, key)

    def apply(self, params: Any, tokens: Any, **named: Any) -> Any:
        """The logits of tokens."""
        return self.module.apply(params, tokens, self.config, **named)

    @property
    def axes(self) -> Any:
        """The names of the parameters' dims."""
        return self.module.axes(self.config)

    @property
    def vocab_size(self) -> int | None:
        """How many token ids there are, where the config says so."""
        return getattr(self.config, "vocab_size", None)


def model_functions(model: Model) -> Functions:
    """Import the model's module.

    Raises:
        ConfigError: it is missing, lacks a function, or the config is of another model.
    """
    module = module_of(model.module, "model.module")
    missing = [name for name in NEEDED if not hasattr(module, name)]
    if missing:
        what = f"has no {', '.join(missing)}."
        raise ConfigError(message(f"model.module={model.module!r}:", what))
    if not isinstance(model.config, module.Config):
        what = f"is a {type(model.config).__module__}.{type(model.config).__name__}."
        fix = f"config={model.module}.Config(...)"
        raise ConfigError(message(f"model.config for {model.module}", what, fix=fix))
    return Functions(module, model.config)


def make_optimizer(settings: Optimizer, steps: int, axes: Any) -> optim.GradientTransformation:
    """Build the optimizer with its schedule, clipping and guards.

    Args:
        settings: as the config says.
        steps: of the whole run, at the end of which the schedule ends if it has no end of its own.
        axes: the names of the parameters' dims; those of one dim are not decayed.

    Raises:
        ConfigError: an unknown optimizer or option, or numbers that do not fit.
    """
    make = _maker(settings.name)
    given = _options(make, settings, axes)
    try:
        return _guarded(settings, make(schedule_of(settings, steps), **given))
    except ConfigError:
        raise
    except ValueError as error:  # numbers that are out of range, or do not fit each other
        raise ConfigError(f"optimizer: {error}") from None


def _guarded(
    settings: Optimizer, inner: optim.GradientTransformation
) -> optim.GradientTransformation:
    if settings.clip is not None:
        inner = optim.chain(optim.clip_by_global_norm(settings.clip), inner)
    if settings.skip_spikes is not None:
        factor = settings.skip_spikes
        return optim.skip_spikes(inner, loss_factor=factor, norm_factor=factor)
    return optim.skip_nonfinite(inner) if settings.skip_nonfinite else inner


def schedule_of(settings: Optimizer, steps: int) -> optim.Schedule:
    """The learning rate as a function of the updates made."""
    total = settings.total_steps or steps
    if settings.schedule == "constant":
        return optim.schedules.constant(settings.lr, warmup_steps=settings.warmup_steps)
    named: dict[str, Any] = {"warmup_steps": settings.warmup_steps, "min_lr": settings.min_lr}
    decay = settings.decay_steps or max(total // 10, 1) if settings.schedule == "wsd" else 1
    if settings.warmup_steps + decay > total:
        raise _too_short(settings, total, decay)
    if settings.schedule == "wsd":
        return optim.schedules.wsd(settings.lr, total, decay_steps=decay, **named)
    make = {"linear": optim.schedules.linear, "cosine": optim.schedules.cosine}
    return make[settings.schedule](settings.lr, total, **named)


def _too_short(settings: Optimizer, total: int, decay: int) -> ConfigError:
    """The error of a run that ends before its learning rate has come down."""
    ends, needed = "optimizer.total_steps", settings.warmup_steps + decay
    if settings.total_steps is None:
        ends = "train.steps"
    what = f"and {decay} of decay are more than {ends}={total}."
    fix = f"{ends}={needed}" + (f", or optimizer.warmup_steps={total - decay}" * (total > decay))
    return ConfigError(message(f"optimizer.warmup_steps={settings.warmup_steps}", what, fix=fix))


def _maker(name: str) -> Callable[..., optim.GradientTransformation]:
    if ":" in name:
        return function_of(name, "optimizer.name")
    known = optimizers()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        fix = f'name="{near[0]}"' if near else ""
        listed = f"known: {', '.join(sorted(known))}"
        raise ConfigError(message(f"optimizer.name={name!r}:", "unknown.", listed, fix=fix))
    return known[name]


def optimizers() -> Mapping[str, Callable[..., optim.GradientTransformation]]:
    """What in `pfx.optim` takes a learning rate first."""
    return {
        name: make
        for name, make in vars(optim).items()
        if inspect.isfunction(make)
        and not name.startswith(("scale", "add"))
        and next(iter(inspect.signature(make).parameters), "") == "learning_rate"
    }


def _options(make: Callable[..., Any], settings: Optimizer, axes: Any) -> dict[str, Any]:
    taken = inspect.signature(make).parameters
    usual: dict[str, Any] = {}
    if "weight_decay" in taken:
        usual["weight_decay"] = settings.weight_decay
        if "mask" in taken:
            usual["mask"] = optim.decay_mask(axes)
    if "axes" in taken:
        usual["axes"] = axes
    for name in settings.options:
        if name not in taken:
            near = difflib.get_close_matches(name, taken, n=1)
            known = f"options of {settings.name}: {', '.join(list(taken)[1:])}"
            fix = f"optimizer.options.{near[0]}" if near else ""
            where = f"optimizer.options.{name}:"
            raise ConfigError(message(where, "no such option.", known, fix=fix))
    return {**usual, **settings.options}


def check_device(name: str, setting: str) -> None:
    """Raise unless torch can use a type of device here."""
    try:
        usable, why = torch.get_device_module(name).is_available(), ""
    except RuntimeError as error:
        usable, why = False, str(error).partition("\n")[0]
    if not usable:
        what, fix = "is not on this machine, or not in this torch.", f"{setting}=cpu"
        raise ConfigError(message(f"{setting}={name}", what, why, fix=fix))


def _check_rows(run: Run, longest: int | None) -> None:
    """Raise for rows that the model or the plan cannot take, by the names of the settings."""
    length, size, plan = run.data.seq_len, run.train.batch_size, run.plan
    if longest is not None and length > longest:
        what, fix = (
            "is more than the model has positions.",
            f"data.seq_len={longest}, or a longer model",
        )
        raise ConfigError(
            message(f"data.seq_len={length}", what, f"model.config.max_seq_len={longest}", fix=fix)
        )
    parts = plan.dp * plan.microbatches
    if "batch" not in plan.names and size % parts:
        below, above = size - size % parts, size - size % parts + parts
        why = f"plan.dp={plan.dp} x plan.microbatches={plan.microbatches}"
        why += f"; {size} % {parts} = {size % parts}"
        fix = f"train.batch_size={above}" + (f" or {below}" if below else "")
        where = f"train.batch_size={size}"
        raise ConfigError(message(where, "cannot be cut into equal parts.", why, fix=fix))


def make_step(run: Run, functions: Functions | None = None) -> TrainStep:
    """Compile, when first called, the training step that a config describes.

    Raises:
        ConfigError: an unknown name, or sizes that do not fit each other.
    """
    functions = model_functions(run.model) if functions is None else functions
    check_device(run.train.device, "train.device")
    if run.data.source is None:  # a source has sizes of its own
        _check_rows(run, getattr(functions.config, "max_seq_len", None))
    return make_train_step(
        functions.loss_fn,
        make_optimizer(run.optimizer, run.train.steps, functions.axes),
        run.plan,
        init=functions.init,
        axes=functions.axes,
        mesh=run.plan.mesh(device=run.train.device),
        deterministic=run.train.deterministic,
    )

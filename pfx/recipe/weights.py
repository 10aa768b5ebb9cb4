"""Parameters from elsewhere: of another run, or of Hugging Face files; and back into such files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pfx import checkpoint, random, tree
from pfx.api import eval_shape
from pfx.errors import message
from pfx.mesh import Mesh
from pfx.recipe import resolved
from pfx.recipe.build import Functions, model_functions
from pfx.recipe.config import Model
from pfx.recipe.config_file import module_of
from pfx.recipe.overrides import ConfigError
from pfx.recipe.position import Position
from pfx.recipe.saves import FOLDER
from pfx.train import TrainState

CONFIG = "config.json"


def is_run(directory: Path) -> bool:
    """Whether a directory is that of a run: it has checkpoints, and a resolved config."""
    return (directory / FOLDER).is_dir() and resolved.is_resolved(directory / CONFIG)


@dataclass(frozen=True)
class Trained:
    """A step of a run: its model, and where its parameters are.

    Attributes:
        record: the resolved config.
    """

    directory: Path
    step: int
    functions: Functions
    record: Mapping[str, Any]

    def setting(self, *path: str) -> Any:
        """A plain setting of the run by its name."""
        found: Any = self.record["config"]
        for name in path:
            found = found.get(name) if isinstance(found, Mapping) else None
        return found


def trained(directory: Path, step: int | None = None) -> Trained:
    """Open a step of a run; None is the latest.

    Raises:
        ConfigError: it is no run's directory, or has no checkpoint.
    """
    folder = directory / FOLDER
    found = checkpoint.latest(folder) if step is None else step
    if found is None:
        what, fix = "has no checkpoint of a run.", "the directory that a Run names"
        if any(directory.glob("*.safetensors")):
            fix = f"pfx convert {directory} made-of-it, and then that"
        raise ConfigError(message(f"{directory}:", what, fix=fix))
    where = f"{folder}, step {found}"
    metadata = checkpoint.metadata(folder, found)
    record = resolved.checked((metadata or {}).get("config"), where)
    name = record["config"].get("model", {}).get("module", "")
    config = resolved.model_of(record, module_of(name, f"{where}: model.module").Config)
    functions = model_functions(Model(module=name, config=config))
    return Trained(directory, found, functions, record)


def read_params(
    run: Trained, mesh: Mesh | None = None, specs: Any = None, shapes: Any = None
) -> Any:
    """The parameters of a step, as Arrays on a mesh or as whole tensors.

    Args:
        specs: a tree of `P` like the parameters.
        shapes: of the parameters, where a policy keeps them in other dtypes than the model's.
    """
    if shapes is None:
        shapes = _saved_shapes(run)
    only = lambda params: {"state": TrainState(params, (), (), ())}
    found = checkpoint.restore(
        run.directory / FOLDER, run.step, like=only(shapes), mesh=mesh,
        specs=None if specs is None else only(specs), cast=True, partial=True,
    )  # fmt: skip
    return found["state"].params


def _saved_shapes(run: Trained) -> Any:
    """What the model's init says; a cast makes of it what was trained in another dtype."""
    return eval_shape(run.functions.init, random.key(0))


def params_for(model: Model, mesh: Mesh, specs: Any, shapes: Any) -> Any:
    """The parameters that a run starts from, on its mesh.

    Raises:
        ConfigError: those in the files are of a model with other sizes.
    """
    assert model.weights is not None
    directory = Path(model.weights)
    if is_run(directory):
        return read_params(trained(directory), mesh, specs, shapes)
    form = module_of(model.format, "model.format")
    found, params = form.load(model.weights, mesh=mesh, specs=specs, dtype=_dtype(shapes))
    _check_same(model, found)
    return params


def _dtype(shapes: Any) -> torch.dtype | None:
    dtypes = {leaf.dtype for leaf in tree.leaves(shapes)}
    return dtypes.pop() if len(dtypes) == 1 else None


def _check_same(model: Model, found: Any) -> None:
    """Raise unless the files hold the model that the config describes, dtype and the like aside."""
    ours, theirs = getattr(model.config, "sizes", {}), getattr(found, "sizes", {})
    if ours != theirs:
        names = [name for name in ours if ours[name] != theirs.get(name)]
        lines = [f"{name}: {ours[name]} here, {theirs.get(name)} there" for name in names]
        fix = f"model.config={model.format}.read_config({model.weights!r})"
        where = f"model.weights={model.weights!r}:"
        raise ConfigError(message(where, "the weights of another model.", *lines, fix=fix))


def to_hf(run: Trained, target: Path, dtype: torch.dtype | None, tokenizer: str | None) -> None:
    """Write a step's parameters as Hugging Face weights."""
    name = run.setting("model", "format") or "models.hf"
    params = read_params(run)
    module_of(name, "model.format").save(
        target, params, run.functions.config, dtype=dtype, tokenizer=tokenizer
    )


def from_hf(source: Path, target: Path, form: str = "models.hf") -> None:
    """Write Hugging Face weights as step 0 of a run that has nothing but parameters.

    `pfx generate` reads it, and ``model.weights`` of another run.

    Raises:
        ConfigError: the target is there already.
    """
    if target.exists() and any(target.iterdir()):
        raise ConfigError(message(f"{target}:", "is not empty.", fix="another directory"))
    config, params = module_of(form, "--format").load(source)
    module = type(config).__module__
    model = {"module": module, "config": resolved.plain(config), "format": form}
    tokenizer = str(source) if (source / "tokenizer.json").is_file() else None
    record = {
        "version": resolved.VERSION,
        "config": {"model": model, "data": {"tokenizer": tokenizer}},
        "from": {"model": str(source)},
    }
    metadata = {"position": Position().to_plain(), "config": record}
    state = {"state": TrainState(params, (), (), ())}
    checkpoint.save(target / FOLDER, 0, state, metadata=metadata, tier="final")
    resolved.write(target / CONFIG, record)

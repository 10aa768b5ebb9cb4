"""One optimizer for several groups of parameters, each with its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from pfx import tree
from pfx.errors import TreeError, message
from pfx.optim.base import GradientTransformation, update_with
from pfx.optim.decay import role_mask
from pfx.optim.masking import merge, select


class PartitionState(NamedTuple):
    """The states of the groups by label, each with no leaves where another group's are."""

    inner: dict[str, Any]


def partition(
    transforms: Mapping[str, GradientTransformation], labels: Any | Callable[[Any], Any]
) -> GradientTransformation:
    """Update each group of parameters by its own transformation.

    The law: a group is updated as if it were alone. So a clip by global norm inside a group sees that
    group; one for all belongs before, in a `chain`.

    Args:
        transforms: by label.
        labels: a tree of strings like the parameters, in which one may stand for a whole subtree, or
            a function that makes one from the parameters; `role_labels` makes one from the dims.

    Raises:
        TreeError: the labels do not fit the parameters; names the key path.
        ValueError: a label has no transformation, or a transformation no parameter.

    >>> import torch
    >>> from pfx import optim
    >>> groups = {"decay": optim.adamw(0.1), "embed": optim.sgd(0.5)}
    >>> optimizer = partition(groups, {"wte": "embed", "up": "decay"})
    >>> params = {"wte": torch.zeros(1), "up": torch.zeros(1)}
    >>> grads = {"wte": torch.ones(1), "up": torch.ones(1)}
    >>> optimizer.update(grads, optimizer.init(params), params)[0]
    {'up': tensor([-0.1000]), 'wte': tensor([-0.5000])}
    """
    transforms = dict(transforms)

    def flags_for(values: Any) -> dict[str, list[bool]]:
        found = _labels(labels(values) if callable(labels) else labels, values)
        _check(transforms, found, values)
        return {name: [label == name for label in found] for name in transforms}

    def init(params: Any) -> PartitionState:
        flags = flags_for(params)
        states = {name: t.init(select(params, flags[name])) for name, t in transforms.items()}
        return PartitionState(states)

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        updates, states = grads, {}
        for name, flags in flags_for(grads).items():
            own = None if params is None else select(params, flags)
            chosen, states[name] = update_with(
                transforms[name], select(grads, flags), state.inner[name], own, **extra
            )
            updates = merge(updates, flags, chosen)
        return updates, PartitionState(states)

    return GradientTransformation(init, update)


def role_labels(axes: Any, label: Callable[[tuple[str, ...]], str]) -> Any:
    """Label each leaf by its logical dim names, for `partition`.

    Args:
        axes: a tree like the parameters whose leaves are strings of dim names.
        label: gets the tuple of names of one leaf.

    Raises:
        TypeError: a leaf of `axes` is not a string; names the key path.

    >>> axes = {"wte": "vocab embed", "up": "embed mlp"}
    >>> role_labels(axes, lambda dims: "embed" if "vocab" in dims else "decay")
    {'up': 'decay', 'wte': 'embed'}
    """
    role_mask(axes, lambda dims: True)  # checks the leaves
    return tree.map(lambda names: label(tuple(names.split())), axes)


def _labels(labels: Any, values: Any) -> list[Any]:
    try:
        return tree.broadcast_prefix(labels, values)
    except TreeError as error:
        raise TreeError(
            message(
                "partition: the labels",
                "do not match the parameters.",
                str(error),
                fix="give the labels the parameters' keys, or one label for a whole subtree",
            )
        ) from error


def _check(transforms: Mapping[str, Any], labels: list[Any], values: Any) -> None:
    for (path, _), label in zip(tree.flatten_with_path(values)[0], labels, strict=True):
        if label not in transforms:
            where = f"partition: the label of {tree.path_string(path, 'params')}"
            fix = f"one of {sorted(transforms)}"
            raise ValueError(message(where, f"is {label!r}, which has no transformation.", fix=fix))
    unused = sorted(set(transforms) - set(labels))
    if unused:
        what = f"is the label of no parameter; labels: {sorted(set(labels))}"
        fix = f"leave out the transformation {unused[0]!r}, or label a parameter so"
        raise ValueError(message(f"partition: {unused[0]!r}", what, fix=fix))

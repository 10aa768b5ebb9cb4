"""`Plan`: which mesh, which logical dim goes to which axis, and what ZeRO shards over the data axis.

A plan holds no tensors and runs nothing; it answers with specs. ZeRO (Rajbhandari et al. 2020,
arXiv:1910.02054) is three of them: stage 1 splits the optimizer state over "dp", stage 2 the
gradients too, stage 3 the parameters too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from pfx import tree
from pfx.compiler.names import spec_of_names
from pfx.errors import ShardingError, TreeError, message
from pfx.mesh import Deal, Mesh, make_mesh
from pfx.precision import Policy, as_policy
from pfx.schedules import Schedule, build, validate
from pfx.schedules.build import virtual_stages
from pfx.spec import Axes, P

DATA = "dp"
TENSOR = "tp"
PIPELINE = "pp"
STACK = "layers"  # the dim a scan runs over is never split by ZeRO
_KEEPERS = {DATA: "ZeRO", PIPELINE: "every stage"}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a training step is spread over devices.

    Attributes:
        dp: data-parallel devices; the batch is split over them.
        tp: tensor-parallel devices; heads, mlp and vocabulary are split over them (Shoeybi et al.
            2019, arXiv:1909.08053).
        sequence_parallel: split the residual stream's sequence over "tp" too (Korthikanti et al.
            2022, arXiv:2205.05198): norms, dropout and residuals are not repeated.
        zero: 0, or the ZeRO stage: optimizer state (1), gradients (2), parameters (3) over "dp".
        microbatches: the batch is cut into so many, their gradients added, the sum divided once.
        pp: pipeline stages; the stacked layers are split over them, and the scan over layers becomes
            a pipeline (Huang et al. 2019, arXiv:1811.06965).
        schedule: of the pipeline: a name in `pfx.schedules.build`, or a `pfx.schedules.Schedule`.
        virtual: stages on each device; None: as many as the schedule has, 2 for "interleaved".
        stage_layers: the layers of each stage, in order; None: as equal as possible.
        precision: the dtypes of parameters, computation, reductions and masters: a name, fields in a
            text, or a `pfx.precision.Policy`; "model" casts nothing and reduces in float32.
        remat: "full" recomputes the layers of a model in the backward pass where the model does not
            say what its scans save; None saves what that needs.
        names: logical dim names to mesh axes, added to or replacing the usual ones.
        axes: more mesh axes by name and size, for `names` to use.

    >>> plan = Plan(dp=2, tp=2, zero=1)
    >>> print(plan.mesh())
    dp=2 tp=2
    """

    dp: int = 1
    tp: int = 1
    sequence_parallel: bool = False
    zero: int = 0
    microbatches: int = 1
    pp: int = 1
    schedule: str | Schedule = "1f1b"
    virtual: int | None = None
    stage_layers: tuple[int, ...] | None = None
    precision: str | Policy = "model"
    remat: str | None = None
    names: Mapping[str, Any] = field(default_factory=dict)
    axes: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "microbatches", "pp"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ShardingError(
                    message(f"Plan: {name}={value!r}", "must be an integer of at least 1.")
                )
        if self.zero not in (0, 1, 2, 3):
            raise ShardingError(
                message(f"Plan: zero={self.zero!r}", "is no ZeRO stage.", fix="0, 1, 2 or 3")
            )
        if self.remat not in (None, "full"):
            what = "is no way to rematerialize."
            raise ShardingError(message(f"Plan: remat={self.remat!r}", what, fix='"full" or None'))
        self._check_axes()
        self._check_pipeline()
        try:
            assert self.policy is not None
        except ValueError as error:
            raise ShardingError(f"Plan: {error}") from None

    def _check_pipeline(self) -> None:
        """Build the schedule, so that what cannot be is an error of the plan."""
        if self.virtual is not None and (type(self.virtual) is not int or self.virtual < 1):
            what = "must be an integer of at least 1, or None."
            raise ShardingError(message(f"Plan: virtual={self.virtual!r}", what))
        made = self.pipeline
        validate(made)
        wanted = (self.pp, self.microbatches, self.virtual or made.virtual)
        if (made.num_devices, made.microbatches, made.virtual) != wanted:
            raise ShardingError(
                message(
                    f"Plan: schedule {made.name!r}",
                    "is for another pipeline.",
                    f"schedule: {made.num_devices} devices, {made.stages} stages, "
                    f"{made.microbatches} microbatches",
                    f"plan: pp={wanted[0]}, virtual={wanted[2]}, microbatches={wanted[1]}",
                    fix=f"Plan(pp={made.num_devices}, microbatches={made.microbatches}, "
                    f"virtual={made.virtual})",
                )
            )
        sizes = self.stage_layers
        if sizes is not None and (
            not isinstance(sizes, (tuple, list))
            or not all(type(size) is int and size >= 0 for size in sizes)
            or len(sizes) != made.stages
        ):
            raise ShardingError(
                message(
                    f"Plan: stage_layers={sizes!r}",
                    f"does not say how many layers each stage has; stages: {made.stages}",
                    fix="a tuple with a number of at least 0 for each stage, in order",
                )
            )

    def _check_layers(self, where: str, names: Sequence[str], shape: Sequence[int]) -> None:
        """Raise unless the stages hold as many layers as a stack has."""
        for name, size in zip(names, shape, strict=True):
            sizes = self.stage_layers
            if name == STACK and sizes is not None and sum(sizes) != size:
                raise ShardingError(
                    message(
                        f"Plan: stage_layers={sizes}",
                        f"do not hold the {size} layers of the model.",
                        f"{' + '.join(map(str, sizes))} = {sum(sizes)}; {where} has {size} layers",
                        fix=f"numbers whose sum is {size}, or None for equal ones",
                    )
                )

    def _check_axes(self) -> None:
        """Refuse what would silently split nothing: a name that mentions no axis of the plan."""
        known = (PIPELINE, DATA, TENSOR, *self.axes)
        for name in self.axes:
            if name in (PIPELINE, DATA, TENSOR):
                what, fix = "is an axis of every plan.", f"Plan({name}={self.axes[name]})"
                raise ShardingError(message(f"Plan: axes[{name!r}]", what, fix=fix))
        for name, wanted in self.names.items():
            for axis in (wanted,) if isinstance(wanted, str) else wanted or ():
                if axis not in known:
                    where = f"Plan: names[{name!r}]={wanted!r}"
                    what = f"mentions the unknown axis {axis!r}."
                    real = known if self.pp > 1 else known[1:]
                    listed = f"axes of the plan: {', '.join(real)}"
                    fix = f'axes={{"{axis}": 2}}, or one of these'
                    raise ShardingError(message(where, what, listed, fix=fix))

    def mesh(self, kind: str | None = None, device: str = "cpu") -> Mesh:
        """The plan's own mesh: pp where there is a pipeline, dp, tp, then any further axes."""
        pipeline = {PIPELINE: self.pp} if self.pp > 1 else {}
        axes = {**pipeline, DATA: self.dp, TENSOR: self.tp, **self.axes}
        sizes = tuple(self.stage_layers or ())
        deals = {PIPELINE: Deal(self.pipeline.place, sizes)} if pipeline else None
        return make_mesh(kind=kind, device=device, deals=deals, **axes)

    @cached_property
    def pipeline(self) -> Schedule:
        """The schedule of the pipeline: what each of the `pp` devices does with each microbatch."""
        if isinstance(self.schedule, Schedule):
            return self.schedule
        virtual = self.virtual or virtual_stages(self.schedule)
        sizes = {"stages": self.pp, "microbatches": self.microbatches, "virtual": virtual}
        return build(self.schedule, **sizes)

    @cached_property
    def policy(self) -> Policy:
        """What `precision` says."""
        return as_policy(self.precision)

    @property
    def logical_names(self) -> dict[str, Any]:
        """Every logical dim name the plan knows, with its mesh axes (None: whole)."""
        usual: dict[str, Any] = {
            "batch": DATA, "heads": TENSOR, "kv_heads": TENSOR, "mlp": TENSOR, "vocab": TENSOR,
            "seq": TENSOR if self.sequence_parallel else None,
            STACK: PIPELINE if self.pp > 1 else None,
            **dict.fromkeys(("tokens", "embed", "head_dim", "qkv", "positions")),
        }  # fmt: skip
        wanted = {**usual, **self.names}
        return wanted if self.pp > 1 else {name: _unpiped(axes) for name, axes in wanted.items()}

    def compute_specs(self, axes: Any, shapes: Any, mesh: Mesh, report: list[str]) -> Any:
        """The spec each parameter is computed with: what its logical names say.

        `axes` is a tree of strings like the parameters, `shapes` the parameters or their shapes.
        Dims that do not divide stay whole; a line in `report` says so.
        """
        pairs, treedef = tree.flatten_with_path(shapes)
        names = _axes_leaves(axes, treedef, pairs)
        specs = []
        for (path, leaf), text in zip(pairs, names, strict=True):
            where = f"params{tree.path_string(path)}"
            if len(text.split()) != len(leaf.shape):
                raise ShardingError(
                    message(
                        f"axes: {where}",
                        f"names {len(text.split())} dims, the parameter has {len(leaf.shape)}.",
                        f"axes: {text!r}",
                        f"shape: {tuple(leaf.shape)}",
                    )
                )
            self._check_layers(where, text.split(), leaf.shape)
            note = lambda line, where=where: report.append(f"{where}: {line}")
            specs.append(spec_of_names(text, leaf.shape, self.logical_names, mesh, note))
        return tree.unflatten(treedef, specs)

    def sharded_specs(
        self, axes: Any, shapes: Any, mesh: Mesh, report: list[str], over: Sequence[str] = (DATA,)
    ) -> Any:
        """The compute specs, with a dim of each parameter split over each axis of `over` as well.

        The data axis takes the largest dim it divides, and the pipeline's axis one that the data
        axis leaves, if it can: what is split over both then moves along one axis at a time. Where
        no dim divides the spec stays as it is; a line in `report` says so.
        """
        specs = self.compute_specs(axes, shapes, mesh, [])
        pairs, treedef = tree.flatten_with_path(shapes)
        names = _axes_leaves(axes, treedef, pairs)
        out = []
        for (path, leaf), text, spec in zip(
            pairs, names, tree.leaves(specs, _is_spec), strict=True
        ):
            dims = _Dims(text.split(), leaf.shape, mesh)
            split = dims.with_axes(spec, over)
            report += [
                f"params{tree.path_string(path)}: no dim of {tuple(leaf.shape)} as {spec} divides "
                f"by {axis}={mesh.shape[axis]}: {_KEEPERS[axis]} keeps it whole"
                for axis in over
                if mesh.shape[axis] > 1 and axis not in split.axes
            ]
            out.append(split)
        return tree.unflatten(treedef, out)


def _unpiped(axes: Any) -> Any:
    """Mesh axes without that of pipelines, which a mesh without one does not have."""
    if axes is None or isinstance(axes, str):
        return None if axes == PIPELINE else axes
    return tuple(axis for axis in axes if axis != PIPELINE)


def _is_spec(node: Any) -> bool:
    return isinstance(node, P)


def _axes_leaves(axes: Any, treedef: tree.TreeDef, pairs: Sequence[Any]) -> list[str]:
    try:
        return tree.match(treedef, axes, [path for path, _ in pairs])
    except TreeError as error:
        raise ShardingError(
            message(
                "make_train_step: axes",
                "do not match the parameters.",
                str(error),
                fix="return from axes(config) a tree like init's, with one string per leaf",
            )
        ) from None


@dataclass(frozen=True)
class _Dims:
    """The dims of one parameter, to choose from for a further axis."""

    names: Sequence[str]
    shape: Sequence[int]
    mesh: Mesh

    def with_axes(self, spec: P, over: Collection[str]) -> P:
        """Split over the data axis, the pipeline's, or both."""
        data = self.with_axis(spec, DATA)
        split = data if DATA in over else spec
        if PIPELINE not in over:
            return split
        both = self.with_axis(data, PIPELINE)
        if PIPELINE not in both.axes:
            return self.with_axis(split, PIPELINE)
        return both if split == data else _without(both, DATA)

    def with_axis(self, spec: P, axis: str) -> P:
        """Add an axis to the largest dim it can split; whole dims first, the stack dim never."""
        if self.mesh.shape.get(axis, 1) == 1 or axis in spec.axes:
            return spec
        entries = [*map(_axes_of, spec), *[()] * (len(self.shape) - len(spec))]
        ranks = {
            dim: (not axes, self.mesh.extent(axes, size))
            for dim, (name, size, axes) in enumerate(
                zip(self.names, self.shape, entries, strict=True)
            )
            if name != STACK and self.mesh.splits((*axes, axis), size)
        }
        if not ranks:
            return spec
        dim = max(ranks, key=lambda dim: (ranks[dim], -dim))
        entries[dim] = (*entries[dim], axis)
        return _spec_of(entries)


def _without(spec: P, axis: str) -> P:
    return _spec_of([tuple(a for a in _axes_of(entry) if a != axis) for entry in spec])


def _axes_of(entry: str | Axes | None) -> Axes:
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def _spec_of(entries: Sequence[Axes]) -> P:
    return P(*(None if not e else e[0] if len(e) == 1 else e for e in entries))

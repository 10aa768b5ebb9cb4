"""`make_train_step`: loss, optimizer and plan to one compiled, pure training step.

The step is written for one device. What makes it parallel is where its state lives (three trees of
specs), two constraints per parameter for ZeRO, and the logical names in the model. The loss contract:
``loss_fn(params, batch, key) -> (loss_sum, weight, metrics)``; sums over microbatches and devices are
added, and the one division by the whole weight comes at the end. Gradients are taken by the parameters
that the loss sees, in the dtype of the plan's policy, and widened before anything is added to them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from pfx import diagnosis, optim, random, tree
from pfx.api import Jitted, device_put, eval_shape, jit
from pfx.compiler.program import Program
from pfx.errors import ShardingError, message
from pfx.lax import constrain, label, scan
from pfx.lax.remat_loops import remat_loops
from pfx.mesh import Mesh
from pfx.optim.base import widen
from pfx.placement import Placement
from pfx.plan import DATA, Plan
from pfx.precision import loss_scale, refresh_masters
from pfx.schedules import Timeline
from pfx.spec import P

LossFn = Callable[[Any, Any, Any], tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]]


@tree.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Everything a step needs and returns: parameters, optimizer state, step count and key."""

    params: Any
    opt_state: Any
    step: Any
    key: Any


def make_train_step(
    loss_fn: LossFn,
    optimizer: optim.GradientTransformation,
    plan: Plan,
    *,
    init: Callable[[torch.Tensor], Any],
    axes: Any,
    mesh: Mesh | None = None,
    donate: bool = True,
    check: bool = False,
    deterministic: bool = False,
    seed: int | None = None,
) -> TrainStep:
    """Compile a training step for a plan.

    Law: k steps equal k steps of the same function on one device, for any plan, to rounding.

    Args:
        loss_fn: ``(params, batch, key) -> (loss_sum, weight, metrics)``, for one device. `metrics`
            are summed over microbatches like the loss.
        optimizer: a transform of `pfx.optim`.
        plan: how to spread it.
        init: ``key -> params``; run on the mesh, each device drawing its own shards.
        axes: a tree like the parameters whose leaves name their dims, "layers embed mlp".
        mesh: the devices; None makes the plan's own (processes under torchrun, simulated elsewhere).
        donate: let a step reuse the memory of the state it is given.
        check, deterministic, seed: as in `pfx.jit`.

    Returns:
        A `TrainStep` with ``init(key) -> state`` and ``step(state, batch) -> (state, metrics)``;
        metrics hold loss (the weighted mean), weight, grad_norm (before clipping), finite (whether
        loss and norm are), lr, and where the optimizer has them skipped (steps so far) and loss_scale.
    """
    mesh = plan.mesh() if mesh is None else mesh
    own = plan.mesh(kind="abstract")
    if dict(mesh.shape) != dict(own.shape) or mesh.deals != own.deals:
        what = "is not the plan's."
        planned = f"plan: {own}, {own.deals}" if own.deals else f"plan: {own}"
        fix = "mesh=plan.mesh(kind=..., device=...), or other sizes in the plan"
        raise ShardingError(message(f"make_train_step: mesh {mesh}", what, planned, fix=fix))
    return TrainStep(loss_fn, optimizer, plan, init, axes, mesh, donate, check, deterministic, seed)


@dataclass(frozen=True, eq=False)
class TrainStep:
    """A compiled training step; made by `make_train_step`."""

    loss_fn: LossFn
    optimizer: optim.GradientTransformation
    plan: Plan
    init_fn: Callable[[torch.Tensor], Any]
    axes: Any
    mesh: Mesh
    donate: bool
    check: bool
    deterministic: bool
    seed: int | None = None

    @cached_property
    def transform(self) -> optim.GradientTransformation:
        """The optimizer, with the masters and the loss scale that the plan's policy adds."""
        params = eval_shape(lambda key: self.plan.policy.kept(self.init_fn(key)), random.key(0))
        return self.plan.policy.wrap(self.optimizer, eval_shape(self.optimizer.init, params))

    @cached_property
    def shapes(self) -> TrainState:
        """The state's shapes and dtypes, without memory."""
        return eval_shape(self._fresh_state, random.key(0))

    @cached_property
    def placement(self) -> Placement:
        """Where the parameters and what mirrors them lie."""
        return Placement(self.plan, self.axes, self.shapes.params, self.mesh)

    @property
    def report(self) -> list[str]:
        """What the plan could not split, one line each."""
        return self.placement.report

    @cached_property
    def state_specs(self) -> TrainState:
        """Where parameters and optimizer state are kept between steps."""
        mirrored = self.placement.mirrored(self.shapes.opt_state)
        return TrainState(self.placement.kept, mirrored, P(), P())

    def batch_specs(self, batch: Any) -> Any:
        """Every leaf split on dim 0 as the logical name "batch" says."""
        axis = self.plan.logical_names["batch"]
        return tree.map(lambda leaf: P(axis) if len(leaf.shape) else P(), batch)

    def _fresh_state(self, key: torch.Tensor) -> TrainState:
        init_key, step_key = random.split(key).unbind(0)
        return self._state_with(self.init_fn(init_key), step_key)

    def _state_with(self, params: Any, key: torch.Tensor) -> TrainState:
        params = self.plan.policy.kept(params)
        return TrainState(params, self.transform.init(params), _zero_count(key), key)

    def init(self, key: torch.Tensor) -> TrainState:
        """Draw a state on the mesh; no device ever holds a parameter it does not keep."""
        return jit(self._fresh_state, mesh=self.mesh, out_specs=self.state_specs)(key)

    def state_of(self, params: Any, key: torch.Tensor) -> TrainState:
        """Put given parameters (global tensors) on the mesh, with a fresh optimizer state."""
        placed = device_put(params, self.mesh, self.state_specs.params)
        return jit(self._state_with, mesh=self.mesh, out_specs=self.state_specs)(placed, key)

    def with_params(self, state: TrainState, params: Any) -> TrainState:
        """Give a state other parameters (global tensors or Arrays), and masters made of them.

        Moments, counts, step and key stay; the given state is used up.
        """

        def replaced(state: TrainState, params: Any) -> TrainState:
            params = self.plan.policy.kept(params)
            return replace(state, params=params, opt_state=refresh_masters(state.opt_state, params))

        placed = device_put(params, self.mesh, self.state_specs.params)
        specs = (self.state_specs, self.state_specs.params)
        put = jit(replaced, mesh=self.mesh, in_specs=specs, out_specs=self.state_specs, donate=(0,))
        return put(state, placed)

    def step(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        """Run one step; `batch` holds global tensors or Arrays, dim 0 the batch."""
        return self._compiled(batch)(state, batch)

    def rerun(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        """Run one step and keep the state it is given, to run it again.

        Law: the same bits as `step`, every time; what differs is a fault of the machine.
        """
        return self._compiled(batch, "rerun")(state, batch)

    def diagnose(self, state: TrainState, batch: Any) -> dict[str, Any]:
        """Look at the step that `step` would make: norms and ranges, by leaf and by layer.

        Returns:
            loss, weight, grad_norm and, of "gradients" and of "params", what
            `pfx.diagnosis.diagnosis` says. The state is kept.
        """
        return self._compiled(batch, "diagnose")(state, batch)

    def timed(
        self, state: TrainState, batch: Any
    ) -> tuple[tuple[TrainState, dict[str, Any]], Timeline]:
        """Run one step and measure its pipeline; see `pfx.api.Jitted.timed`.

        Returns:
            What `step` returns, and a `pfx.schedules.Timeline` in seconds.

        Raises:
            ShardingError: the plan has no pipeline.
        """
        return self._compiled(batch).timed(state, batch)

    def lower(self, batch: Any) -> Program:
        """The program of a step for a batch of this form, from shapes alone."""
        return self._compiled(batch).lower(self.shapes, batch)

    def _compiled(self, batch: Any, what: str = "step") -> Jitted:
        form = tuple((tuple(leaf.shape), leaf.dtype) for leaf in tree.leaves(batch))
        key = (what, tree.structure(batch), form)
        if key not in self._jitted:
            self._check_batch(batch)
            looks = what == "diagnose"
            self._jitted[key] = jit(
                self.pure_diagnosis if looks else self.pure_step,
                mesh=self.mesh,
                in_specs=(self.state_specs, self.batch_specs(batch)),
                out_specs=P() if looks else (self.state_specs, P()),
                donate=(0,) if self.donate and what == "step" else (),
                names=self.plan.logical_names,
                check=self.check,
                deterministic=self.deterministic,
                schedule=self.plan.pipeline if self.plan.pp > 1 else None,
                seed=self.seed,
            )
        return self._jitted[key]

    @cached_property
    def _jitted(self) -> dict[Any, Jitted]:
        return {}

    def _check_batch(self, batch: Any) -> None:
        pairs, _ = tree.flatten_with_path(batch)
        axis = self.plan.logical_names["batch"]
        axes = (axis,) if isinstance(axis, str) else tuple(axis or ())
        n, m = self.mesh.count(axes), self.plan.microbatches
        for path, leaf in pairs:
            if len(leaf.shape) and leaf.shape[0] % (n * m):
                size = leaf.shape[0]
                raise ShardingError(
                    message(
                        f"train step: batch{tree.path_string(path)}",
                        "cannot be cut into equal parts.",
                        f"dim 0 (size {size}) over {m} microbatches x {n} data-parallel devices; "
                        f"{size} % {m * n} = {size % (m * n)}.",
                        f"mesh: {self.mesh}",
                        fix=f"use a batch of {size - size % (m * n) + m * n}, padded with label -100",
                    )
                )

    def pure_step(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        """The step itself, a pure function for one device; what `step` compiles."""
        grads, metrics = self._mean_gradients(state, batch)
        updates, opt_state = optim.update_with(
            self.transform, grads, state.opt_state, state.params,
            loss=metrics["loss"], weight=metrics["weight"],
        )  # fmt: skip
        params = optim.apply_updates(state.params, updates)
        norm = optim.pre_clip_norm(opt_state)
        norm = optim.global_norm(grads) if norm is None else norm
        finite = torch.isfinite(norm) & torch.isfinite(metrics["loss"])
        metrics |= {"grad_norm": norm, "finite": finite}
        read = {
            "lr": optim.learning_rate(opt_state),
            "skipped": optim.skipped(opt_state),
            "loss_scale": loss_scale.of(state.opt_state),  # that of this step's loss
        }
        metrics |= {name: value for name, value in read.items() if value is not None}
        return TrainState(params, opt_state, state.step + 1, state.key), metrics

    def pure_diagnosis(self, state: TrainState, batch: Any) -> dict[str, Any]:
        """What `diagnose` compiles, a pure function for one device."""
        grads, metrics = self._mean_gradients(state, batch)
        scale, compute = loss_scale.of(state.opt_state), self.plan.policy.compute
        found = diagnosis.diagnosis(grads, self.axes, compute, scale)
        params = diagnosis.diagnosis(state.params, self.axes, compute)
        norm = optim.global_norm(grads) / (1 if scale is None else scale)
        return {**metrics, "grad_norm": norm, "gradients": found, "params": params}

    def _mean_gradients(self, state: TrainState, batch: Any) -> tuple[Any, dict[str, Any]]:
        """The gradients of the mean loss, times the loss scale if there is one, and the metrics."""
        key = random.fold_in(state.key, state.step)
        scale = loss_scale.of(state.opt_state)
        shrunk = 1.0 if scale is None else self._power_below_weight(batch)
        factor = None if scale is None else scale / shrunk
        grads, loss_sum, weight, metrics = self._accumulate(state.params, batch, key, factor)
        if self.plan.policy.reduces_in_16_bits:
            # Here, or the sum would be made after the cast that widens it.
            grads = constrain(grads, self.placement.updated)
        mean = torch.where(weight > 0, 1 / torch.where(weight > 0, weight, 1).double(), 0)
        back = mean if scale is None else mean * shrunk
        grads = tree.map(lambda g: g * back.to(g.dtype), widen(grads))
        loss = loss_sum * mean.to(loss_sum.dtype)
        return label(grads, "gradients"), {**metrics, "loss": loss, "weight": weight}

    def _power_below_weight(self, batch: Any) -> float:
        """About a microbatch's weight, from shapes alone: gradients of a mean are what is scaled."""
        sizes = [math.prod(leaf.shape) for leaf in tree.leaves(batch) if len(leaf.shape)]
        return 2.0 ** int(math.log2(max(min(sizes, default=1) // self.plan.microbatches, 1)))

    def _accumulate(
        self, params: Any, batch: Any, key: torch.Tensor, factor: torch.Tensor | None
    ) -> tuple[Any, ...]:
        """Gradients, loss sum, weight and metrics, summed over the microbatches."""
        computed = self._used(self.plan.policy.computed(params))
        if self.plan.microbatches == 1 and self.plan.pp == 1:
            return self._gradients(computed, batch, random.fold_in(key, 0), factor)
        count, reduce_dtype = self.plan.microbatches, self.plan.policy.reduce_dtype
        cut = tree.map(lambda leaf: _interleave(leaf, count), batch)
        sums = eval_shape(self._sums, computed, tree.map(lambda x: x[0], cut), key)
        zeros = lambda s, dtype: torch.zeros(s.shape, dtype=dtype, device=key.device)
        start = label(tree.map(lambda p: zeros(p, reduce_dtype(p)), computed), "gradients")
        index = torch.arange(count, device=key.device)

        def add(total: Any, item: Any) -> tuple[Any, None]:
            now = self._gradients(computed, item[0], random.fold_in(key, item[1]), factor)
            return tree.map(torch.add, total, now), None

        zero_sums = tree.map(lambda s: zeros(s, s.dtype), sums)
        return scan(add, (start, *zero_sums), (cut, index))[0]

    def _gradients(
        self, computed: Any, batch: Any, key: torch.Tensor, factor: torch.Tensor | None
    ) -> tuple[Any, ...]:
        """The gradient of one microbatch's loss sum, times `factor`, and the sums of the contract."""

        def loss(params: Any) -> tuple[torch.Tensor, Any]:
            sums = self._sums(params, batch, key)
            return sums[0] if factor is None else sums[0] * factor, sums

        # ZeRO 2 and 3 compute with whole parameters and keep sharded gradients.
        sharded = self.plan.zero >= 2 and self.mesh.shape.get(DATA, 1) > 1
        whole = constrain(computed, self.placement.computed) if sharded else computed
        grads, (loss_sum, weight, metrics) = torch.func.grad(loss, has_aux=True)(whole)
        grads = self.plan.policy.reduced(grads)
        grads = constrain(grads, self.placement.gradients) if sharded else grads
        return label(grads, "gradients"), loss_sum, weight, metrics

    def _used(self, params: Any) -> Any:
        """The parameters of a step: all that a stage of the pipeline needs is with it."""
        return constrain(params, self.placement.used) if self.plan.pp > 1 else params

    def _sums(self, params: Any, batch: Any, key: torch.Tensor) -> tuple[Any, ...]:
        """What the loss returns, wide enough to be added up."""
        with remat_loops(self.plan.remat):
            loss_sum, weight, metrics = self.loss_fn(params, batch, key)
        wide = lambda x: widen(x) if x.dtype.is_floating_point else x
        return widen(loss_sum), wide(weight), tree.map(wide, metrics)

    def on_one_device(self) -> TrainStep:
        """The same step on a mesh of one device: the oracle of every plan."""
        axes = dict.fromkeys(self.plan.axes, 1)  # still there, for the plan's names to mention
        alone = replace(
            self.plan, dp=1, tp=1, pp=1, zero=0, sequence_parallel=False, axes=axes,
            schedule="1f1b", virtual=None, stage_layers=None,
        )  # fmt: skip
        return replace(self, plan=alone, mesh=alone.mesh(kind="simulated", device=self.mesh.device))


def _zero_count(like: torch.Tensor) -> torch.Tensor:
    return torch.zeros((), dtype=torch.int64, device=like.device)


def _interleave(x: torch.Tensor, count: int) -> torch.Tensor:
    """Cut dim 0 into `count` microbatches of every count-th row, so that each spans all devices."""
    return x.reshape(x.shape[0] // count, count, *x.shape[1:]).movedim(1, 0)

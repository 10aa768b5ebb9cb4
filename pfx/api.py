"""`jit`, `device_put`, `device_get`: where global tensors meet a mesh."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from pfx import _torch, tree
from pfx.array import Array, own_parts
from pfx.array import ShapeDtype as ShapeDtype
from pfx.compiler.functional import ReadsValues, reads_values
from pfx.compiler.lower import Lowered, lower
from pfx.compiler.program import Program
from pfx.compiler.reuse import shared_outputs
from pfx.compiler.signature import (
    arg_name,
    as_tensor,
    check_call,
    check_data,
    check_inlined,
    check_jit,
    check_named,
    meta_of,
    name_of,
)
from pfx.errors import ShardingError, message
from pfx.lax.constrain import constrain
from pfx.lax.eval_shape import eval_shape as eval_shape
from pfx.lax.region import current_region
from pfx.mesh import Mesh
from pfx.meta import TensorMeta
from pfx.runtime import runtime_of
from pfx.runtime.resharding import parts_of, resharded
from pfx.runtime.timed import Log, Record, only_pipeline
from pfx.schedules import Schedule, Timeline
from pfx.spec import Layout, layout_of, replicated, spec_leaves


def device_put(value: Any, mesh: Mesh, specs: Any = None) -> Any:
    """Split a pytree of global tensors over a mesh.

    Args:
        value: pytree of torch tensors (the global values; on a process mesh the same on every rank)
            or of Arrays, which are resharded (by way of the global value from another mesh).
        mesh: where to put them.
        specs: pytree of `P`, or a prefix of one; None replicates. Along an unreduced axis the first
            device gets the value and the others zeros.

    Returns:
        The same pytree with `Array` leaves.

    Raises:
        ShardingError: when a spec does not fit its leaf, naming the key path.

    >>> from pfx import P, make_mesh
    >>> device_put(torch.arange(6.), make_mesh(dp=2), P("dp"))
    Array(f32[6/dp] on dp=2)
    """
    pairs, treedef = tree.flatten_with_path(value)
    specs = spec_leaves(specs, value, "device_put: specs", "value")
    runtime = runtime_of(mesh)
    out = []
    for (path, leaf), spec in zip(pairs, specs, strict=True):
        where = f"device_put: value{tree.path_string(path)}"
        if isinstance(leaf, Array) and leaf.mesh != mesh:
            spec, leaf = leaf.spec if spec is None else spec, device_get(leaf)
        if isinstance(leaf, Array):
            layout = layout_of(leaf.spec if spec is None else spec, leaf.shape, mesh, where)
            moved = resharded(leaf, layout)
            if moved is not leaf:  # a slice of it would be gone once it is donated
                moved = replace(moved, parts=own_parts(moved.parts, leaf.parts))
            out.append(moved)
            continue
        leaf = as_tensor(leaf, where)
        layout = layout_of(spec, leaf.shape, mesh, where)
        parts = own_parts(runtime.split(leaf, layout), [leaf])
        out.append(Array(tuple(leaf.shape), leaf.dtype, mesh, layout, parts, runtime.coordinate))
    return tree.unflatten(treedef, out)


def device_get(value: Any) -> Any:
    """Return the global torch tensors of a pytree of Arrays; on a process mesh, on every rank.

    Unreduced Arrays are added up.

    >>> from pfx import P, make_mesh
    >>> device_get(device_put(torch.arange(4.), make_mesh(dp=2), P("dp")))
    tensor([0., 1., 2., 3.])
    """

    def get(leaf: Any) -> Any:
        if not isinstance(leaf, Array):
            return leaf
        return runtime_of(leaf.mesh).join(leaf.shape, leaf.dtype, leaf.layout, leaf.parts)

    return tree.map(get, value)


@dataclass(frozen=True)
class _Compiled:
    """A lowered function with what is needed to call it."""

    lowered: Lowered
    run: Callable[[list[Any]], list[Any]] | None
    layouts: tuple[Layout, ...]
    out_def: tree.TreeDef
    donated: tuple[bool, ...]
    shared: tuple[bool, ...]  # outputs that are also someone else's memory

    @property
    def program(self) -> Program:
        return self.lowered.program


class Jitted:
    """A function compiled for a mesh; see `jit`."""

    def __init__(
        self,
        fn: Callable[..., Any],
        mesh: Mesh,
        in_specs: Any,
        out_specs: Any,
        donate: Sequence[int],
        options: Mapping[str, Any],
    ) -> None:
        functools.update_wrapper(self, fn)
        self.fn, self.mesh = fn, mesh
        self.in_specs, self.out_specs = in_specs, out_specs
        self.donate = frozenset(donate)
        self.options = dict(options)
        self.cache: dict[Any, _Compiled] = {}

    @property
    def name(self) -> str:
        """How errors call this function."""
        return f"jit({name_of(self.fn)})"

    def __call__(self, *args: Any, **named: Any) -> Any:
        check_named(named, self.name)
        if _torch.is_transforming() or current_region() is not None:
            return self._inlined(args)
        compiled = self._compiled(args)
        return self._run(compiled, compiled.run or self._prepared(compiled.program), args)

    def timed(self, *args: Any) -> tuple[Any, Timeline]:
        """Call, and measure the pipeline; a first call is slow, so time a later one.

        On a simulated mesh actions run one by one. Each is measured, for all devices that share its
        stage (dp, tp), and laid out as devices of their own would run it; transfers take no time.
        On a process mesh, where all ranks must call it, the times are those of the ranks at 0 along
        all other axes, on one clock, and every rank gets all of them. An accelerator is waited for
        after each action.

        Returns:
            What calling it returns, and a `pfx.schedules.Timeline` in seconds.

        Raises:
            ShardingError: the program has no pipeline, or several.
        """
        compiled, runtime, log = self._compiled(args), runtime_of(self.mesh), Log()
        only_pipeline(compiled.program)
        outs = self._run(compiled, self._prepared(compiled.program, log.record), args)
        return outs, runtime.timeline(compiled.program, log.spans)

    def _run(
        self, compiled: _Compiled, run: Callable[[list[Any]], list[Any]], args: tuple[Any, ...]
    ) -> Any:
        runtime = runtime_of(self.mesh)
        leaves = tree.leaves(args)
        for leaf, name in zip(leaves, compiled.program.names, strict=False):
            check_data(leaf, f"{self.name}: {name}")
        ready = [
            parts_of(leaf, self.mesh, layout, keep=donated)
            for leaf, layout, donated in zip(
                leaves, compiled.layouts, compiled.donated, strict=True
            )
        ]
        ready += [list(runtime.split(t, replicated(t.ndim))) for t in compiled.lowered.captured]
        for i, (leaf, donated) in enumerate(zip(leaves, compiled.donated, strict=True)):
            if donated and isinstance(leaf, Array):
                if any(leaf is other for other in leaves[:i]):
                    ready[i] = [part.clone() for part in ready[i]]  # given twice
                object.__setattr__(leaf, "parts", ())
        del leaves
        outs = run(ready)
        held = [own_parts(p, shared=s) for p, s in zip(outs, compiled.shared, strict=True)]
        arrays = [
            Array(v.shape, v.dtype, self.mesh, v.layout, parts, runtime.coordinate)
            for v, parts in zip(compiled.program.outputs, held, strict=True)
        ]
        return tree.unflatten(compiled.out_def, arrays)

    def lower(self, *args: Any) -> Program:
        """Compile for arguments of this form (tensors, Arrays or `ShapeDtype`) and return the program."""
        return self._compiled(args).program

    def _inlined(self, args: tuple[Any, ...]) -> Any:
        """Inside a transform or another trace: the plain function, its specs as constraints."""
        check_call(args, self.in_specs, self.donate, self.name)
        pairs, treedef = tree.flatten_with_path(args)
        given = [
            self._placed(leaf, spec, self._arg_name(path))
            for (path, leaf), spec in zip(pairs, self._in_spec_leaves(args), strict=True)
        ]
        result = self.fn(*tree.unflatten(treedef, given))
        pairs, treedef = tree.flatten_with_path(result)
        outs = [
            self._placed(leaf, spec, self._out_name(path))
            for (path, leaf), spec in zip(pairs, self._out_spec_leaves(result), strict=True)
        ]
        return tree.unflatten(treedef, outs)

    def _placed(self, leaf: Any, spec: Any, where: str) -> Any:
        """A value as a tensor, constrained to its spec."""
        check_inlined(leaf, where)
        leaf = as_tensor(leaf, where)
        if spec is None:
            return leaf
        layout_of(spec, leaf.shape, self.mesh, where)
        return constrain(leaf, spec)

    def _compiled(self, args: tuple[Any, ...]) -> _Compiled:
        pairs, treedef = tree.flatten_with_path(args)
        name = lambda path: functools.partial(self._arg_name, path)
        metas = [meta_of(leaf, self.mesh, name(path)) for path, leaf in pairs]
        own = [leaf.layout if isinstance(leaf, Array) else None for _, leaf in pairs]
        form = treedef, tuple((m.shape, m.dtype) for m in metas)
        key = (*form, tuple(own))
        if key not in self.cache:
            layouts = self._layouts(args, [path for path, _ in pairs], metas, own)
            same = (*form, layouts)  # a spec says more than the layout that an Array has
            if same not in self.cache:
                self.cache[same] = self._compile(pairs, treedef, metas, layouts)
            self.cache[key] = self.cache[same]
        return self.cache[key]

    def _layouts(
        self, args: tuple[Any, ...], paths: Sequence[tree.Path], metas: Any, own: Any
    ) -> tuple[Layout, ...]:
        """Where each argument has to be: as its spec says, or else where it is."""
        check_call(args, self.in_specs, self.donate, self.name)
        return tuple(
            held
            if spec is None and held is not None
            else layout_of(spec, meta.shape, self.mesh, self._arg_name(path))
            for path, spec, meta, held in zip(
                paths, self._in_spec_leaves(args), metas, own, strict=True
            )
        )

    def _compile(
        self,
        pairs: Sequence[tuple[tree.Path, Any]],
        treedef: tree.TreeDef,
        metas: Sequence[TensorMeta],
        layouts: tuple[Layout, ...],
    ) -> _Compiled:
        names = [arg_name(self.fn, path) for path, _ in pairs]
        out_defs: list[tree.TreeDef] = []
        out_paths: list[list[tree.Path]] = []

        def flat(*values: torch.Tensor) -> list[torch.Tensor]:
            result = self.fn(*tree.unflatten(treedef, values))
            out_pairs, out_def = tree.flatten_with_path(result)
            out_defs[:], out_paths[:] = [out_def], [[path for path, _ in out_pairs]]
            return [as_tensor(leaf, self._out_name(path)) for path, leaf in out_pairs]

        def out_layouts(values: Sequence[torch.Tensor]) -> list[Layout | None]:
            wanted = self._out_spec_leaves(tree.unflatten(out_defs[0], values))
            return [
                None
                if spec is None
                else layout_of(spec, value.shape, self.mesh, self._out_name(path))
                for spec, value, path in zip(wanted, values, out_paths[0], strict=True)
            ]

        donated = [int(path[0][1:-1]) in self.donate for path, _ in pairs]
        lowered = self._lower(flat, metas, layouts, out_layouts, donated, names)
        program = lowered.program
        program.names = names + [f"captured {i}" for i in range(len(lowered.captured))]
        if self.options.get("strict") and program.report:
            raise ShardingError(
                message(f"{self.name}: strict=True", "does not allow:", *program.report)
            )
        run = None if self.mesh.kind == "abstract" else self._prepared(program)
        shared = tuple(shared_outputs(program))
        return _Compiled(lowered, run, layouts, out_defs[0], tuple(donated), shared)

    def _prepared(
        self, program: Program, record: Record | None = None
    ) -> Callable[[list[Any]], list[Any]]:
        options = {key: self.options[key] for key in ("check", "deterministic", "seed")}
        return runtime_of(self.mesh).prepare(program, **options, record=record)

    def _lower(
        self,
        flat: Any,
        metas: Any,
        layouts: Any,
        out_layouts: Any,
        donated: list[bool],
        arg_names: list[str],
    ) -> Lowered:
        given = ("names", "rules", "schedule")
        options = {k: self.options[k] for k in given if k in self.options}
        try:
            return lower(
                flat,
                metas,
                layouts,
                out_layouts,
                self.mesh,
                where=self.name,
                donated=donated,
                arg_names=arg_names,
                **options,
            )
        except ReadsValues as error:
            raise reads_values(error, self.name) from error

    def _in_spec_leaves(self, args: tuple[Any, ...]) -> list[Any]:
        specs = tuple(self.in_specs) if isinstance(self.in_specs, list) else self.in_specs
        root = functools.partial(arg_name, self.fn)
        return spec_leaves(specs, args, f"{self.name}: in_specs", root)

    def _out_spec_leaves(self, result: Any) -> list[Any]:
        return spec_leaves(self.out_specs, result, f"{self.name}: out_specs", "output")

    def _arg_name(self, path: tree.Path) -> str:
        return f"{self.name}: {arg_name(self.fn, path)}"

    def _out_name(self, path: tree.Path) -> str:
        return f"{self.name}: output{tree.path_string(path)}"


def jit(
    fn: Callable[..., Any],
    *,
    mesh: Mesh,
    in_specs: Any = None,
    out_specs: Any = None,
    donate: Sequence[int] = (),
    strict: bool = False,
    check: bool = False,
    deterministic: bool = False,
    names: Mapping[str, Any] | None = None,
    rules: Mapping[Any, str] | None = None,
    schedule: str | Schedule | None = None,
    seed: int | None = None,
) -> Jitted:
    """Compile a function written for one device into a program for every device of a mesh.

    Law: for any mesh and specs, the result equals ``fn(*args)`` on one device, to rounding.

    Args:
        fn: a pure function of pytrees of tensors. Transforms (`torch.func.grad`, `vmap`) go inside.
        mesh: the devices.
        in_specs: a tuple with a pytree of `P` (or a prefix) per argument. None: an Array keeps its
            own layout, a tensor is replicated.
        out_specs: a pytree of `P` (or a prefix) for the result; None lets the compiler choose, and
            reduces. An unreduced result, ``P(unreduced="dp")``, stays a sum that the devices still
            owe: gradients are so accumulated over calls, and reduced once where they are used.
        donate: positions of arguments whose memory the call may reuse; they are gone afterwards.
        strict: raise instead of reporting what had to be computed whole or left unsplit.
        check: simulated mesh only: compute every device's copy and assert equal ones bit-equal.
        deterministic: process mesh: add in the simulated mesh's order, bit for bit.
        names: logical dim names to mesh axes, for ``constrain(x, "batch seq embed")``.
        rules: sharding rules for your own ops, ``{torch.ops.my.op: "b m, m n -> b n"}``.
        schedule: what each device of a pipeline does when: a name in `pfx.schedules.build` or a
            `pfx.schedules.Schedule`. None: "1f1b", interleaved where a device has several stages.
        seed: simulated mesh: draws the order of what a pipeline may run in any order; the result
            is the same, bit for bit.

    Returns:
        A callable: torch tensors or Arrays in, Arrays out; its ``lower(*args)`` gives the `Program`.

    Raises:
        ShardingError: for a spec that does not fit, with the key path, the arithmetic and a fix.
        TraceError: for Python that needs values, global random numbers, or in-place changes.

    >>> from pfx import P, make_mesh
    >>> f = jit(lambda a, b: a @ b, mesh=make_mesh(x=2), in_specs=(P(None, "x"), P("x")))
    >>> y = f(torch.ones(2, 4), torch.ones(4, 3))
    >>> y
    Array(f32[2, 3] on x=2)
    >>> [c.op for c in f.lower(torch.ones(2, 4), torch.ones(4, 3)).collectives()]
    ['all_reduce']
    """
    check_jit(fn, mesh, donate)
    options = {"strict": strict, "check": check, "deterministic": deterministic,
               "names": names, "rules": rules, "schedule": schedule, "seed": seed}  # fmt: skip
    return Jitted(fn, mesh, in_specs, out_specs, donate, options)

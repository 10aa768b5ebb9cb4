"""What the processes of `test_processes` check: each function, here or in a file like it, on every rank.

``python checks.py FOLDER NAME...`` runs the named functions in order and reports to FOLDER.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import pfx
from models import gpt
from pfx import P, make_mesh
from pfx.compiler.ir import Value
from pfx.compiler.program import Program
from pfx.errors import RuntimeMismatchError
from pfx.mesh import Deal, Mesh
from pfx.plan import Plan
from pfx.runtime import SimulatedRuntime
from pfx.runtime.executor import Executor
from pfx.runtime.process import ProcessRuntime
from pfx.runtime.process_group import group_of
from pfx.spec import Layout
from pfx.train import make_train_step
from tests.dist import checkpoint_checks, pipeline_checks, programs, region_checks, weights_checks

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float64, torch.int32,
          torch.float16, torch.int8, torch.uint8)  # fmt: skip
CARRIED = (torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn,
           torch.complex64)  # fmt: skip


def meshes(**axes: Any) -> tuple[Mesh, Mesh]:
    """The same mesh twice: of processes, and simulated."""
    mesh = make_mesh(**axes)
    assert mesh.kind == "process"
    return mesh, make_mesh("simulated", **axes)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit for bit (but for which NaN it is)."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.itemsize in (1, 2) and not a.dtype.is_complex:
        a, b = a.float(), b.float()
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal but for the order in which a few numbers below 8 were added."""
    eps = torch.finfo(a.dtype).eps if a.is_floating_point() else 0.0
    return bool(((a.double() - b.double()).abs() <= 32 * eps).all())


def own(mesh: Mesh, value: Value, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """This rank's part among the distinct ones."""
    axes = mesh.ordered(value.layout.axes)
    return parts[mesh.index(mesh.coordinate(RANK), axes)]


def assert_as_simulated(
    program: Program, simulated: Mesh, *, exact: bool = True, native: bool = False
) -> None:
    """Run a program on both meshes from the same parts, and compare this rank's results."""
    mesh, runtime = program.mesh, ProcessRuntime(program.mesh)
    parts = programs.parts_for(program)
    other = Program(simulated, program.inputs, program.outputs, program.instrs)
    expected = SimulatedRuntime(simulated).prepare(other)([list(each) for each in parts])
    mine = [[own(mesh, v, p)] for v, p in zip(program.inputs, parts, strict=True)]
    kept = [[part.clone() for part in each] for each in mine]
    if native:  # the collectives that NCCL would run, here run by gloo
        here = mesh.coordinate(RANK)
        group = lambda axes, groups: group_of(mesh, axes, here, "cuda", 100.0, groups)
        run = Executor(program, here, group, deterministic=exact)
        got = [[part] for part in run([part for (part,) in mine])]
    else:
        got = runtime.prepare(program, deterministic=exact)([list(each) for each in mine])
    for value, (result,), parts_of in zip(program.outputs, got, expected, strict=True):
        want = own(mesh, value, parts_of)
        assert (same if exact else close)(result, want), (
            f"{value.type} from {program.text()[:2000]}: {result} is not {want}"
        )
    for (before,), (after,) in zip(kept, mine, strict=True):
        assert same(before, after), "an input was changed"


def moves_one_axis() -> None:
    """Every move over one axis, of all processes, in every dtype."""
    mesh, simulated = meshes(a=SIZE)
    assert_as_simulated(programs.moves_program(mesh, (8, 12), DTYPES), simulated)
    assert_as_simulated(programs.moves_program(mesh, (8, 12), (torch.float32,)), simulated)


def moves_two_axes() -> None:
    """Every move over two axes, in both orders."""
    mesh, simulated = meshes(a=2, b=SIZE // 2)
    assert_as_simulated(programs.moves_program(mesh, (8, 12), DTYPES), simulated)


def moves_native() -> None:
    """The same through the backend's own collectives; sums to rounding."""
    mesh, simulated = meshes(a=2, b=SIZE // 2)
    program = programs.moves_program(mesh, (8, 12), (torch.float32, torch.int64, torch.bool))
    assert_as_simulated(program, simulated, native=True)
    assert_as_simulated(program, simulated, native=True, exact=False)
    assert_as_simulated(program, simulated, exact=False)


def moves_large() -> None:
    """Parts of over a megabyte take other ways: point to point, pieces, the backend's own sum."""
    mesh, simulated = meshes(a=2, b=SIZE // 2)
    dtypes = (torch.float32, torch.bfloat16, torch.bool)
    program = programs.large_program(mesh, ("a", "b"), dtypes)
    assert_as_simulated(program, simulated)
    assert_as_simulated(program, simulated, exact=False)


def carried_dtypes() -> None:
    """Dtypes that gloo does not know are carried as bytes; int16 is also added."""
    mesh, simulated = meshes(a=SIZE)
    assert_as_simulated(programs.carries_program(mesh, (8, 12), CARRIED), simulated)
    assert_as_simulated(programs.moves_program(mesh, (8, 12), (torch.int16,)), simulated)


def buckets() -> None:
    """Several values in one message, over one axis and over two in the other order."""
    mesh, simulated = meshes(a=2, b=SIZE // 2)
    for axes in (("a",), ("b", "a")):
        for dtypes in ((torch.float32,), (torch.float32, torch.bool, torch.bfloat16)):
            assert_as_simulated(programs.buckets_program(mesh, axes, dtypes), simulated)


def manual_moves() -> None:
    """Permutes, groups and maxima, as hand-written collectives need them; also as NCCL runs them."""
    mesh, simulated = meshes(a=2, b=SIZE // 2)
    program = programs.manual_program(mesh, (torch.float32, torch.bool))
    assert_as_simulated(program, simulated)
    assert_as_simulated(program, simulated, native=True)
    mesh, simulated = meshes(a=SIZE)
    assert_as_simulated(programs.manual_program(mesh, CARRIED[:1] + DTYPES[:2]), simulated)


# Functions


def assert_equal_runs(fn: Callable[..., Any], args: Sequence[Any], specs: Any, **axes: Any) -> Any:
    """The same function on both meshes gives the same bits; returns the program."""
    mesh, simulated = meshes(**axes)
    run = pfx.jit(fn, mesh=mesh, in_specs=specs, deterministic=True)
    got = pfx.device_get(run(*args))
    want = pfx.device_get(pfx.jit(fn, mesh=simulated, in_specs=specs)(*args))
    for a, b in zip(pfx.tree.leaves(got), pfx.tree.leaves(want), strict=True):
        assert same(a, b), f"{a} is not {b}"
    return run.lower(*args)


def step(params: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    """A training step with a loop over layers, in both directions."""

    def loss(params: Any) -> torch.Tensor:
        def layer(h: torch.Tensor, w: Any) -> tuple[torch.Tensor, torch.Tensor]:
            h = h + torch.tanh(h @ w["up"]) @ w["down"]
            return h, h.square().mean()

        h, norms = pfx.scan(layer, x @ params["in"], params["layers"])
        return (h - y).square().mean() + 0.1 * norms.sum()

    value, grads = torch.func.grad_and_value(loss)(params)[::-1]
    return pfx.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def example() -> tuple[Any, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    draw = lambda *shape: torch.randn(shape, generator=generator) * 0.3
    params = {"in": draw(6, 8), "layers": {"up": draw(3, 8, 16), "down": draw(3, 16, 8)}}
    return params, draw(8, 6), draw(8, 8)


def training_steps() -> None:
    """Data parallel, tensor parallel, sharded parameters and both at once, with a loop."""
    tp = {"in": P(), "layers": {"up": P(None, None, "b"), "down": P(None, "b")}}
    zero = {"in": P("a"), "layers": {"up": P(None, "a"), "down": P(None, None, "a")}}
    both = {"in": P(), "layers": {"up": P(None, "a", "b"), "down": P(None, "b", "a")}}
    for params in (P(), tp, zero, both):
        program = assert_equal_runs(step, example(), (params, P("a"), P("a")), a=2, b=SIZE // 2)
        assert program.collectives()


def logic_and_integers() -> None:
    """any, all, integer sums, argmax and a global maximum over split dims."""

    def fn(x: torch.Tensor, i: torch.Tensor) -> Any:
        flags = x > 1
        return (
            flags.any(),
            flags.all(),
            flags.any(0),
            i.sum(),
            i.sum(1),
            x.amax(),
            x.argmax(1),
            i % 3,
        )

    generator = torch.Generator().manual_seed(2)
    x = torch.randn(8, 8, generator=generator)
    i = torch.randint(0, 1000, (8, 8), generator=generator)
    assert_equal_runs(fn, (x, i), (P("a", "b"), P("a", "b")), a=2, b=SIZE // 2)


def put_and_get() -> None:
    """A global value split over processes comes back whole on every rank, whatever its layout."""
    mesh, _ = meshes(a=2, b=SIZE // 2)
    for dtype in (*DTYPES, *CARRIED):
        x = torch.arange(8 * 12).reshape(8, 12).to(dtype)
        for spec in (P(), P("a"), P("b", "a"), P(("b", "a")), P(None, ("a", "b"))):
            array = pfx.device_put(x, mesh, spec)
            (shard,) = array.shards
            assert same(shard.data, x[shard.index])
            assert same(pfx.device_get(array), x), (dtype, spec)
    moved = pfx.device_put(pfx.device_put(x, mesh, P("a")), mesh, P(None, "a"))
    assert moved.spec == P(None, "a")
    assert same(pfx.device_get(moved), x)


def unreduced() -> None:
    """Addends are put, got, made and taken; accumulated gradients are reduced once."""
    mesh, _ = meshes(a=2, b=SIZE // 2)
    x = torch.arange(8 * 12.0).reshape(8, 12)
    for spec in (P(unreduced="a"), P("a", unreduced="b"), P(unreduced=("b", "a"))):
        array = pfx.device_put(x, mesh, spec)
        (shard,) = array.shards
        first = all(mesh.coordinate(RANK)[axis] == 0 for axis in spec.unreduced)
        assert same(shard.data, x[shard.index] if first else torch.zeros_like(shard.data))
        assert same(pfx.device_get(array), x), spec
        moved = pfx.device_put(array, mesh, P(None, "a", unreduced="b"))
        assert same(pfx.device_get(moved), x), spec
    owed = P(unreduced="a")
    step = pfx.jit(
        lambda acc, x: acc + x.sum(0), mesh=mesh, in_specs=(owed, P("a")), out_specs=owed
    )
    acc = pfx.device_put(torch.zeros(12), mesh, owed)
    assert step.lower(acc, x).collectives() == []
    for _ in range(4):
        acc = step(acc, x)
    end = pfx.jit(lambda acc: acc * 2, mesh=mesh, out_specs=P())
    assert [c.op for c in end.lower(acc).collectives()] == ["all_reduce"]
    assert same(pfx.device_get(end(acc)), 8 * x.sum(0))
    assert same(pfx.device_get(acc), 4 * x.sum(0))


def dealt_rows() -> None:
    """Rows that an axis deals unequally, or out of order, are put, moved, added and got."""

    def fn(x: torch.Tensor, y: torch.Tensor) -> Any:
        drawn = pfx.random.normal(pfx.random.key(0), x.shape)
        rows = (1 / x + drawn).log().nan_to_num()
        turned = y.cumsum(1) + x
        return rows, rows.sum(), x.T @ y, turned, x[1], pfx.constrain(x * y, P(None, "a"))

    for place in (range(SIZE), (*range(SIZE), *reversed(range(SIZE)))):
        deals = {"a": Deal(tuple(place))}
        mesh, _ = meshes(a=SIZE, deals=deals)
        specs = (P("a"), P(None, "a"), P())
        for dtype in (*DTYPES, *CARRIED):
            x = torch.arange(7 * 12).reshape(7, 12).to(dtype)
            for spec, other in itertools.permutations(specs, 2):
                array = pfx.device_put(x, mesh, spec)
                assert same(pfx.device_get(array), x), (dtype, spec)
                assert same(pfx.device_get(pfx.device_put(array, mesh, other)), x), (dtype, other)
        x = torch.arange(1, 7 * 12 + 1.0).reshape(7, 12)
        y = x.flip(0) % 5 - 2
        owed = pfx.device_put(x, mesh, P(unreduced="a"))
        scattered = pfx.device_put(owed, mesh, P("a"))
        assert same(pfx.device_get(owed), x) and same(pfx.device_get(scattered), x)
        (shard,) = scattered.shards
        rows = list(mesh.rows("a", 7)[RANK])
        assert same(shard.data[: len(rows)], x[rows])
        assert_equal_runs(fn, (x, y), (P("a"), P(None, "a")), a=SIZE, deals=deals)
        assert_equal_runs(fn, (x, y), (P(None, "a"), P("a")), a=SIZE, deals=deals)


def sharded_init() -> None:
    """Parameters are made in place: a rank holds its part, and the parts are one init."""
    mesh, simulated = meshes(a=SIZE)

    def init(key: torch.Tensor) -> Any:
        return {"w": pfx.random.normal(key, (8, 16)), "b": torch.zeros(16)}

    specs = {"w": P(None, "a"), "b": P("a")}
    made = pfx.jit(init, mesh=mesh, out_specs=specs)(pfx.random.key(7))
    assert made["w"].parts[0].shape == (8, 16 // SIZE)
    want = pfx.device_get(pfx.jit(init, mesh=simulated, out_specs=specs)(pfx.random.key(7)))
    got = pfx.device_get(made)
    assert same(got["w"], want["w"])
    assert same(got["b"], want["b"])


def sums_of_scattered() -> None:
    """A sum of what a reduce-scatter over dim 1 left: its order follows the strides."""

    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return pfx.constrain(x @ w, P(None, "a")).sum((0, 1))

    generator = torch.Generator().manual_seed(3)
    args = [torch.randn(shape, generator=generator) for shape in ((8, 128, 96), (96, 96))]
    program = assert_equal_runs(fn, args, (P(None, None, "a"), P("a")), a=SIZE)
    assert program.collectives()[0].op == "reduce_scatter"


def gpt_steps() -> None:
    """Two steps of a small GPT: sequence parallelism with ZeRO-1, and ZeRO-3."""
    config = gpt.Config(
        num_layers=2, embed_dim=32, num_heads=4, mlp_dim=64, vocab_size=131, max_seq_len=16
    )
    tokens = torch.randint(131, (8, 17), generator=torch.Generator().manual_seed(4))
    batch = {"tokens": tokens[:, :-1].clone(), "labels": tokens[:, 1:].clone()}
    tp = Plan(dp=SIZE // 2, tp=2, sequence_parallel=True, zero=1, microbatches=2)
    for plan in (tp, Plan(dp=SIZE, zero=3)):
        results = []
        for mesh in (plan.mesh(), plan.mesh(kind="simulated")):
            train = make_train_step(
                gpt.loss_fn(config), pfx.optim.adamw(1e-2), plan, mesh=mesh, deterministic=True,
                init=lambda key: gpt.init(config, key), axes=gpt.axes(config),
            )  # fmt: skip
            state = train.init(pfx.random.key(0))
            for _ in range(2):
                state, metrics = train.step(state, batch)
            results.append(pfx.device_get((state, metrics)))
        for (path, a), (_, b) in zip(
            *(pfx.tree.flatten_with_path(r)[0] for r in results), strict=True
        ):
            assert same(a, b), f"{plan}: {pfx.tree.path_string(path)}"


# Failures


def caught(call: Callable[[], Any]) -> str:
    try:
        call()
    except RuntimeMismatchError as error:
        return str(error)
    raise AssertionError("no error")


def different_programs() -> None:
    """One rank traces something else: every rank says which and where, before it could hang."""
    mesh, _ = meshes(a=SIZE)
    factor = 2.0 if RANK < SIZE - 1 else 3.0
    run = pfx.jit(lambda x: (x * factor).sum(), mesh=mesh, in_specs=P("a"))
    text = caught(lambda: run(torch.ones(8)))
    lines = text.splitlines()
    assert lines[0] == f"process mesh a={SIZE}: rank {SIZE - 1} differs from rank 0.", text
    assert "on rank 0: %2" in lines[1] and "2.0" in lines[1], text
    assert f"on rank {SIZE - 1}: %2" in lines[2] and "3.0" in lines[2], text
    assert lines[3] == (
        "  fix: call the same functions in the same order, with the same shapes, on every rank"
    )
    assert len(lines) == 4


def late_rank() -> None:
    """A rank that does not come to a program within the timeout is named, by all who wait."""
    mesh, _ = meshes(a=SIZE)
    sums = [((8,), Layout(((),), ("a",)), Layout(((),)))]
    program = programs.chains(mesh, sums, (torch.float32,))
    run = ProcessRuntime(mesh, timeout=1.0).prepare(program)
    if RANK == SIZE - 1:
        torch.distributed.distributed_c10d._get_default_store().get("late_rank done")
    text = caught(lambda: run([[torch.ones(8)]]))
    if RANK == 0:
        torch.distributed.distributed_c10d._get_default_store().set("late_rank done", "")
    first, waited, fix = text.splitlines()
    assert first == f"process mesh a={SIZE}: rank {SIZE - 1} of {SIZE} never arrived.", text
    assert waited.startswith("  the others waited 1 s at program "), text
    assert fix == f"  fix: read what rank {SIZE - 1} printed, or wait longer: PFX_TIMEOUT=2", text


def dead_rank() -> None:
    """A rank that dies between collectives is an error on the others, soon, and not a hang."""
    mesh, _ = meshes(a=SIZE)
    run = pfx.jit(lambda x: x.sum(), mesh=mesh, in_specs=P("a"))
    x = torch.ones(8)
    assert float(run(x)) == 8.0
    if RANK == SIZE - 1:
        return  # the last check: this process ends, and its connections with it
    text = caught(lambda: [run(x) for _ in range(2)])
    where, members, *_, fix = text.splitlines()
    assert where == f"process mesh: a collective over a of a={SIZE} did not complete.", text
    assert members == f"  ranks {', '.join(map(str, range(SIZE)))} take part; this is rank {RANK}."
    assert fix == "  fix: read what the other ranks printed: one of them failed first, or is late"


def main(folder: Path, names: Sequence[str]) -> None:
    """Run the named checks and report each; stop after the first that fails here."""
    torch.set_num_threads(1)
    others = (region_checks, pipeline_checks, checkpoint_checks, weights_checks)
    checks = functools.reduce(lambda found, other: found | vars(other), others, globals())
    with (folder / f"{RANK}.jsonl").open("w") as report:
        for name in names:
            try:
                checks[name]()
                result = "passed"
            except Exception:
                result = traceback.format_exc()
            print(json.dumps([name, result]), file=report, flush=True)
            if result != "passed":
                break


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])

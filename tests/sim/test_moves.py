"""Moves inside manual regions, against numpy: each device has an array, and gets one."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pfx
from pfx.array import own_parts
from pfx.compiler.bill import Collective
from pfx.compiler.ir import Compute, Reshard, Value
from pfx.compiler.passes import bucket_collectives
from pfx.compiler.program import Program, verify
from pfx.compiler.reshard import Move, move_bytes
from pfx.compiler.reuse import reuse_buffers, shared_outputs
from pfx.lax.manual import transport
from pfx.runtime import runtime_of
from pfx.spec import Layout, distinct_coordinates

AXES = ("x", "y", "z")
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute", "cast", "slice")
REDUCES: Mapping[str, Callable[..., Any]] = {"sum": np.add, "max": np.maximum, "min": np.minimum}
Devices = dict[tuple[int, ...], np.ndarray]  # by the numbers of a device along the mesh's axes


@dataclass(frozen=True)
class Example:
    """One move of a value on a mesh, and the form of its result."""

    sizes: Mapping[str, int]
    shape: tuple[int, ...]
    layout: Layout
    move: Move
    after_shape: tuple[int, ...]

    @property
    def mesh(self) -> pfx.Mesh:
        return pfx.make_mesh(kind="simulated", **self.sizes)

    @property
    def program(self) -> Program:
        before = Value(1, self.shape, torch.int64, self.layout)
        after = Value(2, self.after_shape, torch.int64, self.move.layout)
        instr = Reshard(self.move, (before,), (after,), moves=(self.move,))
        return Program(self.mesh, [before], [after], [instr])


@st.composite
def examples(draw: st.DrawFn) -> Example:
    sizes = {axis: draw(st.integers(1, 3)) for axis in AXES}
    order = draw(st.permutations(AXES))
    axes = tuple(order[: draw(st.integers(1, 2))])
    size = math.prod(sizes[axis] for axis in axes)
    kind = draw(st.sampled_from(KINDS))
    others = [axis for axis in AXES if axis not in axes]
    auto = draw(st.sampled_from([None, *others]))  # an axis of the compiler's, on some dim
    held = tuple(a for a in order if a != auto and draw(st.booleans()))  # may lack the move's axes
    dim, to_dim = draw(st.permutations((0, 1)))
    dims = [(), ()]
    if auto:
        dims[draw(st.integers(0, 1))] = (auto,)
    groups: transport.Groups = ()
    if kind.startswith("all_") or kind == "reduce_scatter":
        groups = draw(st.sampled_from([(), *splits(draw(st.permutations(range(size))))]))
    perm: transport.Perm = ()
    if kind == "permute":
        pairs = zip(range(size), draw(st.permutations(range(size))), strict=True)
        perm = tuple(pair for pair in pairs if draw(st.booleans()))
    n = len(groups[0]) if groups else size
    local = [n * draw(st.integers(1, 2)) for _ in dims]
    varying = tuple(a for a in AXES if a in held or a in axes)
    if kind in ("all_reduce", "all_gather") and not groups and draw(st.booleans()):
        varying = tuple(a for a in held if a not in axes)
    layout = Layout(tuple(dims), varying=held)
    after = [math.prod((m, *(sizes[a] for a in on))) for m, on in zip(local, dims, strict=True)]
    shape = tuple(after)
    if kind in ("all_gather", "all_to_all"):
        after[dim] *= n
    if kind in ("reduce_scatter", "slice"):
        after[dim] //= n
    if kind == "all_to_all":
        after[to_dim] //= n
    reduce = draw(st.sampled_from(list(REDUCES))) if "reduce" in kind else "sum"
    to_dim = to_dim if kind == "all_to_all" else -1
    move = Move(kind, axes, dim, to_dim, replace(layout, varying=varying), reduce, perm, groups)
    return Example(sizes, shape, layout, move, tuple(after))


def splits(ranks: Sequence[int]) -> list[tuple[tuple[int, ...], ...]]:
    """Every way to cut some ranks, in the order given, into equal groups."""
    n = len(ranks)
    return [
        tuple(tuple(ranks[i : i + k]) for i in range(0, n, k))
        for k in range(1, n + 1)
        if n % k == 0
    ]


def devices(mesh: pfx.Mesh, value: Value, parts: Sequence[torch.Tensor]) -> Devices:
    """What each device of a mesh holds, from the distinct parts."""
    axes = mesh.ordered(value.layout.axes)
    return {
        tuple(place.values()): parts[mesh.index(place, axes)].numpy()
        for place in mesh.coordinates()
    }


def reference(example: Example, held: Devices) -> Devices:
    """The move, one device at a time."""
    mesh, move = example.mesh, example.move
    size = mesh.count(move.axes)
    out = {}
    for place in mesh.coordinates():
        rank = mesh.index(place, move.axes)
        along = [held[tuple({**place, **m}.values())] for m in mesh.coordinates(move.axes)]
        group = next((g for g in move.groups if rank in g), tuple(range(size)))
        members, at, n = [along[i] for i in group], group.index(rank), len(group)
        total = lambda members=members: functools.reduce(REDUCES[move.reduce], members)
        block = lambda a, dim, at=at, n=n: np.split(a, n, dim)[at]
        sources = [s for s, to in move.perm if to == rank]
        out[tuple(place.values())] = {
            "cast": lambda along=along, rank=rank: along[rank],
            "slice": lambda along=along, rank=rank: np.split(along[rank], size, move.dim)[rank],
            "permute": lambda along=along, sources=sources: (
                along[sources[0]] if sources else np.zeros_like(along[0])
            ),
            "all_reduce": total,
            "all_gather": lambda members=members: np.concatenate(members, move.dim),
            "reduce_scatter": lambda total=total, block=block: block(total(), move.dim),
            "all_to_all": lambda members=members, block=block: np.concatenate(
                [block(member, move.to_dim) for member in members], move.dim
            ),
        }[move.kind]()
    return out


@pytest.mark.parametrize("check", [False, True])
@given(example=examples(), seed=st.integers(0, 2**16))
@settings(max_examples=150)
def test_a_move_is_what_numpy_makes_of_the_parts(check: bool, example: Example, seed: int) -> None:
    program, mesh = example.program, example.mesh
    verify(program)
    (before,), (after,) = program.inputs, program.outputs
    random_ = torch.Generator().manual_seed(seed)
    parts = [
        torch.randint(-99, 99, before.local_shape(mesh), generator=random_)
        for _ in distinct_coordinates(before.layout, mesh)
    ]
    want = reference(example, devices(mesh, before, parts))
    run = runtime_of(mesh).prepare(program, check=check, deterministic=False)
    (outs,) = run([list(parts)])
    for place, got in devices(mesh, after, outs).items():
        assert got.shape == after.local_shape(mesh)
        assert np.array_equal(got, want[place]), f"{example} at {place}"


def test_groups_are_found_by_rank() -> None:
    groups = ((5, 0), (2, 3), (1, 4))
    for rank, (members, place) in enumerate(transport.team(groups, r, 6) for r in range(6)):
        assert members in groups and members[place] == rank
    assert transport.team((), 4, 6) == ((0, 1, 2, 3, 4, 5), 4)


# What a program tells of them ----------------------------------------------------------------------

PERM = ((0, 1), (1, 2))
OWN = Layout(((), ()), varying=("tp",))


def ring(count: int, perms: Sequence[transport.Perm]) -> Program:
    """Permutes of `count` values that are all here from the start."""
    mesh = pfx.make_mesh(tp=4)
    ins = [Value(i, (8, 4), torch.float32, OWN) for i in range(count)]
    outs = [replace(value, number=count + value.number) for value in ins]
    moves = [Move("permute", ("tp",), -1, -1, OWN, perm=perm) for perm in perms]
    instrs = [
        Reshard(move, (before,), (after,), moves=(move,))
        for move, before, after in zip(moves, ins, outs, strict=True)
    ]
    return Program(mesh, ins, outs, [*instrs])


def test_text() -> None:
    whole = Layout(((), ()))
    wide = Value(3, (16, 4), torch.float32, OWN)
    program = ring(1, [PERM])
    program.inputs[0] = replace(program.inputs[0], layout=whole)
    cast = Move("cast", ("tp",), -1, -1, OWN)
    pairs = Move("all_gather", ("tp",), 0, -1, OWN, groups=((0, 2), (1, 3)))
    program.instrs = [
        Reshard(cast, tuple(program.inputs), (Value(9, (8, 4), torch.float32, OWN),)),
        replace(program.instrs[0], ins=(Value(9, (8, 4), torch.float32, OWN),)),
        Reshard(pairs, tuple(program.outputs), (wide,)),
    ]
    program.outputs = [wide]
    verify(program)
    assert program.text() == (
        "%0: f32[8, 4] = input\n"
        "%9: f32[8, 4]~tp = cast(%0; tp)\n"
        "%1: f32[8, 4]~tp = permute(%9; tp 0>1 1>2)\n"
        "%3: f32[16, 4]~tp = all_gather(%1; tp [0 2] [1 3], dim 0)\n"
        "return %3"
    )
    permute, gather = program.collectives()
    assert permute == Collective("permute", ("tp",), "f32", 128, 1, (8, 4), "", "", 1)
    assert gather == Collective("all_gather", ("tp",), "f32", 256, 1, (16, 4), "", "", 2)
    # The caller's operand, what is gathered, and the whole.
    assert program.memory().peak == 128 + 128 + 256
    program.instrs, program.outputs = program.instrs[:2], list(program.instrs[1].outs)
    assert program.memory().peak == 128 + 128  # the cast is a view of the operand


def test_bytes_on_the_wire() -> None:
    mesh = pfx.make_mesh(tp=4)
    move = Move("permute", ("tp",), -1, -1, OWN, perm=PERM)
    assert move_bytes(move, OWN, 32, 4, mesh) == 128
    assert move_bytes(replace(move, kind="cast"), OWN, 32, 4, mesh) == 0
    gather = Move("all_gather", ("tp",), 0, -1, OWN, groups=((0, 2), (1, 3)))
    assert move_bytes(gather, OWN, 32, 4, mesh) == 128
    assert move_bytes(replace(gather, groups=()), OWN, 32, 4, mesh) == 3 * 128


def test_permutes_are_joined_if_they_send_alike() -> None:
    program = ring(3, [PERM, ((3, 0),), PERM])
    want = run_ring(ring(3, [PERM, ((3, 0),), PERM]))
    bucket_collectives(program, 1 << 20)
    verify(program)
    assert [len(instr.ins) for instr in program.instrs] == [2, 1]
    got = run_ring(program)
    assert all(torch.equal(a, b) for a, b in itertools.zip_longest(got, want))


def test_groups_are_not_joined_with_others() -> None:
    program = ring(2, [PERM, PERM])
    groups = [((0, 1), (2, 3)), ((0, 2), (1, 3))]
    program.instrs = [
        replace(instr, move=move, moves=(move,))
        for instr, group in zip(program.instrs, groups, strict=True)
        for move in [Move("all_reduce", ("tp",), -1, -1, OWN, groups=group)]
    ]
    bucket_collectives(program, 1 << 20)
    assert [len(instr.ins) for instr in program.instrs] == [1, 1]


def run_ring(program: Program) -> list[torch.Tensor]:
    parts = [
        [torch.full((8, 4), 4.0 * k + i) for i in range(4)] for k in range(len(program.inputs))
    ]
    outs = runtime_of(program.mesh).prepare(program, check=False, deterministic=False)(parts)
    return [part for value in outs for part in value]


def test_a_cast_shares_memory_and_so_is_not_overwritten() -> None:
    """x * 2 may not be written over parts that are one tensor, and a result not given away twice."""
    mesh = pfx.make_mesh(tp=2)
    whole = Layout(((), ()))
    x, y = Value(1, (2, 2), torch.float32, whole), Value(2, (2, 2), torch.float32, OWN)
    other, z = Value(3, (2, 2), torch.float32, OWN), Value(4, (2, 2), torch.float32, OWN)
    cast = Reshard(Move("cast", ("tp",), -1, -1, OWN), (x,), (y,))
    add = torch.ops.aten.add.Tensor
    call = Compute(add, (y, other), {}, (y, other), (z,))
    program = Program(mesh, [x, other], [z], [cast, call], donated=frozenset((1,)))
    reuse_buffers(program)
    assert program.instrs[1].over == (-1,)
    program.outputs = [y, z]
    assert shared_outputs(program) == [False, False]
    program.donated = frozenset()
    assert shared_outputs(program) == [True, False]
    # Nor over an operand that fewer devices hold.
    call = Compute(add, (x, other), {}, (x, other), (z,))
    program = Program(mesh, [x, other], [z], [call], donated=frozenset((1,)))
    reuse_buffers(program)
    assert program.instrs[0].over == (-1,)


def test_an_array_owns_each_of_its_parts() -> None:
    """Parts that are the same on several devices are copied, before one of them is overwritten."""
    part, other = torch.zeros(4), torch.zeros(4)
    for parts in (own_parts([part, part.view(2, 2)]), own_parts([part[:2]], [part[2:]]),
                  own_parts([other, part], shared=True)):  # fmt: skip
        memory = {tensor.untyped_storage().data_ptr() for tensor in parts}
        assert len(memory) == len(parts) and part.untyped_storage().data_ptr() not in memory
    kept = own_parts([part, other], [torch.zeros(4)])
    assert kept[0] is part and kept[1] is other
    halves = own_parts([part[:2], part[2:]])
    assert [half.data_ptr() for half in halves] == [part.data_ptr(), part[2:].data_ptr()]


@pytest.mark.parametrize(
    ("kind", "local"),
    [("permute", (8, 4)), ("cast", (8, 4)), ("all_reduce", (8, 4)), ("slice", (8, 1)),
     ("reduce_scatter", (8, 1)), ("all_gather", (8, 16)), ("all_to_all", (2, 16))],
)  # fmt: skip
def test_a_program_says_what_its_moves_make(kind: str, local: tuple[int, int]) -> None:
    """Whatever the layouts call the axes: verify compares the shapes of parts."""
    mesh = pfx.make_mesh(tp=4)
    before = Value(0, (8, 4), torch.float32, OWN)
    for after in (OWN, Layout((("tp",), ()))):
        move = Move(kind, ("tp",), 1, 0 if kind == "all_to_all" else -1, after)
        shape = tuple(n * mesh.count(axes) for n, axes in zip(local, after.dims, strict=True))
        out = Value(1, shape, torch.float32, after)
        verify(Program(mesh, [before], [out], [Reshard(move, (before,), (out,))]))
        for wrong in (replace(out, shape=(shape[0] * 2, shape[1])), replace(out, dtype=torch.int8)):
            with pytest.raises(AssertionError):
                verify(Program(mesh, [before], [wrong], [Reshard(move, (before,), (wrong,))]))

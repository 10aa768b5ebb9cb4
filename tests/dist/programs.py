"""Programs made by hand: every move between layouts, and buckets of moves, with random parts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch

from pfx.compiler.ir import Instr, Reshard, Value
from pfx.compiler.program import Program
from pfx.compiler.reshard import Move, plan_moves
from pfx.mesh import Mesh
from pfx.spec import Axes, Layout, distinct_coordinates, local_shape


def layouts(mesh: Mesh) -> Iterator[Layout]:
    """Every layout of a matrix on a mesh: each axis on no dim, dim 0, dim 1 or owed, in any order."""
    for order in itertools.permutations(mesh.axis_names):
        for places in itertools.product(range(4), repeat=len(order)):
            held = [
                tuple(a for a, p in zip(order, places, strict=True) if p == i) for i in range(4)
            ]
            yield Layout((held[1], held[2]), held[3])


def moves_program(mesh: Mesh, shape: tuple[int, int], dtypes: Sequence[torch.dtype]) -> Program:
    """From every layout to every other, in a dtype each in turn."""
    every = list(dict.fromkeys(layouts(mesh)))
    pairs = [
        (source, target)
        for source, target in itertools.product(every, every)
        if not source.partial or set(target.partial) <= set(source.partial)
    ]
    for reduce in ("max", "min"):
        owed = [Layout(k.dims, k.partial, reduce) for k in every if k.partial]
        pairs += [(layout, Layout(layout.dims)) for layout in owed]
    return chains(mesh, [(shape, s, t) for s, t in pairs], dtypes)


def carries_program(mesh: Mesh, shape: tuple[int, int], dtypes: Sequence[torch.dtype]) -> Program:
    """From every layout to every other, for dtypes that are carried and never added."""
    every = [layout for layout in dict.fromkeys(layouts(mesh)) if not layout.partial]
    pairs = itertools.product(every, every, range(len(dtypes)))
    return chains(mesh, [(shape, s, t) for s, t, _ in pairs], dtypes)


def large_program(mesh: Mesh, axes: Axes, dtypes: Sequence[torch.dtype]) -> Program:
    """Parts of over a megabyte: gathered, summed and sum-scattered."""
    whole, rows, owed = Layout(((), ())), Layout((axes, ())), Layout(((), ()), axes)
    shape = (1002 * mesh.size, 301)
    pairs = ((owed, whole), (owed, rows), (rows, whole))
    return chains(mesh, [(shape, *pair) for pair in pairs for _ in dtypes], dtypes)


def chains(
    mesh: Mesh,
    pairs: Sequence[tuple[tuple[int, ...], Layout, Layout]],
    dtypes: Sequence[torch.dtype],
) -> Program:
    """One program that moves one value per (shape, source, target)."""
    count, kinds = itertools.count(1), itertools.cycle(dtypes)
    inputs: list[Value] = []
    outputs: list[Value] = []
    instrs: list[Instr] = []
    for shape, source, target in pairs:
        now = Value(next(count), shape, next(kinds), source)
        inputs.append(now)
        for move in plan_moves(source, target):
            after = Value(next(count), shape, now.dtype, move.layout)
            instrs.append(Reshard(move, (now,), (after,), moves=(move,)))
            now = after
        outputs.append(now)
    return Program(mesh, inputs, outputs, instrs)


def buckets_program(mesh: Mesh, axes: Axes, dtypes: Sequence[torch.dtype]) -> Program:
    """One bucket of each kind, of values whose shapes, dims and dtypes differ."""
    inputs: list[Value] = []
    outputs: list[Value] = []
    instrs: list[Instr] = []
    for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "slice", "own"):
        values = list(bucket_values(kind, axes, dtypes, len(inputs)))
        ins, outs, moves = zip(*values, strict=True)
        instrs.append(Reshard(moves[0], ins, outs, moves=moves))
        inputs += ins
        outputs += outs
    return Program(mesh, inputs, outputs, instrs)


def manual_program(mesh: Mesh, dtypes: Sequence[torch.dtype]) -> Program:
    """Moves inside manual regions: permutes, groups in any order, and casts; some in one bucket."""
    count = itertools.count(1)
    inputs: list[Value] = []
    outputs: list[Value] = []
    instrs: list[Instr] = []
    every = [axes for n in (1, 2) for axes in itertools.permutations(mesh.axis_names, n)]
    for axes, held in itertools.product(every, (True, False)):
        layout = Layout(((), ()), varying=mesh.axis_names if held else ())
        for move, shapes in manual_moves(mesh, axes):
            ins = [
                Value(next(count), shapes[0], dtype, layout)
                for dtype in (dtypes if move.reduce == "sum" else dtypes[:1])
            ]
            outs = [Value(next(count), shapes[1], v.dtype, move.layout) for v in ins]
            instrs.append(Reshard(move, tuple(ins), tuple(outs), moves=(move,) * len(ins)))
            inputs += ins
            outputs += outs
    return Program(mesh, inputs, outputs, instrs)


def manual_moves(
    mesh: Mesh, axes: Axes
) -> Iterator[tuple[Move, tuple[tuple[int, int], tuple[int, int]]]]:
    """Moves of an (8, 12) matrix along some axes, with the shapes of operand and result."""
    n, shape, varying = mesh.count(axes), (8, 12), Layout(((), ()), varying=mesh.axis_names)
    shift = tuple((i, (i + 1) % n) for i in range(n))
    for perm in (shift, shift[1:], ((0, 0), (n - 1, 1))[:n], ()):
        yield Move("permute", axes, -1, -1, varying, perm=perm), (shape, shape)
    yield Move("cast", axes, -1, -1, varying), (shape, shape)
    backwards, count = tuple(reversed(range(n))), n // max(n // 2, 1)
    for groups in ((), (backwards,), tuple(backwards[i::count] for i in range(count))):
        size = len(groups[0]) if groups else n
        for reduce in ("sum", "max", "min"):
            yield Move("all_reduce", axes, -1, -1, varying, reduce, (), groups), (shape, shape)
        for kind, dim, to_dim, after in (
            ("all_gather", 1, -1, (8, 12 * size)), ("reduce_scatter", 0, -1, (8 // size, 12)),
            ("all_to_all", 1, 0, (8 // size, 12 * size)),
        ):  # fmt: skip
            yield Move(kind, axes, dim, to_dim, varying, "sum", (), groups), (shape, after)


def bucket_values(
    kind: str, axes: Axes, dtypes: Sequence[torch.dtype], start: int
) -> Iterator[tuple[Value, Value, Move]]:
    """Operand, result and move of each value of a bucket."""
    shapes = ((8, 12), (4, 4, 8), (8, 8), (12, 4, 1)) + (((16,),) if kind != "all_to_all" else ())
    for i, shape in enumerate(shapes):
        rank = len(shape)
        dim, to_dim = (i % 2, (i + 1) % 2) if rank > 1 else (0, -1)
        whole, owed = Layout(((),) * rank), Layout(((),) * rank, axes)
        split, other = (Layout(tuple(axes if k == d else () for k in range(rank)))
                        for d in (dim, to_dim))  # fmt: skip
        before, after = {
            "all_reduce": (owed, whole), "all_gather": (split, whole), "slice": (whole, split),
            "reduce_scatter": (owed, split), "all_to_all": (split, other), "own": (whole, owed),
        }[kind]  # fmt: skip
        number, dtype = 2 * (start + i) + 1, dtypes[i % len(dtypes)]
        move = Move(kind, axes, dim, to_dim if kind == "all_to_all" else -1, after)
        yield Value(number, shape, dtype, before), Value(number + 1, shape, dtype, after), move


def parts_for(program: Program, *, scale: float = 3.0) -> list[list[torch.Tensor]]:
    """Random distinct parts of every input, the same in every process."""
    generator = torch.Generator().manual_seed(0)

    def draw(value: Value) -> torch.Tensor:
        shape = local_shape(value.shape, value.layout, program.mesh)
        numbers = torch.randn(shape, generator=generator) * scale
        if value.dtype == torch.bool:
            return numbers > 1
        unsigned = value.dtype in (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
        return (numbers.abs() if unsigned else numbers).to(value.dtype)

    return [
        [draw(value) for _ in distinct_coordinates(value.layout, program.mesh)]
        for value in program.inputs
    ]

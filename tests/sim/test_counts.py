"""How often a training step communicates, and what: counted, not timed.

Every expectation is the whole bill of one kind, so that a new collective is seen here.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

import pfx
from pfx import P
from pfx.compiler.ir import Compute, LoopInstr, Reshard
from pfx.compiler.memory import is_view
from pfx.compiler.program import Collective, Program
from pfx.compiler.reshard import Move
from pfx.spec import Layout
from tests.common import FAMILIES, Case, cases
from tests.golden.programs import mlp_step

GOLDEN = Path(__file__).parents[1] / "golden"
LAYERS, SEQ, EMBED = 3, 6, 16
SIZES = {"num_layers": LAYERS, "embed_dim": EMBED, "max_seq_len": SEQ}
families = pytest.mark.parametrize("family", FAMILIES)
batches = pytest.mark.parametrize("microbatches", [1, 4])
# Each pair of family, tp and microbatches once, not each three of them.
thrice = pytest.mark.parametrize(
    ("family", "tp", "microbatches"),
    [("gpt", 1, 1), ("gpt", 2, 4), ("llama", 1, 4), ("llama", 2, 1)],
)

Bill = Counter[tuple[str, tuple[int, ...]]]


def case_of(family: str, **plan: Any) -> Case:
    return Case(family, SIZES, plan, "adamw", torch.float32, seq=SEQ)


def program_of(case: Case) -> Program:
    return case.train().lower(case.batch(0))


def bill(program: Program, axis: str) -> Bill:
    """How often each (op, sorted local shape without 1s) runs over one axis; numbers left out."""
    found: Bill = Counter()
    for c in program.collectives():
        if c.axes == (axis,) and c.shape != ():
            found[c.op, shape_of(c)] += c.count
    return found


def shape_of(c: Collective) -> tuple[int, ...]:
    return tuple(sorted(n for n in c.shape if n > 1))


ACTIVATION = (SEQ, EMBED)
TOKENS = (SEQ,)  # one number a token


# Tensor parallelism -------------------------------------------------------------------------------


@families
@batches
def test_tensor_parallel_layers_all_reduce_four_times(family: str, microbatches: int) -> None:
    found = bill(program_of(case_of(family, tp=2, microbatches=microbatches)), "tp")
    in_layers = 4 * LAYERS  # behind attention and mlp, forward; before each, backward
    ends = 2  # the embedding forward, the logits backward
    assert found == {
        ("all_reduce", ACTIVATION): (in_layers + ends) * microbatches,
        # The vocabulary-parallel loss: the maximum, the sum of exponentials, the label's logit.
        ("all_reduce", TOKENS): 3 * microbatches,
    }


@families
@batches
def test_sequence_parallel_layers_gather_and_scatter(family: str, microbatches: int) -> None:
    program = program_of(case_of(family, tp=2, sequence_parallel=True, microbatches=microbatches))
    found = bill(program, "tp")
    # Before attention and mlp: gathered forward, gathered again for the gradient of the weights, and
    # the cotangent of what comes out gathered. Behind them scattered; so is the input's cotangent.
    gathers, scatters = 6 * LAYERS, 4 * LAYERS
    # The logits' operand, and the embedding's cotangent. Scattered: the embedding, the logits' backward.
    expected: dict[Any, int] = {
        ("all_gather", ACTIVATION): (gathers + 2) * microbatches,
        ("reduce_scatter", ACTIVATION): (scatters + 2) * microbatches,
        ("all_reduce", TOKENS): 3 * microbatches,
    }
    if family == "gpt":  # the cotangent of the positions, summed over the batch, is gathered too
        expected["all_gather", ACTIVATION] += microbatches
    # Parameters that every device of tp applies to its part of the sequence: one reduction a step.
    for path, shape in whole_parameters(case_of(family, tp=2)):
        stacked = "blocks" in path
        assert len(shape) == 1 + stacked
        expected["all_reduce", tuple(sorted(shape))] = (
            expected.get(("all_reduce", tuple(sorted(shape))), 0) + 1
        )
    assert found == expected


def whole_parameters(case: Case) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The parameters that tp does not split, but for the table of positions."""
    train = case.train()
    shapes, _ = pfx.tree.flatten_with_path(train.shapes.params)
    specs = pfx.tree.leaves(train.placement.computed, lambda node: isinstance(node, P))
    for (path, leaf), spec in zip(shapes, specs, strict=True):
        if "tp" not in spec and "positions" not in pfx.tree.path_string(path):
            yield pfx.tree.path_string(path), tuple(leaf.shape)


# Data parallelism and ZeRO ----------------------------------------------------------------------


def parameters(case: Case, *, layer: bool) -> Bill:
    """The local shapes of the parameters in the layers (one layer's slice), or of the others."""
    train, found = case.train(), Counter[tuple[str, tuple[int, ...]]]()
    pairs, _ = pfx.tree.flatten_with_path(train.shapes.params)
    specs = pfx.tree.leaves(train.placement.computed, lambda node: isinstance(node, P))
    for (path, leaf), spec in zip(pairs, specs, strict=True):
        shape = list(leaf.shape)
        for dim, entry in enumerate(spec):
            shape[dim] //= train.mesh.shape[entry] if entry else 1
        inside = "blocks" in pfx.tree.path_string(path)
        if inside == layer:
            found[
                pfx.tree.path_string(path), tuple(sorted(n for n in shape[inside:] if n > 1))
            ] += 1
    return found


def times(op: str, shapes: Bill, count: int, *, stacked: bool = False) -> Bill:
    """A bill in which each of the shapes is sent `count` times by one op."""
    found: Bill = Counter()
    for (_, shape), n in shapes.items():
        found[op, tuple(sorted((*shape, LAYERS))) if stacked else shape] += n * count
    return found


@thrice
def test_data_parallel_reduces_a_parameter_once_a_step(
    family: str, tp: int, microbatches: int
) -> None:
    case = case_of(family, dp=2, tp=tp, microbatches=microbatches)
    inside, outside = parameters(case, layer=True), parameters(case, layer=False)
    expected = times("all_reduce", inside, 1, stacked=True) + times("all_reduce", outside, 1)
    assert bill(program_of(case), "dp") == expected


@thrice
def test_zero_1_scatters_a_gradient_and_gathers_a_parameter_once_a_step(
    family: str, tp: int, microbatches: int
) -> None:
    case = case_of(family, dp=2, tp=tp, zero=1, microbatches=microbatches)
    inside, outside = parameters(case, layer=True), parameters(case, layer=False)
    expected: Bill = Counter()
    for op in ("reduce_scatter", "all_gather"):
        expected += times(op, inside, 1, stacked=True) + times(op, outside, 1)
    assert bill(program_of(case), "dp") == expected


@families
@batches
def test_zero_2_scatters_a_gradient_once_a_microbatch(family: str, microbatches: int) -> None:
    case = case_of(family, dp=2, zero=2, microbatches=microbatches)
    inside, outside = parameters(case, layer=True), parameters(case, layer=False)
    expected = times("reduce_scatter", inside, LAYERS * microbatches)
    expected += times("reduce_scatter", outside, microbatches)
    expected += times("all_gather", inside, 1, stacked=True) + times("all_gather", outside, 1)
    assert bill(program_of(case), "dp") == expected


# What a layer adds to its result needs no value in the backward loop, so it is gathered only once.
ONLY_FORWARD = ("['bqkv']", "['bo']", "['b_up']", "['b_down']")


@pytest.mark.parametrize(
    ("family", "plan", "microbatches"),
    [("gpt", {}, 1), ("gpt", {"tp": 2}, 4), ("gpt", {"tp": 2, "sequence_parallel": True}, 1),
     ("llama", {}, 4), ("llama", {"tp": 2}, 1),
     ("llama", {"tp": 2, "sequence_parallel": True}, 4)],
    ids=str,
)  # fmt: skip
def test_zero_3_gathers_a_layer_twice_and_scatters_its_gradient_once(
    family: str, plan: Mapping[str, Any], microbatches: int
) -> None:
    case = case_of(family, dp=2, zero=3, microbatches=microbatches, **plan)
    inside, outside = parameters(case, layer=True), parameters(case, layer=False)
    once = Counter({key: n for key, n in inside.items() if key[0].endswith(ONLY_FORWARD)})
    expected = times("all_gather", inside - once, 2 * LAYERS * microbatches)
    expected += times("all_gather", once, LAYERS * microbatches)
    expected += times("reduce_scatter", inside, LAYERS * microbatches)
    expected += times("all_gather", outside, microbatches)
    expected += times("reduce_scatter", outside, microbatches)
    assert bill(program_of(case), "dp") == expected


@families
def test_one_device_sends_nothing(family: str) -> None:
    assert program_of(case_of(family, microbatches=2)).collectives() == []


@families
def test_numbers_travel_together(family: str) -> None:
    """The squares of all gradients that one group holds parts of are reduced in one message."""
    program = program_of(case_of(family, dp=2, tp=2, zero=1))
    numbers = [c for c in program.collectives() if c.shape == () and "add" in c.reason]
    assert len(numbers) > 8
    assert len({c.bucket for c in numbers}) == len({c.axes for c in numbers})


# Nothing is reduced whole to be cut ------------------------------------------------------------------


def wasteful(program: Program) -> Iterator[str]:
    """The all-reduces and gathers all of whose readers only slice the result along the same axes.

    What a constraint asks for is not counted: it says "whole" for a dim that does not divide.
    """
    readers: dict[int, list[Any]] = {}
    for instr in program.instrs:
        for value in instr.ins:
            readers.setdefault(value.number, []).append(instr)
    kept = {value.number for value in program.outputs}

    def cuts(reader: Any, axes: tuple[str, ...]) -> bool:
        if isinstance(reader, Reshard):
            return reader.move.kind == "slice" and set(reader.move.axes) <= set(axes)
        views = isinstance(reader, Compute) and is_view(reader.target)
        return views and all(only_cut(out.number, axes) for out in reader.outs if out is not None)

    def only_cut(number: int, axes: tuple[str, ...]) -> bool:
        read = readers.get(number, [])
        return number not in kept and bool(read) and all(cuts(reader, axes) for reader in read)

    for instr in program.instrs:
        if isinstance(instr, LoopInstr):
            yield from wasteful(instr.body)
        elif isinstance(instr, Reshard) and instr.move.kind in ("all_reduce", "all_gather"):
            whys = instr.reasons or ((instr.source, instr.reason),)
            for out, (_, reason) in zip(instr.outs, whys, strict=True):
                if not reason.startswith("constrain") and only_cut(out.number, instr.move.axes):
                    yield f"{instr.move.kind} over {instr.move.axes} of {out.type}: {reason}"


def repeated(program: Program) -> Iterator[str]:
    """Collectives that bring one value to one layout twice."""
    seen: set[Any] = set()
    for instr in program.instrs:
        if isinstance(instr, LoopInstr):
            yield from repeated(instr.body)
        elif isinstance(instr, Reshard) and instr.communicates:
            for before, after in zip(instr.ins, instr.outs, strict=True):
                if (before.number, after.layout) in seen:
                    yield f"{instr.move.kind} of {before.type} to {after.type}: {instr.reason}"
                seen.add((before.number, after.layout))


@pytest.mark.timeout(300)  # many compilations
@hypothesis.given(cases(max_devices=8))
@hypothesis.settings(max_examples=6)
def test_nothing_is_communicated_to_be_thrown_away(case: Case) -> None:
    program = program_of(case)
    assert list(wasteful(program)) == []
    assert list(repeated(program)) == []


def test_the_checker_sees_waste() -> None:
    """A program in which the sum is reduced whole, and then one part of it kept."""
    x = torch.ones(4, 2)
    reduce = lambda x: pfx.constrain(x.sum(0), P()) + 0
    step = pfx.jit(reduce, mesh=pfx.make_mesh(d=2), in_specs=P("d"), out_specs=P("d"))
    (all_reduce,) = [i for i in step.lower(x).instrs if isinstance(i, Reshard) and i.communicates]
    bad = replace(step.lower(x), instrs=[replace(all_reduce, reason="an operand of mul")])
    (after,) = all_reduce.outs
    move = Move("slice", ("d",), 0, -1, Layout((("d",),)))
    out = replace(after, number=after.number + 1, layout=move.layout)
    bad.instrs.append(Reshard(move, (after,), (out,)))
    assert list(wasteful(bad)) == ["all_reduce over ('d',) of f32[2]: an operand of mul"]
    bad.instrs.append(replace(all_reduce, outs=(replace(after, number=-1),)))
    assert len(list(repeated(bad))) == 1


# Golden text --------------------------------------------------------------------------------------


def golden(name: str, text: str) -> None:
    """Compare with a file. To write it anew: PFX_REGENERATE=1 pytest tests/sim/test_counts.py"""
    path = GOLDEN / name
    if os.environ.get("PFX_REGENERATE"):
        path.write_text(text + "\n")
    assert text + "\n" == path.read_text(), f"{path} differs; see how to write it anew in `golden`"


def test_golden_program() -> None:
    shapes = {"w_up": pfx.ShapeDtype((8, 32)), "w_down": pfx.ShapeDtype((32, 8))}
    specs = {"w_up": P(None, "tp"), "w_down": P("tp")}
    mesh = pfx.make_mesh(dp=2, tp=4)
    step = pfx.jit(mlp_step, mesh=mesh, in_specs=(specs, P("dp")), out_specs=specs)
    golden("mlp_step.txt", step.lower(shapes, pfx.ShapeDtype((16, 8))).text())


@families
def test_golden_bill(family: str) -> None:
    case = case_of(family, dp=2, tp=2, zero=3, sequence_parallel=True, microbatches=2)
    lines = [
        f"{c.op} {','.join(c.axes)} {c.dtype}{list(c.shape)} {c.bytes} B x{c.count}  {c.reason}"
        for c in program_of(case).collectives()
    ]
    golden(f"bill_{family}.txt", "\n".join(lines))

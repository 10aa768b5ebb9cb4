"""Elementwise calls are reordered leaf by leaf: the same calls, each after what it reads."""

from __future__ import annotations

from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

import pfx
from pfx import optim
from pfx.compiler.ir import Block, Compute, Value
from pfx.compiler.order import finish_each_chain
from pfx.spec import Layout

MESH = pfx.make_mesh(x=2)
aten = torch.ops.aten


@st.composite
def blocks(draw: st.DrawFn) -> Block:
    """Straight-line programs of tensors, numbers made of tensors, and products that stay in place."""
    tensor = lambda n: Value(n, (2, 2), torch.float32, Layout(((), ())))
    number = lambda n: Value(n, (), torch.float32, Layout(()))
    inputs = [tensor(n) for n in range(draw(st.integers(1, 4)))] + [number(9)]
    values, instrs = list(inputs), []
    for n in range(10, 10 + draw(st.integers(0, 25))):
        a, b = draw(st.sampled_from(values)), draw(st.sampled_from(values))
        kind = draw(st.sampled_from(["mul", "mul", "mul", "sum", "mm"]))
        if kind == "mm" and a.shape and b.shape:
            call = (aten.mm.default, (a, b), tensor(n))
        elif kind == "sum" and a.shape:
            call = (aten.sum.default, (a,), number(n))
        else:
            call = (aten.mul.Tensor, (a, b), tensor(n) if a.shape or b.shape else number(n))
        target, args, out = call
        instrs.append(Compute(target, args, {}, tuple(dict.fromkeys(args)), (out,)))
        values.append(out)
    return Block(MESH, inputs, values[-1:], instrs)


@hypothesis.given(blocks())
@hypothesis.settings(max_examples=200)
def test_the_same_calls_each_after_what_it_reads(block: Block) -> None:
    before = list(block.instrs)
    finish_each_chain(block)
    assert sorted(map(id, block.instrs)) == sorted(map(id, before))
    known = {value.number for value in block.inputs}
    for instr in block.instrs:
        assert {value.number for value in instr.ins} <= known
        known |= {value.number for value in instr.outs}
    stay = [i for i, instr in enumerate(before) if instr.target is aten.mm.default]
    assert [block.instrs[i] for i in stay] == [before[i] for i in stay]


def leaves_in_turn(transform: optim.GradientTransformation) -> list[str]:
    """The leaf that each call on tensors works on, without repeats."""

    def update(params: Any, state: Any, grads: Any) -> Any:
        updates, state = transform.update(grads, state, params)
        return optim.apply_updates(params, updates), state

    shapes = {"a": (2, 3), "b": (3, 4), "c": (4, 5)}
    params = {name: torch.ones(shape) for name, shape in shapes.items()}
    program = pfx.jit(update, mesh=MESH).lower(params, transform.init(params), params)
    names = {shape: name for name, shape in shapes.items()}
    seen = [
        names[value.shape]
        for instr in program.instrs
        for value in instr.outs[:1]
        if value is not None and value.shape in names
    ]
    return [name for i, name in enumerate(seen) if i == 0 or seen[i - 1] != name]


@pytest.mark.parametrize("name", ["lion", "lamb", "adafactor", "ema"])
def test_an_optimizer_finishes_each_leaf(name: str) -> None:
    transform = {
        "lion": lambda: optim.lion(0.1),
        "lamb": lambda: optim.lamb(0.1, axes=None),
        "adafactor": lambda: optim.adafactor(0.1, axes=None),
        "ema": lambda: optim.chain(optim.sgd(0.1, momentum=0.9), optim.ema(0.9)),
    }[name]()
    assert leaves_in_turn(transform) == ["a", "b", "c"]


def test_after_a_norm_of_all_leaves_comes_each_leaf_again() -> None:
    clipped = optim.chain(optim.clip_by_global_norm(1.0), optim.lion(0.1))
    assert leaves_in_turn(clipped)[-3:] == ["a", "b", "c"]

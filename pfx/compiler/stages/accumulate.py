"""Gradients are added up where they are made: a loop over layers adds each layer's to its row of the sum.

A loop that stacks what its iterations make writes all of it, and adding the stack to a sum reads it
again and writes the sum. Instead the sum goes into the loop, row by row, and a product of matrices is
added to it as it is computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from pfx.compiler.in_place import add_product_to, add_to
from pfx.compiler.ir import Compute, Instr, LoopInstr, Value

aten = torch.ops.aten
Made = tuple[int, Value]  # an output of the pipeline, and the value that is added to it
_RESHAPES = (aten.reshape.default, aten.view.default, aten._unsafe_view.default)


def add_in_loops(
    instrs: Sequence[Instr],
    makes: Sequence[Made],
    dtypes: Mapping[int, torch.dtype],
    left: Sequence[Value],
    fresh: Callable[[Value], Value],
) -> tuple[list[Instr], list[Made], list[Made]]:
    """Let loops over layers add what they make of a pipeline's outputs to the sums themselves.

    Args:
        makes: the outputs that a phase makes, of which some are stacks that a loop makes.
        dtypes: of the outputs that are sums.
        left: what else is read of the phase: a stack among it is made as such.
        fresh: a new value like the one given, under a number of its own.

    Returns:
        The instructions; what is still made; and for every sum that goes in, its output and value.
    """
    uses = Counter(v.number for instr in instrs for v in instr.ins)
    uses.update(v.number for v in (*left, *(v for _, v in makes)))
    sums = {v.number: i for i, v in makes if i in dtypes and uses[v.number] == 1}
    out: list[Instr] = []
    added: dict[int, Made] = {}
    for instr in instrs:
        if isinstance(instr, LoopInstr) and instr.axis:
            totals = {
                v.number: replace(fresh(v), dtype=dtypes[sums[v.number]])
                for v in instr.outs[instr.num_carry :]
                if v.number in sums
            }
            added |= {number: (sums[number], total) for number, total in totals.items()}
            instr = _adding(instr, totals) if totals else instr
        out.append(instr)
    return out, [(i, v) for i, v in makes if v.number not in added], list(added.values())


def _adding(loop: LoopInstr, totals: Mapping[int, Value]) -> LoopInstr:
    """A loop that adds some of its ys to the rows of sums, which it is given as further xs."""
    c, x_end, body = loop.num_carry, loop.num_carry + loop.num_xs, loop.body
    pairs = list(zip(loop.outs[c:], body.outputs[c:], strict=True))
    kept = [(out, made) for out, made in pairs if out.number not in totals]
    given = [(totals[out.number], made) for out, made in pairs if out.number in totals]
    number = 1 + max(v.number for v in (*body.inputs, *_made(body.instrs)))
    instrs, rows = list(body.instrs), []
    outputs = Counter(v.number for v in body.outputs)
    for k, (total, made) in enumerate(given):
        row = replace(made, number=number + 2 * k, dtype=total.dtype)
        after = replace(row, number=row.number + 1)
        instrs = _with_addition(instrs, made, row, after, outputs)
        rows.append(row)
    body = replace(
        body,
        inputs=[*body.inputs[:x_end], *rows, *body.inputs[x_end:]],
        outputs=[*body.outputs[:c], *(made for _, made in kept)],
        instrs=instrs,
    )
    return replace(
        loop,
        body=body,
        num_xs=loop.num_xs + len(rows),
        ins=(*loop.ins[:x_end], *(total for total, _ in given), *loop.ins[x_end:]),
        outs=(*loop.outs[:c], *(out for out, _ in kept)),
    )


def _with_addition(
    instrs: Sequence[Instr], made: Value, row: Value, after: Value, outputs: Mapping[int, int]
) -> list[Instr]:
    """The instructions, with the addition of a value to a row; of a product, in its place."""
    makers = {v.number: instr for instr in instrs for v in instr.outs if v is not None}
    readers = Counter(v.number for instr in instrs for v in instr.ins) + Counter(outputs)
    now, chain = made, [makers.get(made.number)]
    while readers[now.number] == 1 and isinstance(chain[-1], Compute):
        maker = chain[-1]
        if maker.target is aten.mm.default and made.dtype == row.dtype:
            a, b = maker.args
            call = Compute(add_product_to, (row, a, b), {}, (row, *maker.ins), (after,),
                           over=(0,))  # fmt: skip
            gone = {id(instr) for instr in chain[:-1]}
            return [call if i is maker else i for i in instrs if id(i) not in gone]
        if maker.target not in _RESHAPES:
            break
        now = maker.ins[0]
        chain.append(makers.get(now.number))
    return [*instrs, Compute(add_to, (row, made), {}, (row, made), (after,), over=(0,))]


def _made(instrs: Sequence[Instr]) -> list[Value]:
    return [out for instr in instrs for out in instr.outs if out is not None]

"""Cut instructions into pieces that run one after the other: each does what its outputs need.

What an earlier piece has made is handed over, except what costs nothing to make again: a view, a
constant, and a parameter that was gathered from its shards, which would else be held in between.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from pfx.compiler.ir import Compute, Instr, LoopInstr, Reshard, Value, is_view


@dataclass(frozen=True)
class Piece:
    """Some instructions, the values they read but do not make, and those they leave for later."""

    instrs: tuple[Instr, ...]
    ins: tuple[Value, ...]
    left: tuple[Value, ...]


def cut(
    instrs: Sequence[Instr], inputs: Iterable[Value], outputs: Sequence[Sequence[Value]]
) -> list[Piece]:
    """Cut instructions into a piece for each group of outputs; what none of them needs is dropped."""
    again = _made_again(instrs, {value.number for value in inputs})
    owner: dict[int, int] = {}
    pieces: list[tuple[list[Instr], dict[int, Value]]] = []
    for piece, wanted in enumerate(outputs):
        needed = {value.number: value for value in wanted}
        mine: list[Instr] = []
        for k in reversed(range(len(instrs))):
            made = [out.number for out in instrs[k].outs if out is not None]
            earlier = k in owner and k not in again
            if earlier or not any(number in needed for number in made):
                continue
            owner.setdefault(k, piece)
            mine.append(instrs[k])
            for number in made:
                needed.pop(number, None)
            needed |= {value.number: value for value in instrs[k].ins}
        pieces.append((mine[::-1], needed))
    return [_piece(i, pieces) for i in range(len(pieces))]


def _piece(index: int, pieces: Sequence[tuple[list[Instr], dict[int, Value]]]) -> Piece:
    instrs, needed = pieces[index]
    later = {number for _, needs in pieces[index + 1 :] for number in needs}
    made = [out for instr in instrs for out in instr.outs if out is not None]
    ins = sorted(needed.values(), key=lambda value: value.number)
    return Piece(tuple(instrs), tuple(ins), tuple(v for v in made if v.number in later))


def _made_again(instrs: Sequence[Instr], inputs: set[int]) -> set[int]:
    """The instructions that each piece runs for itself."""
    near = set(inputs)  # inputs, their views, and what was gathered from them
    found: set[int] = set()
    for k, instr in enumerate(instrs):
        from_inputs = all(value.number in near for value in instr.ins)
        if isinstance(instr, Compute):
            cheap = not instr.ins or is_view(instr.target)
        else:
            cheap = isinstance(instr, Reshard) and from_inputs
        if cheap:
            found.add(k)
            if from_inputs:
                near |= {out.number for out in instr.outs if out is not None}
    return found


def split_loop(loop: LoopInstr, number: int) -> tuple[LoopInstr, LoopInstr]:
    """Split a loop into one for its carry, and one for its ys that reads what the first has left.

    Args:
        number: new values are numbered from here on.
    """
    c, body = loop.num_carry, loop.body
    carry, ys = body.outputs[:c], body.outputs[c:]
    first, second = cut(body.instrs, body.inputs[c:], [carry, ys])
    began = {value.number for value in body.inputs[:c]}
    left = [*first.left, *(v for v in second.ins if v.number in began)]
    stacks = [_stacked(v, loop.length, number + i) for i, v in enumerate(left)]
    chain = _loop(loop, first, c, [], (*carry, *left), (*loop.outs[:c], *stacks))
    given = list(zip(left, stacks, strict=True))
    return chain, _loop(loop, second, 0, given, ys, loop.outs[c:])


def _loop(
    loop: LoopInstr,
    piece: Piece,
    num_carry: int,
    given: Sequence[tuple[Value, Value]],
    outputs: Sequence[Value],
    outs: Sequence[Value],
) -> LoopInstr:
    """A loop over a piece of another's body, with `given` (row, stack) as further xs."""
    x_end = loop.num_carry + loop.num_xs
    reads = {v.number for v in piece.ins} - {row.number for row, _ in given}
    pairs = list(zip(loop.body.inputs, loop.ins, strict=True))
    used = lambda some: [pair for pair in some if pair[0].number in reads]
    xs = [*used(pairs[loop.num_carry : x_end]), *given]
    operands = [*pairs[:num_carry], *xs, *used(pairs[x_end:])]
    body = replace(
        loop.body,
        inputs=[inner for inner, _ in operands],
        outputs=list(outputs),
        instrs=list(piece.instrs),
    )
    ins = tuple(outer for _, outer in operands)
    return replace(loop, body=body, num_carry=num_carry, num_xs=len(xs), ins=ins, outs=tuple(outs))


def _stacked(value: Value, length: int, number: int) -> Value:
    """The stack of what the iterations of a loop make."""
    layout = value.layout.stacked()
    return Value(number, (length, *value.shape), value.dtype, layout, value.role)

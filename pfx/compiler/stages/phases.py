"""A stage's share cut into phases: forward, backward, and the backward in halves.

All phases of a stage agree on what is left between them, so a schedule may give each microbatch a
whole backward or two halves.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from pfx.compiler.ir import Block, Instr, Phase, Stage, Value, streams_of
from pfx.compiler.passes import bucket_collectives
from pfx.compiler.pipeline.primitive import EACH, FIRST, LAST, SHARE
from pfx.compiler.reuse import reuse_buffers
from pfx.compiler.stages.accumulate import Made, add_in_loops
from pfx.compiler.stages.cut import Piece, cut, split_loop
from pfx.compiler.stages.share import Share, owned


def stage_of(share: Share, kinds: Collection[str], bucket_bytes: int) -> Stage:
    """Cut a stage into the phases that its schedule runs."""
    ends = _Ends.of(share)
    pieces, rows = _pieces(share, ends, kinds)
    phases = {
        kind: _phase(share, pieces[kind], ends.sends[kind], ends.makes[kind], rows, bucket_bytes)
        for kind in pieces
        if kind in kinds
    }
    at = share.layers
    return Stage(at.device, at.start, at.stop, at.rows, phases, share.receives)


@dataclass(frozen=True)
class _Ends:
    """For each kind of phase, what it sends and what it makes of the pipeline's outputs."""

    sends: Mapping[str, tuple[Value, ...]]
    makes: Mapping[str, tuple[Made, ...]]

    @classmethod
    def of(cls, share: Share) -> _Ends:
        carries = [loop.outs[: loop.num_carry] for loop in share.loops]
        to_next = () if share.layers.last else carries[0]
        to_previous = () if share.layers.first else carries[-1]
        backward = _made(share, forward=False)
        return cls(
            {"F": to_next, "B": to_previous, "I": to_previous, "W": ()},
            {"F": _made(share, forward=True), "B": backward, "I": (), "W": backward},
        )

    def values(self, kind: str) -> list[Value]:
        return [*self.sends[kind], *(value for _, value in self.makes[kind])]


def _made(share: Share, *, forward: bool) -> tuple[Made, ...]:
    """The outputs of the pipeline that a stage makes, in one of its passes."""
    some, first, last = bool(len(share.layers)), share.layers.first, share.layers.last
    here = {EACH: some, SHARE: some, FIRST: first, LAST: last}
    alone = len(share.loops) == 1
    outputs = zip(share.instr.made.outputs, share.outputs, strict=True)
    return tuple(
        (i, value)
        for i, (output, value) in enumerate(outputs)
        if here[output.home] and (alone or output.forward) == forward
    )


def _pieces(share: Share, ends: _Ends, kinds: Collection[str]) -> tuple[dict[str, Piece], set[int]]:
    """The instructions of each phase, and the values that go from one to another row by row."""
    wanted = {kind: ends.values(kind) for kind in "FBIW"}
    wanted["I"] = list(share.loops[-1].outs[: share.loops[-1].num_carry])
    cuts = {"F": share.instrs}
    if len(share.loops) == 2:
        cuts = {"FB": share.instrs}
        if not {"I", "W"}.isdisjoint(kinds):
            cuts["FIW"] = _halved(share)
    pieces: dict[str, Piece] = {}
    rows: set[int] = set()
    left: dict[int, Value] = {}
    for names, instrs in cuts.items():
        found = cut(instrs, share.inputs, [wanted[kind] for kind in names])
        left |= {value.number: value for value in found[0].left}
        pieces |= dict(zip(names, found, strict=True))
        rows |= streams_of(instrs, [*wanted["F"], *wanted["B"]])
    pieces["F"] = replace(pieces["F"], left=tuple(left[number] for number in sorted(left)))
    return pieces, rows


def _halved(share: Share) -> list[Instr]:
    """The instructions with the backward loop split in two."""
    chain, weights = split_loop(share.loops[1], share.count + 1)
    share.count += len(chain.outs)
    halves = [[chain, weights] if i is share.loops[1] else [i] for i in share.instrs]
    return [instr for some in halves for instr in some]


def _phase(
    share: Share,
    piece: Piece,
    sends: Sequence[Value],
    makes: Sequence[Made],
    rows: Collection[int],
    bucket_bytes: int,
) -> Phase:
    """A piece as a block of its own."""
    dtypes = {i: o.dtype for i, o in enumerate(share.instr.made.outputs) if o.summed}
    left = (*sends, *piece.left)
    instrs, makes, adds = add_in_loops(piece.instrs, makes, dtypes, left, share.fresh)
    outputs = {v.number: v for v in (*left, *(v for _, v in makes))}
    inputs = [*piece.ins, *(v for _, v in adds)]
    block = Block(share.instr.body.mesh, inputs, list(outputs.values()), owned(instrs))
    block.rows = frozenset(v.number for v in (*piece.ins, *piece.left) if v.number in rows)
    bucket_collectives(block, bucket_bytes)
    reuse_buffers(block)
    return Phase(block, tuple(sends), tuple(makes), tuple(adds))

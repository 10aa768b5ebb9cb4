"""A block as a Python function of its own: one line for each instruction, one local for each value.

Looking values up and calling through closures costs about two microseconds an instruction, which is
what a small op takes; a generated function calls the op itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from pfx.compiler.in_place import as_marked
from pfx.compiler.ir import Block, Compute, Instr, Value, last_uses
from pfx.runtime.local import function_of

Run = Callable[[list[torch.Tensor]], list[torch.Tensor]]


def block_function(
    block: Block,
    run_of: Callable[[Instr], Run],
    offset_of: Callable[[Compute], tuple[int, ...]],
) -> Run:
    """Generate the function of a block: from the list of its inputs, which it empties, to its outputs.

    Args:
        run_of: makes an instruction that is no local call a function of its operands.
        offset_of: gives the global index at which a call's part begins, if the call asks.
    """
    writer = _Writer()
    writer.line(f"[{', '.join(map(_name, block.inputs))}] = ins")
    writer.line("ins.clear()")
    for instr, dead in zip(block.instrs, last_uses(block.instrs, block.outputs), strict=True):
        if isinstance(instr, Compute):
            writer.line(writer.compute(instr, offset_of))
        else:
            run = writer.bound(run_of(instr))
            ins = ", ".join(map(_name, instr.ins))
            writer.line(f"[{', '.join(map(_name, instr.outs))}] = {run}([{ins}])")
        if dead:
            writer.line(f"{' = '.join(f'v{number}' for number in dead)} = None")
    writer.line(f"return [{', '.join(map(_name, block.outputs))}]")
    return writer.function()


class _Writer:
    """The lines of a function, and what they mention that cannot be written."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.names: dict[str, Any] = {}

    def line(self, text: str) -> None:
        self.lines.append(f"    {text}")

    def bound(self, thing: Any) -> str:
        """A name for an object."""
        name = f"k{len(self.names)}"
        self.names[name] = thing
        return name

    def compute(self, instr: Compute, offset_of: Callable[[Compute], tuple[int, ...]]) -> str:
        """The line of a local call, over a dying operand where the instruction says so."""
        args = [self.written(arg) for arg in instr.args]
        args += [f"{key}={self.written(arg)}" for key, arg in instr.kwargs.items()]
        target, marks = as_marked(instr)
        args += [f"{key}={self.written(mark)}" for key, mark in marks.items()]
        if instr.offset:
            args.append(f"offset={self.written(offset_of(instr))}")
        outs = ", ".join(map(_name, instr.outs))
        made = f"[{outs}]" if instr.many else outs
        return f"{made} = {self.bound(function_of(target))}({', '.join(args)})"

    def written(self, arg: Any) -> str:
        """An argument as an expression."""
        if isinstance(arg, Value):
            return _name(arg)
        if isinstance(arg, (list, tuple)):
            items = ", ".join(map(self.written, arg))
            return f"[{items}]" if isinstance(arg, list) else f"({items}{',' if arg else ''})"
        if isinstance(arg, dict):
            return f"{{{', '.join(f'{k!r}: {self.written(v)}' for k, v in arg.items())}}}"
        finite = type(arg) is float and math.isfinite(arg)
        if arg is None or type(arg) in (int, bool, str) or finite:
            return repr(arg)
        return self.bound(arg)

    def function(self) -> Run:
        """Compile the lines."""
        source = "\n".join(["def block(ins):", *self.lines])
        exec(compile(source, "<a pfx block>", "exec"), self.names)
        return self.names["block"]


def _name(value: Value | None) -> str:
    return "_" if value is None else f"v{value.number}"

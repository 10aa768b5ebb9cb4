"""`memory`: what fills one device at the moment when most is in use, as bars or as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pfx.viz import figure as fig
from pfx.viz.bars import stacked_bars
from pfx.viz.units import Programs, bytes_text, named_programs, table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# From what stays to what comes and goes; a role keeps its colour in every picture.
ROLES = {
    "parameters": fig.LIGHT[0],
    "optimizer state": fig.LIGHT[1],
    "gradients": fig.LIGHT[3],
    "gathered copies": fig.LIGHT[4],
    "activations": fig.LIGHT[2],
    "inputs": fig.GREY,
}


def _by_role(program: Any) -> dict[str, int]:
    """Bytes at the peak in the order of `ROLES`, roles unknown to it last."""
    found = dict(program.memory().at_peak)
    known = {role: found.pop(role) for role in ROLES if found.get(role)}
    return known | {role: size for role, size in sorted(found.items()) if size}


def memory_text(programs: Programs) -> str:
    """List the bytes that one device holds at the peak of a step, by role.

    Args:
        programs: a `Program`, or a list of (name, program) to compare.

    Raises:
        TypeError: it is neither.

    >>> import torch
    >>> from pfx.api import jit
    >>> from pfx.mesh import make_mesh
    >>> from pfx.spec import P
    >>> step = jit(torch.mul, mesh=make_mesh(dp=2), in_specs=(P("dp"), P("dp")))
    >>> print(memory_text(step.lower(torch.ones(64), torch.ones(64))))
    activations  128 B
    inputs       256 B
    peak         384 B
    """
    pairs = named_programs(programs, "viz.memory_text")
    columns = [_by_role(program) for _, program in pairs]
    peaks = [bytes_text(program.memory().peak) for _, program in pairs]
    roles = dict.fromkeys([r for r in ROLES if any(r in c for c in columns)])
    roles |= dict.fromkeys(role for column in columns for role in column)
    rows = [[role, *(bytes_text(c[role]) if role in c else "–" for c in columns)] for role in roles]
    head = [["", *(name for name, _ in pairs)]] if any(name for name, _ in pairs) else []
    return table([*head, *rows, ["peak", *peaks]], "<" + ">" * len(pairs))


def memory(programs: Programs) -> Figure:
    """Draw the bytes that one device holds at the peak of a step: one bar a program, cut by role.

    Every device of a mesh runs the same program on parts of the same size, so one bar stands for
    all of them; but for the stages of a pipeline, of which it is the fullest device's.

    Args:
        programs: a `Program`, or a list of (name, program) to compare.

    Returns:
        A `matplotlib.figure.Figure` with one axes.

    Raises:
        TypeError: it is neither.
        ImportError: matplotlib is not installed.

    >>> import torch
    >>> from pfx.api import jit
    >>> from pfx.mesh import make_mesh
    >>> from pfx.spec import P
    >>> step = jit(torch.mul, mesh=make_mesh(dp=2), in_specs=(P("dp"), P("dp")))
    >>> figure = memory([("dp=2", step.lower(torch.ones(64), torch.ones(64)))])
    >>> [text.get_text() for text in figure.axes[0].texts]
    ['128', '256', '384 B']
    """
    pairs = named_programs(programs, "viz.memory")
    bars = [(name, _by_role(program), bytes_text(program.memory().peak)) for name, program in pairs]
    return stacked_bars("viz.memory", "memory of one device at its peak", bars, ROLES)

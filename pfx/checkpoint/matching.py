"""What a restore asks for against what a step holds: by path, strictly, all differences at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pfx import tree
from pfx.array import Array, ShapeDtype
from pfx.checkpoint.manifest import Leaf
from pfx.checkpoint.values import DTYPES, TENSOR_KINDS, python_kind
from pfx.errors import CheckpointError, message
from pfx.spec import dtype_name


@dataclass(frozen=True)
class Form:
    """The form of a leaf that is asked for; of a Python value only its kind."""

    kind: str
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None

    def text(self) -> str:
        """``f32[8, 4]``, or the kind of a Python value."""
        if self.dtype is None:
            return self.kind
        return f"{dtype_name(self.dtype)}[{', '.join(map(str, self.shape))}]"


def form_of(leaf: Any, where: str) -> Form:
    """The form that a leaf of `like` asks for.

    Raises:
        CheckpointError: it is no such leaf.
    """
    kind = python_kind(leaf)
    if kind is not None:
        return Form(kind)
    if isinstance(leaf, (np.ndarray, np.generic)):
        try:
            dtype = torch.from_numpy(np.empty(0, leaf.dtype.newbyteorder("="))).dtype
            return Form("numpy", tuple(leaf.shape), dtype)
        except TypeError:
            pass
    elif isinstance(leaf, (torch.Tensor, Array, ShapeDtype)):
        return Form("tensor", tuple(leaf.shape), leaf.dtype)
    raise CheckpointError(
        message(
            where,
            f"asks for a {type(leaf).__name__}, which no checkpoint holds.",
            fix="use pfx.ShapeDtype, a tensor, an Array, a numpy array or a plain Python value",
        )
    )


def matched(
    asked: Sequence[tuple[tree.Path, Form]],
    saved: Sequence[Leaf],
    where: str,
    *,
    cast: bool,
    partial: bool,
) -> list[Leaf]:
    """The saved leaf for each form that is asked for, found by its path.

    Raises:
        CheckpointError: with a line for each leaf that is missing, unexpected, or of another form.
    """
    known = {leaf.path: leaf for leaf in saved}
    found = [(path, form, known.pop(path, None)) for path, form in asked]
    lines, fixes = [], []
    for path, form, leaf in found:
        wrong = _difference(form, leaf, cast=cast)
        if wrong:
            lines.append(f"{_named(path)}: {wrong}")
            fixes.append(_fix(form, leaf))
    if not partial:
        lines += [f"{_named(path)}: unexpected: {leaf.text()} is saved, nothing is asked for"
                  for path, leaf in known.items()]  # fmt: skip
        fixes += [_ASK] * len(known)
    if lines:
        fix = "; ".join(dict.fromkeys(filter(None, fixes)))
        raise CheckpointError(message(where, "does not hold what is asked for.", *lines, fix=fix))
    return [leaf for _, _, leaf in found if leaf is not None]


_ASK = "ask for every saved leaf, or partial=True to leave the others unread"


def _difference(form: Form, leaf: Leaf | None, *, cast: bool) -> str:
    if leaf is None:
        return f"missing: {form.text()} is asked for, nothing is saved"
    saved = _form(leaf)
    casts = cast and saved.dtype is not None and form.dtype is not None
    same = (saved.shape, saved.dtype if not casts else form.dtype, saved.kind)
    wanted = (form.shape, form.dtype, form.kind if form.dtype is None else "tensor")
    return "" if same == wanted else f"{saved.text()} is saved, {form.text()} is asked for"


def _fix(form: Form, leaf: Leaf | None) -> str:
    if leaf is None or _form(leaf).shape != form.shape:
        return ""
    both = form.dtype is not None and leaf.kind in TENSOR_KINDS
    return "cast=True to convert dtypes" if both else ""


def _form(leaf: Leaf) -> Form:
    if leaf.kind in TENSOR_KINDS:
        return Form("tensor", leaf.shape, DTYPES[leaf.dtype])
    return Form(leaf.kind)


def _named(path: tree.Path) -> str:
    return tree.path_string(path) or "the tree"


def by_path(leaves: Sequence[Leaf], values: Sequence[Any]) -> Mapping[str, Any]:
    """Values under the text of their paths."""
    return {_named(leaf.path): value for leaf, value in zip(leaves, values, strict=True)}

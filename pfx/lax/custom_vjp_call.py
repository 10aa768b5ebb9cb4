"""One call of a `custom_vjp` function as a primitive: its three functions traced, and checked.

The function, its forward and its backward rule become graphs over flat operands. A rule may call its
own function (a forward rule often does): that inner call is a primitive too, whose own rules are
traced only when a second derivative meets it, or tracing would never end.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pfx import _torch, tree
from pfx.errors import TraceError, message
from pfx.lax.body import Body, cotangent_meta, is_differentiable, trace_body
from pfx.lax.custom_vjp_rule import CustomRule, DeferredRule, check_cotangent, form


@dataclass(frozen=True, eq=False)
class Rules:
    """A function with the two halves of its derivative."""

    name: str
    fn: Callable[..., Any]
    fwd: Callable[..., Any]
    bwd: Callable[..., Any]

    @property
    def where(self) -> str:
        """How errors call the function."""
        return f"custom_vjp({self.name})"


# The functions whose rules are being traced.
_TRACING: contextvars.ContextVar[frozenset[Rules]] = contextvars.ContextVar(
    "custom_vjp", default=frozenset()
)


@dataclass(frozen=True)
class Arguments:
    """The arguments of one call, and what errors call them."""

    values: tuple[Any, ...]
    names: list[str]
    static: list[int]  # positions of those that are no tensors
    leaves: list[torch.Tensor]  # of the others
    labels: list[str]  # of the leaves
    treedef: tree.TreeDef  # of a dict from position to argument


class Call:
    """The three functions of one call as graphs over flat operands, checked against each other."""

    def __init__(self, rules: Rules, arguments: Arguments) -> None:
        self.rules, self.where = rules, rules.where
        self.arguments, self.leaves = arguments, arguments.leaves
        self.out_def = self.res_def = tree.LEAF
        self.res_leaves: list[Any] = []  # what is no tensor is kept as it is
        self.primal, self.closed = trace_body(self._primal, self.leaves)

    def primitive(self) -> tuple[CustomRule | DeferredRule, list[torch.Tensor]]:
        """The primitive of this call and its operands."""
        rule, closed = self.deferred() if self.rules in _TRACING.get() else self.rule()
        return rule, [*self.leaves, *(_constant(x) for x in closed)]

    def rule(self) -> tuple[CustomRule, list[torch.Tensor]]:
        """The primitive of this call and the tensors it closes over."""
        primal, num_outputs = self.primal, len(self.primal.out_metas)
        token = _TRACING.set(_TRACING.get() | {self.rules})
        try:
            forward, closed_forward = trace_body(self._forward, self.leaves)
            self.num_residuals = len(forward.out_metas) - num_outputs
            given = [cotangent_meta(meta) for meta in primal.out_metas if is_differentiable(meta)]
            backward, closed_backward = trace_body(
                self._backward, [*forward.out_metas[num_outputs:], *given]
            )
        finally:
            _TRACING.reset(token)
        places = _operands_among(forward, num_outputs)
        # The operands of the forward rule are the arguments and what that rule closed over.
        num_args, skipped = len(self.leaves), len(self.closed)
        rule = CustomRule(
            self.rules.name,
            tuple(self.arguments.labels),
            (len(self.closed), len(closed_forward), len(closed_backward)),
            primal,
            _without_operands(forward, num_outputs, places),
            backward,
            tuple(i if i is None or i < num_args else i + skipped for i in places),
            self.pulled,
        )
        return rule, [*self.closed, *closed_forward, *closed_backward]

    def deferred(self) -> tuple[DeferredRule, list[torch.Tensor]]:
        """The same, for a call from one of the function's own rules."""

        def complete() -> tuple[CustomRule, list[torch.Tensor]]:
            rule, closed = self.rule()
            more = closed[len(self.closed) :]
            if not all(_is_plain(x) for x in more):
                what = "a rule that calls the function closes over a tensor of a transform."
                raise TraceError(message(f"{self.where}:", what, fix="pass it as an argument"))
            return rule, [_constant(x) for x in more]

        return DeferredRule(self.rules.name, self.primal, complete), self.closed

    def _call(self, fn: Callable[..., Any], values: Sequence[torch.Tensor]) -> Any:
        """Call the function or its forward rule, the static arguments in their places."""
        given = tree.unflatten(self.arguments.treedef, values)
        return fn(*(given.get(i, arg) for i, arg in enumerate(self.arguments.values)))

    def _primal(self, *values: torch.Tensor) -> list[torch.Tensor]:
        leaves, self.out_def = tree.flatten(self._call(self.rules.fn, values))
        return [torch.as_tensor(leaf) for leaf in leaves]

    def _forward(self, *values: torch.Tensor) -> list[torch.Tensor]:
        result = self._call(self.rules.fwd, values)
        if not (isinstance(result, tuple) and len(result) == 2):
            raise self._error(
                "the forward rule",
                f"must return a pair (out, residuals), got {_described(result)}.",
                fix="return out, residuals (None for none)",
            )
        out, residuals = result
        outs = self._like_out(out)
        self.res_leaves, self.res_def = tree.flatten(residuals)
        return [*outs, *(x for x in self.res_leaves if isinstance(x, torch.Tensor))]

    def _like_out(self, out: Any) -> list[torch.Tensor]:
        """The outputs of the forward rule, which must be of the form of the function's."""
        blank = tree.unflatten(self.out_def, self.primal.out_metas)
        pairs, _ = tree.flatten_with_path(blank)
        try:
            found = tree.match(self.out_def, out, [path for path, _ in pairs])
        except ValueError as error:
            raise self._error(
                "the forward rule", "returns another tree than the function.", str(error)
            ) from None
        found = [torch.as_tensor(x) for x in found]
        for (path, meta), x in zip(pairs, found, strict=True):
            if (tuple(x.shape), x.dtype) != (meta.shape, meta.dtype):
                raise self._error(
                    f"the forward rule's out{tree.path_string(path)}",
                    "has another form than the function's.",
                    f"function: {form(meta)}",
                    f"forward:  {form(x)}",
                )
        return found

    def _backward(self, *values: torch.Tensor) -> list[torch.Tensor]:
        kept, given = iter(values[: self.num_residuals]), iter(values[self.num_residuals :])
        residuals = tree.unflatten(
            self.res_def,
            [next(kept) if isinstance(x, torch.Tensor) else x for x in self.res_leaves],
        )
        cotangents = tree.unflatten(
            self.out_def,
            [next(given) if is_differentiable(meta) else None for meta in self.primal.out_metas],
        )
        static = [self.arguments.values[i] for i in self.arguments.static]
        return self._pulled(self.rules.bwd(*static, residuals, cotangents))

    def _pulled(self, result: Any) -> list[torch.Tensor]:
        """The cotangents of a backward rule that are not zero, once they are checked."""
        given = self.arguments
        names = [name for i, name in enumerate(given.names) if i not in given.static]
        expected = f"one per argument: ({', '.join(names)}{',' * (len(names) == 1)})"
        if not isinstance(result, tuple):
            raise self._error(
                "the backward rule",
                f"must return a tuple of cotangents, got {_described(result)}.",
                expected,
                fix="return (cotangent,)" if len(names) == 1 else "",
            )
        if len(result) != len(names):
            raise self._error(
                "the backward rule",
                f"returns {len(result)} cotangents for {len(names)} arguments.",
                expected,
                fix="return None for an argument whose cotangent is zero",
            )
        tensors = tree.unflatten(given.treedef, given.leaves)
        leaves: list[Any] = []
        for name, argument, cotangent in zip(names, tensors.values(), result, strict=True):
            leaves += self._like_argument(name, argument, cotangent)
        for label, x, cotangent in zip(given.labels, given.leaves, leaves, strict=True):
            check_cotangent(f"{self.where}: {label}", x, cotangent)
        self.pulled = tuple(i for i, cotangent in enumerate(leaves) if cotangent is not None)
        return [leaves[i] for i in self.pulled]

    def _like_argument(self, name: str, argument: Any, cotangent: Any) -> list[Any]:
        """The leaves of a cotangent, in the order of those of its argument; None for zero."""
        try:
            found = tree.broadcast_prefix(cotangent, argument)
        except ValueError as error:
            detail = str(error)
        else:
            pairs, _ = tree.flatten_with_path(argument)
            places = {path for path, _ in pairs}
            wrong = [p for p, _ in tree.flatten_with_path(cotangent)[0] if p not in places]
            if not wrong:
                return found
            detail = f"{tree.path_string(wrong[0]) or 'the tree'}: a leaf in the place of a subtree"
        raise self._error(
            name,
            "gets a cotangent of another tree from the backward rule.",
            detail,
            fix="return a tree like the argument, None where it is zero",
        )

    def _error(self, what: str, problem: str, *details: str, fix: str = "") -> TraceError:
        return TraceError(message(f"{self.where}: {what}", problem, *details, fix=fix))


def _described(value: Any) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return "a tensor" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"


def _constant(x: torch.Tensor) -> torch.Tensor:
    """Cut a plain tensor from every derivative: a loop asks for one of all that it closes over."""
    return _torch.adopt(x).detach() if _is_plain(x) else x


def _is_plain(x: torch.Tensor) -> bool:
    """Tell a tensor that no derivative can act on, and that belongs to no trace."""
    own = type(x) in (torch.Tensor, torch.nn.Parameter) and _torch.base_tensor(x) is x
    return own and not x.requires_grad


def _operands_among(forward: Body, num_outputs: int) -> list[int | None]:
    """For each residual, the operand that it is, if it is one."""
    nodes = list(forward.module.graph.nodes)
    places = {node: i for i, node in enumerate(n for n in nodes if n.op == "placeholder")}
    return [places.get(node) for node in nodes[-1].args[0][num_outputs:]]


def _without_operands(forward: Body, num_outputs: int, kept: Sequence[int | None]) -> Body:
    """The same forward part, which does not return the residuals that are its operands."""
    graph = forward.module.graph
    end = list(graph.nodes)[-1]
    wanted = [*range(num_outputs)]
    wanted += [num_outputs + j for j, i in enumerate(kept) if i is None]
    end.args = ([end.args[0][i] for i in wanted],)  # type: ignore[index]
    forward.module.recompile()
    return Body(forward.module, forward.in_metas, tuple(forward.out_metas[i] for i in wanted))

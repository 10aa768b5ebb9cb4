"""`assert_parallel_equal`: a function on a mesh is that function on one device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pfx import tree
from pfx.api import device_get, jit
from pfx.compiler.manual import has_regions
from pfx.compiler.signature import arg_name, name_of
from pfx.errors import MeshError, TraceError, message
from pfx.lax.body import trace_body
from pfx.mesh import Mesh
from pfx.spec import dtype_name
from pfx.testing.compare import FLOOR, Tolerance, failure, is_float, mesh_call, tree_errors
from pfx.testing.flat import inner, random_like

Function = Callable[..., Any]


def assert_parallel_equal(
    fn: Function,
    args: Sequence[Any],
    *,
    mesh: Mesh,
    in_specs: Any = None,
    out_specs: Any = None,
    reference: Function | None = None,
    grad: bool | int | Sequence[int] = False,
    order: int = 1,
    names: Mapping[str, Any] | None = None,
    rules: Mapping[Any, str] | None = None,
    check: bool = True,
    rtol: Tolerance = None,
    atol: Tolerance = None,
    seed: int = 0,
) -> None:
    """Assert that ``pfx.jit(fn, mesh=mesh, …)(*args)`` is ``fn(*args)`` on one device.

    Leaf by leaf: the same tree, shapes, dtypes, and values to ``atol + rtol * scale``, where the scale
    is the leaf's largest element. With `grad`, so are the derivatives of a random projection of the
    float outputs (each element has its own random weight), taken by `torch.func` inside the compiled
    function; the scale of one is at least 1e-3 of the largest of them.

    Args:
        fn: a pure function of pytrees of tensors; one with a `pfx.shard_map` inside needs a
            `reference`.
        args: its arguments, as a tuple: torch tensors (global values) or Arrays.
        mesh: a simulated or process mesh; on a process mesh every rank makes the same call.
        in_specs: as in `pfx.jit`.
        out_specs: as in `pfx.jit`.
        reference: the function on one device, when `fn` itself is not that; it takes the same `args`.
        grad: True for every float argument, or the position, or positions, of some.
        order: 1 compares gradients; 2 also Hessian-vector products, in a random direction.
        names: as in `pfx.jit`.
        rules: as in `pfx.jit`.
        check: on a simulated mesh, also run with every device's copy computed and compared.
        rtol: a number, or one per dtype; by default 1e-10 for float64, 1e-5 for float32, 4e-3 for
            float16, 3e-2 for bfloat16. Integers and bools must be equal.
        atol: a number, or one per dtype; 0 by default. Give one where the right answer is zero but
            for rounding.
        seed: of the random projection.

    Raises:
        TypeError: for a function with a region and no `reference`.
        AssertionError: naming the leaf, the largest difference and where it is, the leaf's layout,
            and the call to repeat.

    >>> from pfx import P, make_mesh
    >>> x, w = torch.randn(8, 4, dtype=torch.float64), torch.randn(4, 6, dtype=torch.float64)
    >>> mlp = lambda x, w: torch.tanh(x @ w)
    >>> mesh = make_mesh(dp=2, tp=2)
    >>> assert_parallel_equal(mlp, (x, w), mesh=mesh, in_specs=(P("dp"), P("tp")), grad=True)
    >>> try:
    ...     assert_parallel_equal(mlp, (x, w), mesh=mesh, reference=lambda x, w: 2 * mlp(x, w))
    ... except AssertionError as error:
    ...     print(str(error).splitlines()[0])
    assert_parallel_equal(<lambda>): output is not what one device gives.
    """
    where = f"assert_parallel_equal({name_of(fn)}):"
    _check_call(where, args, mesh, order)
    options = {"in_specs": in_specs, "out_specs": out_specs, "names": names, "rules": rules}
    asked = {"grad": None if grad is False else grad, "order": order if order != 1 else None}
    case = _Case(where, fn, tuple(args), mesh, options, asked, reference, check, rtol, atol)
    if reference is None and _has_region(fn, case.args):
        raise TypeError(
            message(
                where,
                "the function has a shard_map inside, and so no meaning on one device.",
                "compared with itself, a local statistic or a forgotten psum would pass.",
                fix="reference=the plain function of the global values",
            )
        )
    plain = reference or fn
    expected = device_get(plain(*_copies(args)))
    case.compare(fn, expected, lambda path: f"output{tree.path_string(path)}", out_specs)
    if grad is False:
        return
    active = _active(where, fn, case.args, grad)
    derive = _derivatives(where, expected, case.args, active, order, seed)
    titles = {
        f"[{kind!r}][{i}]": f"the {kind} with respect to {name}"
        for kind in ("gradient", "Hessian-vector product")
        for i, (_, name) in enumerate(active)
    }
    derivatives = device_get(derive(plain)(*_copies(args)))
    case.compare(derive(fn), derivatives, lambda path: titles[tree.path_string(path)], floor=FLOOR)


def _has_region(fn: Function, args: Sequence[Any]) -> bool:
    """Tell a function that is written for the devices of a mesh somewhere."""
    leaves, treedef = tree.flatten(tuple(_copies(args)))

    def flat(*values: torch.Tensor) -> list[torch.Tensor]:
        moving = iter(values)
        given = [next(moving) if isinstance(x, torch.Tensor) else x for x in leaves]
        outs = tree.leaves(fn(*tree.unflatten(treedef, given)))
        return [x for x in outs if isinstance(x, torch.Tensor)]

    body, _ = trace_body(flat, [x for x in leaves if isinstance(x, torch.Tensor)])
    return has_regions(body.module.graph)


@dataclass(frozen=True)
class _Case:
    """One assertion: what to run, where, and how to say it again."""

    where: str
    fn: Function
    args: tuple[Any, ...]
    mesh: Mesh
    options: Mapping[str, Any]
    asked: Mapping[str, Any]
    reference: Function | None
    check: bool
    rtol: Tolerance
    atol: Tolerance

    def compare(
        self,
        fn: Function,
        expected: Any,
        title: Callable[[tree.Path], str],
        out_specs: Any = None,
        *,
        floor: float = 0.0,
    ) -> None:
        """Run `fn` on the mesh, once as users run it and once with every copy computed."""
        options = {**self.options, "out_specs": out_specs}
        runs = [(False, "")]
        if self.check and self.mesh.kind == "simulated":
            runs.append((True, "with check=True, "))
        for check, prefix in runs:
            found = jit(fn, mesh=self.mesh, check=check, **options)(*self.args)
            limits = {"rtol": self.rtol, "atol": self.atol, "floor": floor}
            errors = list(tree_errors(found, expected, **limits))
            if not errors:
                continue
            titles = [title(path) if formed else "the tree" for path, _, formed in errors]
            also = [f"so it is with {', '.join(titles[1:])}."] if len(errors) > 1 else []
            what = "is not what one device gives."
            lines = [*errors[0][1], *also, *self._context()]
            raise failure(f"{self.where} {prefix}{titles[0]}", what, *lines)

    def _context(self) -> list[str]:
        pairs, _ = tree.flatten_with_path(self.args)
        forms = [f"{arg_name(self.fn, path)}: {_form(leaf)}" for path, leaf in pairs]
        return [f"mesh: {self.mesh}", f"args: {', '.join(forms)}", f"again: {self._call()}"]

    def _call(self) -> str:
        given = {**self.options, **self.asked}
        words = "".join(f", {key}={value!r}" for key, value in given.items() if value is not None)
        words += f", reference={name_of(self.reference)}" if self.reference else ""
        name = name_of(self.fn)
        return f"assert_parallel_equal({name}, args, mesh={mesh_call(self.mesh)}{words})"


def _check_call(where: str, args: Any, mesh: Mesh, order: int) -> None:
    if not isinstance(args, (tuple, list)):
        got = f"got a {type(args).__name__}."
        raise TraceError(message(where, "args is the tuple of arguments.", got, fix="args=(x,)"))
    if mesh.kind == "abstract":
        fix = "use a simulated mesh"
        raise MeshError(message(where, "an abstract mesh runs nothing.", f"mesh: {mesh}", fix=fix))
    if order not in (1, 2):
        raise ValueError(message(where, f"order={order!r} is neither 1 nor 2."))


def _copies(args: Sequence[Any]) -> Any:
    """Global tensors of their own, so that a function that changes its arguments harms nobody."""
    copy = lambda x: x.clone() if isinstance(x, torch.Tensor) else x
    return tree.map(copy, device_get(tuple(args)))


def _form(leaf: Any) -> str:
    if not hasattr(leaf, "shape"):
        return repr(leaf)
    return f"{dtype_name(leaf.dtype)}{list(leaf.shape)}"


def _active(where: str, fn: Function, args: Any, grad: Any) -> list[tuple[int, str]]:
    """(number, name) of each leaf of the arguments that is differentiated."""
    chosen = range(len(args)) if grad is True else [grad] if isinstance(grad, int) else list(grad)
    if not all(-len(args) <= i < len(args) for i in chosen):
        raise ValueError(message(where, f"grad={grad!r} names no argument.", f"{len(args)} given"))
    wanted = {i % len(args) for i in chosen}
    active = [
        (number, arg_name(fn, path))
        for number, (path, leaf) in enumerate(tree.flatten_with_path(args)[0])
        if is_float(leaf) and int(path[0][1:-1]) in wanted
    ]
    if not active:
        raise TraceError(message(where, f"grad={grad!r} needs a float tensor among the args."))
    return active


def _derivatives(
    where: str, outputs: Any, args: Any, active: Sequence[tuple[int, str]], order: int, seed: int
) -> Callable[[Function], Function]:
    """Make the function that differentiates another one's projection on fixed random weights."""
    generator = torch.Generator().manual_seed(seed)
    leaves, treedef = tree.flatten(args)
    weights = [random_like(out, generator) if is_float(out) else None
               for out in tree.leaves(outputs)]  # fmt: skip
    directions = [random_like(leaves[i], generator) for i, _ in active]
    if all(w is None for w in weights):
        raise TraceError(message(where, "grad needs a float output."))

    def derive(fn: Function) -> Function:
        @functools.wraps(fn)
        def run(*args: Any) -> Any:
            values = tree.leaves(args)

            def projected(xs: list[torch.Tensor]) -> torch.Tensor:
                given = list(values)
                for (i, _), x in zip(active, xs, strict=True):
                    given[i] = x
                outs = tree.leaves(fn(*tree.unflatten(treedef, given)))
                return inner(weights, [y if is_float(y) else None for y in outs])

            slope = lambda xs: inner(directions, torch.func.grad(projected)(xs))
            at = [values[i] for i, _ in active]
            found = {"gradient": torch.func.grad(projected)(at)}
            if order == 2:
                found["Hessian-vector product"] = torch.func.grad(slope)(at)
            return found

        return run

    return derive

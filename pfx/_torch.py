"""Everything pfx needs from torch's private modules, so that a torch upgrade is one file.

Three things are built on them. `trace` turns a function into an ATen graph and lifts every tensor
that the function closed over into an input of that graph. `bind` adds one node for a primitive of
ours to the graph being traced. `apply` calls a `torch.autograd.Function` so that closed-over
operands of an enclosing trace are seen by it.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import math
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch._C import _functorch  # type: ignore[attr-defined]
from torch._decomp import get_decompositions as _get_decompositions
from torch._functorch import eager_transforms, pyfunctorch
from torch._functorch import vmap as functorch_vmap
from torch._ops import OpOverload as OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.autograd import forward_ad
from torch.autograd.grad_mode import _force_original_view_tracking as _replay_views
from torch.fx._lazy_graph_module import _LazyGraphModule, _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import (
    get_proxy_mode,
    get_proxy_slot,
    has_proxy_slot,
    make_fx,
    track_tensor_tree,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from pfx.errors import TraceError, message, raised_line, user_line
from pfx.graphs import hoist_captured, lift_literals
from pfx.meta import Primitive, TensorMeta

DataDependentError = DataDependentOutputException
DynamicShapeError = DynamicOutputShapeException
GraphModule = _LazyGraphModule  # writes its Python when it is called, which few ever are


@dataclass
class Traced:
    """An ATen graph, the tensors it captured (its trailing inputs) and how many inputs were given."""

    module: torch.fx.GraphModule
    captured: list[torch.Tensor]
    num_inputs: int
    fake_mode: FakeTensorMode

    @property
    def graph(self) -> torch.fx.Graph:
        """The fx graph: inputs first, then the captured tensors, then the nodes."""
        return self.module.graph


VarianceOf = Callable[[torch.Tensor], Any]

# The innermost running trace of this thread of execution; never read outside a trace.
_INNERMOST: contextvars.ContextVar[_Lift | None] = contextvars.ContextVar("trace", default=None)


def base_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Strip every functorch wrapper (grad, vmap, jvp levels) off a tensor."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor


class Wrapper(torch.Tensor):
    """A tensor without memory of its own; subclasses say what an op does in `__torch_dispatch__`."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls: type[Wrapper], like: torch.Tensor) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            like.shape,
            strides=like.stride(),
            storage_offset=like.storage_offset(),
            dtype=like.dtype,
            device=like.device,
        )


def is_efficient_zero(tensor: torch.Tensor) -> bool:
    """Tell the zeros of forward mode, which hold no memory."""
    return tensor._is_zerotensor()


def follow(op: Any, args: Sequence[Any]) -> None:
    """Give a `Wrapper` the form that an op in place, such as ``squeeze_``, gave its parts."""
    if torch.Tag.inplace_view in op.tags:
        with torch._C._DisableTorchDispatch():
            op(*args)


class _Lift(TorchFunctionMode):
    """Replaces tensors foreign to a trace by inputs of its graph, and notes source lines."""

    def __init__(
        self, tracer: Any, fake_mode: FakeTensorMode, outer: _Lift | None, variance_of: VarianceOf
    ) -> None:
        super().__init__()
        self.tracer, self.fake_mode = tracer, fake_mode
        self.outer, self.variance_of = outer, variance_of
        self.captured: list[torch.Tensor] = []
        self.stand_ins: dict[int, torch.Tensor] = {}
        self.source: str | None = None  # None: look at the Python stack
        self.late = False  # what is recorded now belongs to a backward part

    def adopt(self, value: Any) -> Any:
        """Return the stand-in of a foreign tensor, or the value itself if it is ours."""
        if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
            adopted = [self.adopt(item) for item in value]
            same = all(new is old for new, old in zip(adopted, value, strict=True))
            return value if same else type(value)(adopted)
        if not isinstance(value, torch.Tensor):
            return value
        if has_proxy_slot(base_tensor(value), self.tracer):
            return value
        if id(value) not in self.stand_ins:
            self.stand_ins[id(value)] = self._stand_in(value)
            self.captured.append(value)  # also keeps the id alive
        return self.stand_ins[id(value)]

    def _stand_in(self, value: torch.Tensor) -> torch.Tensor:
        variance = self.variance_of(value)
        with _bare():
            fake = fake_tensor(TensorMeta.of(value), self.fake_mode)
            name = f"captured_{len(self.captured)}"
            proxy = self.tracer.create_proxy("placeholder", name, (), {})
            proxy.node.meta |= {"val": fake, "variance": variance}
            track_tensor_tree(fake, proxy, constant=None, tracer=self.tracer)
        return fake

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _INNERMOST.get() is not self or reads_meta(func):
            return func(*args, **kwargs)
        if func is torch.autograd.grad:  # backward nodes have no line of their own
            with source_line(""):
                return func(*args, **kwargs)
        args = tuple(self.adopt(arg) for arg in args)
        kwargs = {key: self.adopt(value) for key, value in kwargs.items()}
        last = self.tracer.graph._root._prev
        out = func(*args, **kwargs)
        self.mark(last)
        return out

    def mark(self, last: torch.fx.Node) -> None:
        """Give every node created after `last` its source line, unless it has one."""
        node = self.tracer.graph._root._prev
        if node is last:
            return
        source = user_line() if self.source is None else self.source
        while node is not last:
            node.meta.setdefault("source", source)
            node.meta.setdefault("late", self.late)
            node = node._prev


_VIEW_PROPERTIES = frozenset({"T", "mT", "H", "mH", "real", "imag", "data"})
_META_METHODS = frozenset({"size", "stride", "dim", "numel", "is_floating_point", "is_complex"})


def reads_meta(func: Any) -> bool:
    """Tell a property such as ``shape`` from a call that computes something."""
    getter = getattr(func, "__self__", None)
    if func.__name__ == "__get__":
        return getattr(getter, "__name__", "") not in _VIEW_PROPERTIES
    return func.__name__ in _META_METHODS


@contextlib.contextmanager
def source_line(source: str) -> Iterator[None]:
    """Attribute the nodes recorded meanwhile to a source line of an earlier trace."""
    lift = _INNERMOST.get()
    if lift is None:
        yield
        return
    outer, lift.source = lift.source, source
    try:
        yield
    finally:
        lift.source = outer


@contextlib.contextmanager
def recomputing() -> Iterator[None]:
    """Mark the nodes recorded meanwhile as recomputation: never to be saved by a forward part."""
    lift = _INNERMOST.get()
    if lift is None:
        yield
        return
    outer, lift.late = lift.late, True
    try:
        yield
    finally:
        lift.late = outer


def fake_tensor(meta: TensorMeta, mode: FakeTensorMode) -> torch.Tensor:
    """Make a tensor of the given form without memory."""
    with _bare(), mode:
        if meta.stride is not None:
            return torch.empty_strided(
                meta.shape, meta.stride, dtype=meta.dtype, device=meta.device
            )
        return torch.empty(meta.shape, dtype=meta.dtype, device=meta.device)


@contextlib.contextmanager
def _bare() -> Iterator[None]:
    """Leave every functorch level, dispatch mode and enclosing trace for a while."""
    token = _INNERMOST.set(None)
    try:
        with _disable_current_modes(), pyfunctorch.temporarily_clear_interpreter_stack():
            yield
    finally:
        _INNERMOST.reset(token)


@contextlib.contextmanager
def _adopting_transforms() -> Iterator[None]:
    """Let a transform entered inside a trace wrap the stand-in of a foreign tensor, not the tensor.

    Otherwise ``grad(f)(closed_over)`` would differentiate with respect to a wrapper that the trace
    replaces later, and the gradient would silently be zero.
    """
    places = ((eager_transforms, "_wrap_for_grad"), (functorch_vmap, "_add_batch_dim"))
    originals = [getattr(module, name) for module, name in places]
    for (module, name), wrap in zip(places, originals, strict=True):
        setattr(module, name, lambda x, *rest, wrap=wrap: wrap(adopt(x), *rest))
    try:
        yield
    finally:
        for (module, name), wrap in zip(places, originals, strict=True):
            setattr(module, name, wrap)


@contextlib.contextmanager
def _restored() -> Iterator[None]:
    """Put torch's dispatch state back when a trace fails, which torch itself does not always do.

    Raises:
        TraceError: for what torch 2.13 asserts in the place of tracing a vmap around a jacfwd.
    """
    state = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    with torch._C._ForceDispatchKeyGuard(*state):
        try:
            yield
        except RuntimeError as error:
            if "is_inference() INTERNAL ASSERT" not in str(error):
                raise
            at, chain = raised_line(error), [error]
            while (before := chain[-1].__context__) is not None:
                chain.append(before)  # type: ignore[arg-type]
            for one in chain:  # guards in dead frames would change the state when they are freed
                traceback.clear_frames(one.__traceback__)
            what = "torch cannot trace a vmap around a jacfwd, and so none around a hessian."
            fix = "jacrev in the place of jacfwd: jacrev(grad(f)) is the same Hessian"
            raise TraceError(message(f"vmap at {at}:", what, fix=fix)) from None


def trace(
    fn: Callable[..., Sequence[Any]],
    inputs: Sequence[Any],
    variance_of: VarianceOf = lambda tensor: None,
) -> Traced:
    """Trace ``fn(*tensors) -> sequence of tensors`` from the metas of `inputs`.

    The trace is independent of whatever surrounds it: tensors that `fn` closed over, real or
    belonging to an enclosing trace or transform, become the trailing inputs of the graph and are
    returned in `Traced.captured`. Inputs keep the variance of their metas, captured tensors that
    which `variance_of` finds.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=False)
    lifts: list[_Lift] = []
    outer = _INNERMOST.get()

    def run(*args: torch.Tensor) -> list[torch.Tensor]:
        proxy_mode = get_proxy_mode()
        assert proxy_mode is not None
        lift = _Lift(proxy_mode.tracer, mode, outer, variance_of)
        lifts.append(lift)
        for value, arg in zip(inputs, args, strict=False):
            node = get_proxy_slot(arg, lift.tracer).proxy.node
            node.meta["variance"] = getattr(value, "variance", None)
        token = _INNERMOST.set(lift)
        try:
            with lift, _adopting_transforms():
                return [lift.adopt(out) for out in fn(*args[: len(inputs)])]
        finally:
            _INNERMOST.reset(token)

    # Views are replayed, or the gradient of a change in place would look at memory by strides.
    threads = torch.autograd.set_multithreading_enabled(False)
    unwritten = _use_lazy_graph_module(True)  # its Python, a fifth of the time that compiling takes
    with _restored(), _bare(), threads, _replay_views(True), unwritten:
        fakes = [fake_tensor(TensorMeta.of(value), mode) for value in inputs]
        # Without an input make_fx would make up a fake mode of its own.
        unread = [] if fakes else [fake_tensor(TensorMeta((), torch.bool), mode)]
        module = make_fx(run, tracing_mode="fake")(*fakes, *unread)
    if unread:
        module.graph.erase_node(next(iter(module.graph.nodes)))
    captured = hoist_captured(module.graph, len(fakes), lifts[0].captured)
    captured += lift_literals(module, _bare)
    module.recompile()
    return Traced(module, captured, len(fakes), mode)


def node_of(tensor: torch.Tensor) -> torch.fx.Node | None:
    """The node that stands for a tensor in a running trace, innermost first; None outside one."""
    base, lift = base_tensor(tensor), _INNERMOST.get()
    while lift is not None:
        if has_proxy_slot(base, lift.tracer):
            return get_proxy_slot(base, lift.tracer).proxy.node
        lift = lift.outer
    return None


def is_tracing() -> bool:
    """Tell whether a `trace` is running."""
    return _INNERMOST.get() is not None


def level() -> tuple[int, int]:
    """Where the running transform is: which trace, and how many transforms deep in it."""
    depth = _functorch.maybe_current_level()
    return id(_INNERMOST.get()), depth or 0


def is_transforming() -> bool:
    """Tell whether a `trace` or a transform of torch.func is running."""
    return is_tracing() or _functorch.maybe_current_level() is not None


def adopt(value: Any) -> Any:
    """Make closed-over tensors inputs of the running trace; the identity outside one."""
    lift = _INNERMOST.get()
    return value if lift is None else lift.adopt(value)


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Call ``function.apply``; closed-over operands become inputs of the running trace."""
    lift = _INNERMOST.get()
    if lift is None:
        return function.apply(*args)
    last = lift.tracer.graph._root._prev
    out = function.apply(*[lift.adopt(arg) for arg in args])
    lift.mark(last)
    return out


def bind(
    primitive: Primitive, operands: Sequence[torch.Tensor], out_metas: Sequence[TensorMeta]
) -> tuple[torch.Tensor, ...]:
    """Record ``primitive(*operands)`` as one node of the running trace, or compute it outside one."""
    lift = _INNERMOST.get()
    if lift is None and not operands:
        with _bare():  # or what it makes would belong to the running transform
            return primitive.compute()
    if lift is None:
        return primitive.compute(*operands)
    tracer, mode = lift.tracer, lift.fake_mode
    operands = [lift.adopt(x) for x in operands]
    with _bare():
        proxies = [get_proxy_slot(x, tracer).proxy for x in operands]
        proxy = tracer.create_proxy("call_function", primitive, tuple(proxies), {})
        outs = [fake_tensor(meta, mode) for meta in out_metas]
        proxy.node.meta["val"] = tuple(outs)
        for i, out in enumerate(outs):
            item = proxy[i]
            item.node.meta["val"] = out
            track_tensor_tree(out, item, constant=None, tracer=tracer)
    return tuple(outs)


def differentiated_here(tensors: Sequence[Any]) -> bool:
    """Tell whether the current transform, or plain autograd, differentiates one of `tensors`."""
    if _functorch.maybe_current_level() is None:
        return torch.is_grad_enabled() and any(
            isinstance(t, torch.Tensor) and t.requires_grad for t in tensors
        )
    level = _functorch.current_level()
    return any(
        isinstance(t, torch.Tensor)
        and _functorch.is_gradtrackingtensor(t)
        and _functorch.maybe_get_level(t) == level
        for t in tensors
    )


def derivative_level(tensors: Sequence[Any]) -> int | None:
    """The level of the innermost transform that acts on `tensors`, if it is a reverse derivative.

    None if that transform is a vmap, or if none acts on them; 0 for plain autograd. A tensor that
    a derivative holds constant, and one with a tangent, belong to the levels below.
    """
    found = [_acting(t) for t in tensors if isinstance(t, torch.Tensor)]
    level, reverse = max(found, default=(-1, False))
    return level if reverse else None


def _acting(tensor: torch.Tensor) -> tuple[int, bool]:
    """The innermost level that maps or differentiates a tensor, and whether it differentiates."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        if _functorch.is_batchedtensor(tensor) or tensor.requires_grad:
            return _functorch.maybe_get_level(tensor), not _functorch.is_batchedtensor(tensor)
        tensor = _functorch.get_unwrapped(tensor)
    reverse = tensor.requires_grad and torch.is_grad_enabled()
    return 0 if reverse else -1, reverse


def alive(value: Any) -> Any:
    """A tensor without the wrappers of transforms that have ended since it was saved."""
    return _functorch.unwrap_if_dead(value) if isinstance(value, torch.Tensor) else value


def is_innermost(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor belongs to the innermost running transform, or none runs."""
    level = _functorch.maybe_current_level()
    return level is None or (
        _functorch.is_functorch_wrapped_tensor(tensor)
        and _functorch.maybe_get_level(tensor) == level
    )


def current_level() -> int:
    """The level of the innermost running transform of torch.func; 0 outside one."""
    return _functorch.maybe_current_level() or 0


@contextlib.contextmanager
def inside_jvp(primals: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Give a static jvp its operands without their tangents, and forward mode to those around it.

    torch calls a static jvp with forward mode off, and with operands that still carry the tangents
    it is given. What an outer jvp pushes through the operands would then silently be lost.
    """
    with forward_ad._set_fwd_grad_enabled(True):
        yield [forward_ad.unpack_dual(x).primal for x in primals]


def decompositions(ops: Sequence[Any]) -> dict[Any, Callable[..., Any]]:
    """Return torch's own decompositions of the given ops into simpler ones."""
    return dict(_get_decompositions(list(ops)))


def fake_call(
    op: Callable[..., Any], args: Sequence[Any], kwargs: Any, mode: FakeTensorMode
) -> Any:
    """Run an op on fake tensors: the form of its result, without memory."""
    with _bare(), mode:
        return op(*args, **kwargs)


def mode_of(fake: Any) -> FakeTensorMode:
    """The mode that a fake tensor belongs to."""
    return fake.fake_mode


def sgd_(
    p: torch.Tensor,
    v: torch.Tensor,
    grad: torch.Tensor,
    *,
    lr: float,
    momentum: float,
    weight_decay: float,
    nesterov: bool,
) -> None:
    """Update a parameter and its accumulated gradient in place, as a later step of SGD does."""
    torch._fused_sgd_(  # pyright: ignore[reportPrivateImportUsage]
        [p], [grad], [v], weight_decay=weight_decay, momentum=momentum, lr=lr, dampening=0.0,
        nesterov=nesterov, maximize=False, is_first_step=False,
    )  # fmt: skip


def adamw_(
    p: torch.Tensor,
    m: torch.Tensor,
    v: torch.Tensor,
    grad: torch.Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
    eps: float,
) -> None:
    """Update a parameter and its moments in place, as after infinitely many steps of AdamW."""
    forever = torch.full((), math.inf)
    torch._fused_adamw_(  # pyright: ignore[reportPrivateImportUsage]
        [p], [grad], [m], [v], [], [forever], lr=lr, beta1=betas[0], beta2=betas[1],
        weight_decay=weight_decay, eps=eps, amsgrad=False, maximize=False,
    )  # fmt: skip


def has_onednn() -> bool:
    """Tell whether torch was built with oneDNN, and may use it."""
    given = torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled
    return given and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def onednn_product(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The product of float32 matrices (m, k) and (k, n) by oneDNN, with a bias of n in every row."""
    row = None if bias is None else bias.contiguous()  # its stride is not looked at
    return _linear_pointwise()(a, b.t(), row, "none", [], "")


@functools.cache
def _linear_pointwise() -> OpOverload:
    """Its op; looking it up at each call takes as long as a small product."""
    return torch.ops.mkldnn._linear_pointwise.default

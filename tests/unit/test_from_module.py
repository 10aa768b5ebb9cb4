"""`from_module`: the module's own numbers and gradients, and the module as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, hessian, jvp, vjp, vmap

import pfx
from pfx.errors import TraceError, TreeError
from pfx.interop import from_module

P = pfx.P


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def state_of(module: nn.Module) -> list[Any]:
    """Everything a module holds, by identity, and the bits of its tensors."""
    found: list[Any] = []
    for path, m in module.named_modules(remove_duplicate=False):
        for key, value in vars(m).items():
            entries = dict(value) if isinstance(value, dict) else {}
            copies = {
                k: v.detach().clone() for k, v in entries.items() if isinstance(v, torch.Tensor)
            }
            found.append((path, key, value, entries, copies))
    return found


def assert_same_state(module: nn.Module, before: list[Any]) -> None:
    after = state_of(module)
    assert [entry[:2] for entry in after] == [entry[:2] for entry in before]
    for (path, key, value, entries, copies), old in zip(after, before, strict=True):
        assert value is old[2] or (not entries and value == old[2]), (path, key)
        assert list(entries) == list(old[3]), (path, key)
        assert all(entries[k] is old[3][k] for k in entries), (path, key)
        assert all(torch.equal(copies[k], old[4][k]) for k in copies), (path, key)


class Pair(nn.Module):
    """Two names for one module, or two modules with one weight."""

    def __init__(self, a: nn.Module, b: nn.Module) -> None:
        super().__init__()
        self.a, self.b = a, b

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))


class Language(nn.Module):
    """An embedding whose weight is also the output projection's, and a buffer."""

    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.block = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.GELU())
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.tensor([1.0, 0.0, 1.0, 1.0]))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        return self.head(x + self.block(x) * self.mask)


class TestCaseB107:
    """pytorch#164759: a shared submodule must be the same afterwards."""

    def test_a_submodule_with_two_names(self) -> None:
        linear = nn.Linear(1, 1, bias=False)
        m = Pair(linear, linear)
        weight, before = linear.weight, state_of(m)
        apply, params = from_module(m)
        assert list(params) == ["a.weight"]
        assert apply({"a.weight": torch.tensor([[2.0]])}, torch.ones(1)).item() == 4.0
        assert m.a.weight is weight and m.b.weight is weight
        assert isinstance(m.a.weight, nn.Parameter)
        assert_same_state(m, before)

    def test_a_list_of_one_layer(self) -> None:
        linear = nn.Linear(1, 1, bias=False)
        m = nn.Sequential(*nn.ModuleList([linear, linear, linear]))
        weight, before = linear.weight, state_of(m)
        apply, params = from_module(m)
        assert list(params) == ["0.weight"]
        assert apply({"0.weight": torch.tensor([[2.0]])}, torch.ones(1)).item() == 8.0
        assert all(layer.weight is weight for layer in m)
        assert_same_state(m, before)

    def test_one_parameter_in_two_modules(self) -> None:
        m = Pair(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
        m.b.weight = m.a.weight
        weight = m.a.weight
        apply, params = from_module(m)
        assert list(params) == ["a.weight"]
        assert apply({"a.weight": torch.tensor([[3.0]])}, torch.ones(1)).item() == 9.0
        assert m.a.weight is weight and m.b.weight is weight

    def test_the_same_container_at_two_depths(self) -> None:
        inner = Pair(*[nn.Linear(1, 1, bias=False)] * 2)
        m = Pair(inner, nn.Sequential(inner, inner.a))
        apply, params = from_module(m)
        assert list(params) == ["a.a.weight"]
        before = state_of(m)
        assert apply({"a.a.weight": torch.tensor([[2.0]])}, torch.ones(1)).item() == 2.0**5
        assert_same_state(m, before)


def _x(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


# Each makes a module in eval mode, and its arguments.
MODULES: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...]]]] = {
    "mlp": lambda: (nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), (_x(5, 4),)),
    "conv": lambda: (nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.Tanh()), (_x(2, 2, 6, 6),)),
    "layer norm": lambda: (nn.LayerNorm(6), (_x(3, 6),)),
    "batch norm": lambda: (nn.BatchNorm1d(4), (_x(5, 4),)),
    "instance norm": lambda: (nn.InstanceNorm1d(3, affine=True), (_x(2, 3, 5),)),
    "attention": lambda: (
        nn.MultiheadAttention(8, 2, batch_first=True),
        (_x(2, 5, 8), _x(2, 3, 8), _x(2, 3, 8)),
    ),
    "encoder layer": lambda: (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (_x(2, 5, 8),)),
    "encoder": lambda: (
        nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2),
        (_x(2, 5, 8), None, torch.tensor([[False] * 5, [False] * 3 + [True] * 2])),
    ),
    "gru": lambda: (nn.GRU(3, 4, batch_first=True), (_x(2, 5, 3),)),
    "lstm": lambda: (nn.LSTM(3, 4, num_layers=2, bidirectional=True), (_x(5, 2, 3),)),
    "gru with weight norm": lambda: (
        nn.utils.parametrizations.weight_norm(nn.GRU(3, 4), "weight_hh_l0"),
        (_x(5, 2, 3),),
    ),
    "tied": lambda: (Language(), (torch.tensor([[1, 2, 7], [0, 3, 3]]),)),
    "orthogonal": lambda: (nn.utils.parametrizations.orthogonal(nn.Linear(4, 4)), (_x(2, 4),)),
    "weight norm": lambda: (nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), (_x(2, 4),)),
    "spectral norm": lambda: (nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3)), (_x(2, 4),)),
    "spectral norm by hook": lambda: (nn.utils.spectral_norm(nn.Linear(4, 3)), (_x(2, 4),)),
    "pruned": lambda: (_pruned(nn.Linear(4, 3)), (_x(2, 4),)),
}  # fmt: skip


def _pruned(module: nn.Module) -> nn.Module:
    import torch.nn.utils.prune as prune

    return prune.l1_unstructured(module, "weight", amount=0.5)


def make(name: str) -> tuple[nn.Module, tuple[Any, ...]]:
    module, args = MODULES[name]()
    return module.eval().double(), args


def first(out: Any) -> torch.Tensor:
    return out[0] if isinstance(out, tuple) else out


@pytest.mark.parametrize("name", MODULES)
class TestEqualsTheModule:
    def test_results_and_gradients(self, name: str) -> None:
        module, args = make(name)
        expected = first(module(*args))
        ys = torch.randn_like(expected)
        wanted = torch.autograd.grad((expected * ys).sum(), list(module.parameters()))
        before = state_of(module)
        apply, params = from_module(module)
        assert_same_state(module, before)
        assert list(params) == sorted(key for key, _ in module.named_parameters())
        assert not any(value.requires_grad for value in params.values())

        def loss(params: dict[str, torch.Tensor]) -> torch.Tensor:
            return (first(apply(params, *args)) * ys).sum()

        torch.testing.assert_close(first(apply(params, *args)), expected, rtol=1e-12, atol=1e-12)
        found = grad(loss)(params)
        for (key, _), value in zip(module.named_parameters(), wanted, strict=True):
            assert value.abs().max() > 0, key
            torch.testing.assert_close(found[key], value, rtol=1e-10, atol=1e-10)
        assert_same_state(module, before)

    def test_jit(self, name: str) -> None:
        module, args = make(name)
        apply, params = from_module(module)
        expected = first(apply(params, *args))
        before = state_of(module)
        fn = pfx.jit(
            lambda params, *args: first(apply(params, *args)),
            mesh=pfx.make_mesh(dp=2),
            in_specs=None,
        )
        torch.testing.assert_close(
            pfx.device_get(fn(params, *args)), expected, rtol=1e-12, atol=1e-12
        )
        assert_same_state(module, before)

    def test_other_values_than_the_modules_own(self, name: str) -> None:
        module, args = make(name)
        apply, params = from_module(module)
        torch.manual_seed(0)
        other, _ = make(name)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(1.25).add_(0.125)
        own = first(module(*args))
        expected = first(other(*args))
        values = pfx.tree.map(lambda value: value * 1.25 + 0.125, params)
        with torch.no_grad():
            found = first(apply(values, *args))
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
        assert not torch.equal(found, own)
        assert torch.equal(first(module(*args)), own)


class TestTransforms:
    def model(self) -> tuple[nn.Module, torch.Tensor]:
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).double(), _x(4, 4)

    def test_the_gradient_of_a_tied_parameter_is_the_sum_over_its_uses(self) -> None:
        module = Language().double()
        tokens = torch.tensor([[1, 2, 7], [0, 3, 3]])
        apply, params = from_module(module)
        assert list(params) == [
            "block.0.bias",
            "block.0.weight",
            "block.1.bias",
            "block.1.weight",
            "embed.weight",
        ]
        found = grad(lambda params: apply(params, tokens).sin().sum())(params)["embed.weight"]
        untied = Language().double()
        untied.head.weight = nn.Parameter(torch.empty(8, 4, dtype=torch.float64))
        untied.load_state_dict(module.state_dict())
        untied(tokens).sin().sum().backward()
        one, two = untied.embed.weight.grad, untied.head.weight.grad
        assert one is not None and two is not None and one.abs().max() > 0
        torch.testing.assert_close(found, one + two, rtol=1e-12, atol=1e-12)

    def test_an_ensemble(self) -> None:
        modules = [self.model()[0] for _ in range(3)]
        apply, _ = from_module(modules[0])
        x = _x(5, 4)
        each = [from_module(module)[1] for module in modules]
        stacked = pfx.tree.map(lambda *leaves: torch.stack(leaves), *each)
        found = vmap(apply, (0, None))(stacked, x)
        torch.testing.assert_close(found, torch.stack([m(x) for m in modules]).detach())
        loss = lambda params: apply(params, x).sin().sum()
        grads = vmap(grad(loss))(stacked)
        for i, params in enumerate(each):
            torch.testing.assert_close(
                pfx.tree.map(lambda leaf, i=i: leaf[i], grads), grad(loss)(params)
            )

    @pytest.mark.parametrize("name", ["attention", "conv", "batch norm", "tied"])
    def test_vmap_over_examples(self, name: str) -> None:
        module, args = make(name)
        apply, params = from_module(module)
        expected = first(apply(params, *args))
        # A batch of one each, for what was the batch dim.
        found = vmap(
            lambda *args: first(apply(params, *[arg[None] for arg in args])), randomness="error"
        )(*args)
        torch.testing.assert_close(found[:, 0], expected, rtol=1e-10, atol=1e-10)

    @pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
    def test_jvp_vjp_and_hessian(self) -> None:
        module, x = self.model()
        before = state_of(module)
        apply, params = from_module(module)
        f = lambda params: apply(params, x)
        ones = pfx.tree.map(torch.ones_like, params)
        out, tangent = jvp(f, (params,), (ones,))
        torch.testing.assert_close(out, module(x).detach())
        step = 1e-6
        moved = [pfx.tree.map(lambda p, s=s: p + s * step, params) for s in (1, -1)]
        torch.testing.assert_close(
            tangent, (f(moved[0]) - f(moved[1])) / (2 * step), rtol=1e-7, atol=1e-7
        )
        _, pull = vjp(f, params)
        cotangent = torch.randn_like(out)
        inner = sum((g * ones[key]).sum() for key, g in pull(cotangent)[0].items())
        torch.testing.assert_close(inner, (cotangent * tangent).sum())
        loss = lambda w: apply({**params, "0.weight": w}, x).sin().sum()
        found = hessian(loss)(params["0.weight"])
        expected = torch.autograd.functional.hessian(
            lambda w: functional_call(module, {"0.weight": w}, (x,)).sin().sum(),
            params["0.weight"],
        )
        torch.testing.assert_close(found, expected)
        assert_same_state(module, before)

    def test_plain_autograd_reaches_the_values(self) -> None:
        module, x = self.model()
        apply, params = from_module(module)
        values = {key: value.clone().requires_grad_() for key, value in params.items()}
        apply(values, x).sum().backward()
        module(x).sum().backward()
        for key, own in module.named_parameters():
            torch.testing.assert_close(values[key].grad, own.grad)

    def test_a_layer_as_the_body_of_a_scan(self) -> None:
        layers = [nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0).double() for _ in range(3)]
        apply, _ = from_module(layers[0])
        before = state_of(layers[0])
        stacked = pfx.tree.map(
            lambda *leaves: torch.stack(leaves), *[from_module(layer)[1] for layer in layers]
        )
        x = _x(5, 2, 8)

        def loss(stacked: Any, x: torch.Tensor) -> torch.Tensor:
            body = pfx.remat(lambda x, params: (apply(params, x), None))
            return pfx.scan(body, x, stacked)[0].sin().sum()

        expected = nn.Sequential(*layers)(x).sin().sum()
        expected.backward()
        torch.testing.assert_close(loss(stacked, x), expected.detach())
        for key, found in grad(loss)(stacked, x).items():
            own = [dict(layer.named_parameters())[key].grad for layer in layers]
            torch.testing.assert_close(found, torch.stack(own), rtol=1e-10, atol=1e-10)
        assert_same_state(layers[0], before)

    def test_a_training_step_on_a_mesh(self) -> None:
        module = Language().double()
        apply, params = from_module(module)
        before = state_of(module)
        tokens = torch.tensor([[1, 2, 7], [0, 3, 3], [4, 4, 5], [6, 1, 0]])
        specs = {
            "embed.weight": P("tp"),
            "block.0.weight": P(),
            "block.0.bias": P(),
            "block.1.weight": P("tp", None),
            "block.1.bias": P("tp"),
        }

        def step(params: Any, tokens: torch.Tensor) -> Any:
            loss = lambda params: apply(params, tokens).sin().sum()
            value, grads = torch.func.grad_and_value(loss)(params)[::-1]
            return value, pfx.tree.map(lambda p, g: p - 0.1 * g, params, grads)

        mesh = pfx.make_mesh(dp=2, tp=2)
        sharded = pfx.jit(step, mesh=mesh, in_specs=(specs, P("dp")))
        found = pfx.device_get(sharded(params, tokens))
        torch.testing.assert_close(found, step(params, tokens), rtol=1e-12, atol=1e-12)
        assert_same_state(module, before)


class Notes(nn.Module):
    """A module whose forward does what its `act` says."""

    seen: Any
    count: torch.Tensor

    def __init__(self, act: Callable[[Notes, torch.Tensor], Any]) -> None:
        super().__init__()
        self.act = act
        self.weight = nn.Parameter(torch.tensor([2.0]))
        self.register_buffer("count", torch.zeros(1))
        self.seen = None
        self.calls = 0

    def forward(self, x: torch.Tensor) -> Any:
        out = self.act(self, x)
        return x * self.weight if out is None else out


class TestTheModuleStaysAsItWas:
    def test_after_an_exception(self) -> None:
        def act(m: Notes, x: torch.Tensor) -> None:
            m.calls, m.seen = 3, x
            m.weight = nn.Parameter(x)
            raise RuntimeError("in forward")

        module = nn.Sequential(Notes(act), nn.Linear(1, 1))
        before = state_of(module)
        apply, params = from_module(module)
        with pytest.raises(RuntimeError, match="in forward"):
            apply(params, torch.ones(1))
        assert_same_state(module, before)

    @pytest.mark.parametrize("drawn", ["gru", "lstm"])
    def test_a_traced_value_does_not_stay_in_it(self, drawn: str) -> None:
        module, args = make(drawn)
        flat = list(module._flat_weights)  # type: ignore[operator]
        apply, params = from_module(module)
        grad(lambda params: first(apply(params, *args)).sum())(params)
        assert all(a is b for a, b in zip(module._flat_weights, flat, strict=True))  # type: ignore[arg-type]
        module(*args)

    def test_a_number_it_assigns_is_undone(self) -> None:
        def act(m: Notes, x: torch.Tensor) -> None:
            m.calls += 1
            m.last = "run"  # type: ignore[assignment]

        module = Notes(act)
        before = state_of(module)
        apply, params = from_module(module)
        apply(params, torch.ones(1))
        assert module.calls == 0 and not hasattr(module, "last")
        assert_same_state(module, before)

    def test_buffers_and_mode_are_read_at_each_call(self) -> None:
        module = Notes(lambda m, x: x + m.count if m.training else x - m.count)
        apply, params = from_module(module)
        module.count.fill_(2.0)
        assert apply(params, torch.ones(1)).item() == 3.0
        module.eval()
        assert apply(params, torch.ones(1)).item() == -1.0

    def test_a_result_that_is_a_buffer_is_not_the_modules(self) -> None:
        module = Notes(lambda m, x: m.count)
        apply, params = from_module(module)
        apply(params, torch.ones(1)).add_(5.0)
        assert module.count.item() == 0.0

    def test_no_parameters(self) -> None:
        apply, params = from_module(nn.Sequential(nn.ReLU(), nn.Flatten()))
        assert params == {}
        assert apply({}, torch.tensor([[-1.0, 2.0]])).tolist() == [[0.0, 2.0]]

    def test_a_frozen_parameter_is_a_parameter(self) -> None:
        module = nn.Linear(2, 1).requires_grad_(False)
        apply, params = from_module(module)
        assert list(params) == ["bias", "weight"]
        found = grad(lambda params: apply(params, torch.ones(2)).sum())(params)
        assert found["weight"].tolist() == [[1.0, 1.0]]
        assert not module.weight.requires_grad

    def test_keyword_arguments_and_other_dtypes(self) -> None:
        module = Pair(nn.Identity(), nn.Linear(2, 2))
        apply, params = from_module(module)
        halves = pfx.tree.map(lambda value: value.bfloat16(), params)
        assert apply(halves, x=torch.ones(2, dtype=torch.bfloat16)).dtype is torch.bfloat16

    def test_a_call_within_a_call(self) -> None:
        linear = nn.Linear(1, 1, bias=False)
        apply, _ = from_module(linear)
        inner = {"weight": torch.tensor([[3.0]])}
        module = Notes(lambda m, x: apply(inner, x) * m.weight)
        module.add_module("linear", linear)
        outer, _ = from_module(module)
        values = {"weight": torch.tensor([5.0]), "linear.weight": torch.tensor([[7.0]])}
        before = state_of(module)
        assert outer(values, torch.ones(1)).item() == 15.0
        assert_same_state(module, before)

    def test_trained_values_go_back(self) -> None:
        module = Language()
        apply, params = from_module(module)
        tokens = torch.tensor([[1, 2]])
        trained = pfx.tree.map(lambda value: value + 0.5, params)
        expected = apply(trained, tokens)
        module.load_state_dict(trained, strict=False)
        assert torch.equal(module(tokens), expected)


def _count(m: Notes, x: torch.Tensor) -> None:
    m.count += 1


def _rebind(m: Notes, x: torch.Tensor) -> None:
    m.count = m.count + 1


def _write(m: Notes, x: torch.Tensor) -> None:
    with torch.no_grad():
        m.weight.mul_(1.0)


def _write_an_item(m: Notes, x: torch.Tensor) -> None:
    m.weight[0] = 1.0


def _batch_norm(m: Notes, x: torch.Tensor) -> torch.Tensor:
    return torch.batch_norm(x, None, None, m.count, torch.ones(1), True, 0.1, 1e-5, False)


def _instance_norm(m: Notes, x: torch.Tensor) -> torch.Tensor:
    return torch.instance_norm(x, None, None, m.count, torch.ones(1), True, 0.1, 1e-5, False)


def _instance_norm_by_default(m: Notes, x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.instance_norm(x, m.count, torch.ones(1))


def _keep_the_weight(m: Notes, x: torch.Tensor) -> None:
    m.seen = m.weight


def _replace(m: Notes, x: torch.Tensor) -> None:
    m.weight = nn.Parameter(torch.ones(1))


def _add(m: Notes, x: torch.Tensor) -> None:
    m.layer = nn.Identity()


def _keep(m: Notes, x: torch.Tensor) -> None:
    m.seen = {"x": [x * 2]}


KEEPS = "  apply is a pure function of its arguments and keeps no state."
EVAL = "  fix: module.eval() if only training needs it; else make it an argument and a result of forward"
NORM = (
    "  fix: module.eval() before the call; for batch statistics in training, build the layer with "
    "track_running_stats=False"
)
CACHE = "  fix: return it from forward; if it is a cache, fill it by one call of the module itself before"
NO_NORM = "  fix: build the layer without max_norm"
WRITERS: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "in place": (lambda: Notes(_count), "changes the buffer 1.count", EVAL),
    "rebound": (lambda: Notes(_rebind), "changes the buffer 1.count", EVAL),
    "parameter in place": (lambda: Notes(_write), "changes the parameter 1.weight", EVAL),
    "parameter by item": (lambda: Notes(_write_an_item), "changes the parameter 1.weight", EVAL),
    "parameter rebound": (lambda: Notes(_replace), "changes the parameter 1.weight", EVAL),
    "submodule": (lambda: Notes(_add), "changes the submodule 1.layer", EVAL),
    "attribute": (lambda: Notes(_keep), "keeps a tensor in the attribute 1.seen", CACHE),
    "weight": (lambda: Notes(_keep_the_weight), "keeps a tensor in the attribute 1.seen", CACHE),
    "batch norm": (lambda: nn.BatchNorm1d(4), "changes the buffer 1.running_mean", NORM),
    "instance norm": (
        lambda: nn.InstanceNorm1d(4, track_running_stats=True),
        "changes the buffer 1.running_mean",
        NORM,
    ),
    "spectral norm": (
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)),
        "changes the buffer 1.parametrizations.weight.0._u",
        EVAL,
    ),
    "spectral norm by hook": (
        lambda: nn.utils.spectral_norm(nn.Linear(4, 4)),
        "changes the buffer 1.weight_u",
        EVAL,
    ),
}
CALLS: dict[str, Callable[[Any, Any, torch.Tensor], Any]] = {
    "plain": lambda apply, params, x: apply(params, x),
    "no grad": lambda apply, params, x: torch.no_grad()(apply)(params, x),
    "inference": lambda apply, params, x: torch.inference_mode()(apply)(params, x),
    "grad": lambda apply, params, x: grad(lambda x: apply(params, x).sum())(x),
    "vmap": lambda apply, params, x: vmap(lambda x: apply(params, x))(x[None]),
    "scan": lambda apply, params, x: pfx.scan(lambda c, x: (c, apply(params, x)), None, x[None]),
    "jit": lambda apply, params, x: pfx.jit(
        lambda x: apply(params, x), mesh=pfx.make_mesh(dp=2), in_specs=None
    )(x),
}


class TestAForwardThatWrites:
    @pytest.mark.parametrize("call", CALLS)
    @pytest.mark.parametrize("name", WRITERS)
    def test_is_refused_and_the_module_is_whole(self, name: str, call: str) -> None:
        build, what, fix = WRITERS[name]
        module = nn.Sequential(nn.Identity(), build())
        before = state_of(module)
        apply, params = from_module(module)
        with pytest.raises(TraceError) as caught:
            CALLS[call](
                apply, params, torch.randn(3, 4, 4) if "instance" in name else _x(4, 4).float()
            )
        assert str(caught.value) == "\n".join(
            (f"from_module(Sequential): the forward {what}.", KEEPS, fix)
        )
        assert_same_state(module, before)

    @pytest.mark.parametrize(
        ("act", "fix"),
        [(_batch_norm, NORM), (_instance_norm, EVAL), (_instance_norm_by_default, NORM)],
    )
    def test_statistics_of_ones_own(self, act: Any, fix: str) -> None:
        module = Notes(act)
        apply, params = from_module(module)
        with pytest.raises(TraceError, match="changes the buffer count") as caught:
            apply(params, torch.randn(3, 1, 4))
        assert str(caught.value).endswith(fix)
        assert module.count.item() == 0.0

    @pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
    def test_an_embedding_with_a_largest_norm(self, kind: Any) -> None:
        module = kind(4, 2, max_norm=0.1)
        before = state_of(module)
        apply, params = from_module(module)
        with pytest.raises(TraceError, match="changes the parameter weight") as caught:
            apply(params, torch.tensor([[0, 1]]))
        assert str(caught.value).endswith(NO_NORM)
        assert_same_state(module, before)

    def test_batch_statistics_without_running_ones_are_fine(self) -> None:
        module = nn.BatchNorm1d(4, track_running_stats=False)
        apply, params = from_module(module)
        x = torch.randn(5, 4)
        assert torch.equal(apply(params, x), module(x))

    def test_eval_is_the_fix(self) -> None:
        module = nn.BatchNorm1d(4)
        apply, params = from_module(module)
        x = torch.randn(5, 4)
        with pytest.raises(TraceError):
            apply(params, x)
        module.eval()
        assert torch.equal(apply(params, x), module(x))

    def test_a_cache_filled_before_is_a_constant(self) -> None:
        def act(m: Notes, x: torch.Tensor) -> torch.Tensor:
            if m.seen is None:
                m.seen = torch.arange(3.0)
            return m.seen * m.weight

        module = Notes(act)
        apply, params = from_module(module)
        with pytest.raises(TraceError, match="keeps a tensor in the attribute seen"):
            apply(params, torch.ones(1))
        module(torch.ones(1))
        assert apply(params, torch.ones(1)).tolist() == [0.0, 2.0, 4.0]


def test_dropout_under_jit_is_refused_in_training_mode() -> None:
    apply, params = from_module(nn.Dropout(0.5))
    step = pfx.jit(lambda x: apply(params, x), mesh=pfx.make_mesh(dp=2), in_specs=None)
    with pytest.raises(TraceError, match=r"pfx\.random"):
        step(torch.ones(4))


def _tied() -> nn.Module:
    return Pair(*[nn.Linear(1, 1, bias=False)] * 2)


FIVE = nn.Sequential(*[nn.Linear(1, 1, bias=False) for _ in range(5)])
W = torch.ones(1, 1)
PARAMS: dict[str, tuple[nn.Module, Any, str]] = {
    "missing": (
        nn.Linear(2, 1),
        {"weight": torch.ones(1, 2)},
        """from_module(Linear): params['bias'] is missing.
  the module has a parameter bias of shape (1,).
  fix: pass every entry of the params that from_module returned""",
    ),
    "unexpected": (
        nn.Linear(2, 1),
        {"weight": torch.ones(1, 2), "bias": torch.ones(1), "scale": torch.ones(1)},
        """from_module(Linear): params['scale'] is not a parameter.
  the module has weight, bias.
  fix: drop it""",
    ),
    "one of many": (
        FIVE,
        {f"module.{i}.weight": W for i in range(5)},
        """from_module(Sequential): params['module.0.weight'] is not a parameter.
  the module has 0.weight, 1.weight, 2.weight, 3.weight, … (5 parameters).
  fix: drop it""",
    ),
    "none at all": (
        nn.ReLU(),
        {"weight": W},
        """from_module(ReLU): params['weight'] is not a parameter.
  the module has no parameters.
  fix: drop it""",
    ),
    "tied": (
        _tied(),
        {"a.weight": W, "b.weight": W},
        """from_module(Pair): params['b.weight'] is not a parameter.
  it is tied to a.weight, whose entry holds the value of both.
  fix: drop it""",
    ),
    "a buffer": (
        Notes(_count),
        {"weight": torch.ones(1), "count": torch.ones(1)},
        """from_module(Notes): params['count'] is not a parameter.
  it is a buffer, and buffers stay with the module.
  fix: drop it""",
    ),
    "misshaped": (
        nn.Linear(2, 1, bias=False),
        {"weight": torch.ones(3, 1, 2)},
        """from_module(Linear): params['weight'] has shape (3, 1, 2); the module's has (1, 2).
  fix: pass that shape; a stack of params goes through pfx.vmap or pfx.scan""",
    ),
    "a number": (
        nn.Linear(1, 1, bias=False),
        {"weight": 1.0},
        """from_module(Linear): params['weight'] is a float, not a tensor.
  fix: pass a tensor""",
    ),
    "an Array": (
        nn.Linear(1, 1, bias=False),
        pfx.device_put({"weight": W}, pfx.make_mesh(dp=1), P()),
        """from_module(Linear): params['weight'] is an Array, not a tensor.
  fix: call apply in a function under pfx.jit""",
    ),
    "a list": (
        nn.Linear(1, 1, bias=False),
        [W],
        """from_module(Linear): params is a list, not a dict of tensors by name.
  fix: apply(params, *args) with the params that from_module returned""",
    ),
}


@pytest.mark.parametrize("case", PARAMS)
def test_params_that_are_not_the_modules(case: str) -> None:
    module, params, text = PARAMS[case]
    before = state_of(module)
    apply, _ = from_module(module)
    with pytest.raises(TreeError) as caught:
        apply(params, torch.ones(2))
    assert str(caught.value) == text
    assert_same_state(module, before)


NOT_ONES: dict[str, tuple[Callable[[], Any], str]] = {
    "a function": (
        lambda: F_relu,
        """from_module(function): a function is not a torch.nn.Module written in Python.
  fix: pass an instance of the module's own class""",
    ),
    "a lazy module": (
        lambda: nn.Sequential(nn.LazyLinear(3)),
        """from_module(Sequential): 0.weight is not initialized.
  a lazy module learns its shapes from its first input.
  fix: run the module once before: module(x)""",
    ),
    "a lazy buffer": (
        lambda: nn.LazyBatchNorm1d(affine=False),
        """from_module(LazyBatchNorm1d): running_mean is not initialized.
  a lazy module learns its shapes from its first input.
  fix: run the module once before: module(x)""",
    ),
}  # fmt: skip


def F_relu(x: torch.Tensor) -> torch.Tensor:
    return x.relu()


@pytest.mark.parametrize("case", NOT_ONES)
def test_what_is_no_module_yet(case: str) -> None:
    build, text = NOT_ONES[case]
    with pytest.raises(TraceError) as caught:
        from_module(build())
    assert str(caught.value) == text


def test_a_script_is_refused() -> None:
    module = torch.jit.ScriptModule()
    with pytest.raises(TraceError, match="a ScriptModule is not a torch"):
        from_module(module)


def test_a_parameter_that_a_list_holds_too() -> None:
    """Where torch does not look for parameters, the value that was passed is used all the same."""

    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(2))
            self.weights = [self.w]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (torch.cat(self.weights) * x).sum()

    apply, _ = from_module(Listed())
    params, x = {"w": torch.full((2,), 5.0)}, torch.tensor([1.0, 2.0])
    assert apply(params, x) == 15.0
    assert torch.equal(grad(apply)(params, x)["w"], x)

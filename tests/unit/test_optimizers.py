"""Lion, LAMB, Adafactor and Muon against torch.optim, or the papers' equations in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from pfx import optim, tree
from pfx.errors import TreeError
from pfx.optim import schedules

LAYERS, STEPS = 3, 20
# A layer's parameters: logical dims, and the shape of each dim.
LAYER = {
    "norm": ("embed", (6,)),
    "wq": ("embed heads head_dim", (6, 2, 4)),
    "wo": ("heads head_dim embed", (2, 4, 6)),
    "bq": ("heads head_dim", (2, 4)),
    "gain": ("", ()),
}
AXES = {"blocks": {name: f"layers {dims}".strip() for name, (dims, _) in LAYER.items()},
        "table": "vocab embed"}  # fmt: skip
# The same parameters as torch would hold them: heads and their dim as one dim.
FLAT = {"norm": (6,), "wq": (6, 8), "wo": (8, 6), "bq": (8,), "gain": ()}

Params = dict[str, Any]


def drawn(seed: int, size: float = 1.0) -> Params:
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: size * torch.randn(shape, generator=generator, dtype=torch.float64)
    blocks = {name: draw(LAYERS, *shape) for name, (_, shape) in LAYER.items()}
    return {"blocks": blocks, "table": draw(5, 6)}


def apart(params: Params) -> dict[str, torch.Tensor]:
    """Every layer's parameters as tensors of their own, of the shapes that torch would hold."""
    found = {
        f"{name}/{i}": stack[i].reshape(FLAT[name])
        for name, stack in params["blocks"].items()
        for i in range(LAYERS)
    }
    return {**found, "table": params["table"]}


def trained(optimizer: optim.GradientTransformation, steps: int = STEPS) -> Params:
    params = drawn(0)
    state = optimizer.init(params)
    for k in range(steps):
        updates, state = optimizer.update(drawn(k + 1), state, params)
        params = optim.apply_updates(params, updates)
    return params


def by_torch(make: Callable[[dict[str, torch.nn.Parameter]], Any]) -> dict[str, torch.Tensor]:
    """Train with optimizers of torch.optim, given the parameters by name."""
    params = {name: torch.nn.Parameter(p.clone()) for name, p in apart(drawn(0)).items()}
    optimizers = make(params)
    for k in range(STEPS):
        for name, grad in apart(drawn(k + 1)).items():
            params[name].grad = grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    return {name: p.detach() for name, p in params.items()}


Rule = Callable[[torch.Tensor, torch.Tensor, dict[str, Any], int], torch.Tensor]


def by_rule(rule: Rule) -> dict[str, torch.Tensor]:
    """Train with ``rule(p, g, memory, t) -> p``, each parameter with a memory of its own."""
    params = apart(drawn(0))
    memory: dict[str, dict[str, Any]] = {name: {} for name in params}
    for t in range(1, STEPS + 1):
        grads = apart(drawn(t))
        params = {name: rule(p, grads[name], memory[name], t) for name, p in params.items()}
    return params


def assert_same(found: Params, expected: Mapping[str, torch.Tensor], atol: float = 1e-12) -> None:
    for name, value in apart(found).items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=atol, msg=name)


def is_matrix(name: str) -> bool:
    return name.split("/")[0] in ("wq", "wo")


# Lion


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_lion_is_the_papers_program(decay: float) -> None:
    def rule(p: torch.Tensor, g: torch.Tensor, memory: Any, t: int) -> torch.Tensor:
        m = memory.get("m", torch.zeros_like(p))
        memory["m"] = 0.95 * m + 0.05 * g
        return p - 0.03 * (torch.sign(0.8 * m + 0.2 * g) + decay * p)

    optimizer = optim.lion(0.03, b1=0.8, b2=0.95, weight_decay=decay)
    assert_same(trained(optimizer), by_rule(rule))


# LAMB


@pytest.mark.parametrize("roles", [False, True], ids=["all alike", "by role"])
def test_lamb_is_the_papers_algorithm_layer_by_layer(roles: bool) -> None:
    def rule(p: torch.Tensor, g: torch.Tensor, memory: Any, t: int) -> torch.Tensor:
        matrix = p.ndim >= 2 or not roles
        m = memory["m"] = 0.9 * memory.get("m", 0) + 0.1 * g
        v = memory["v"] = 0.99 * memory.get("v", 0) + 0.01 * g * g
        r = (m / (1 - 0.9**t)) / (torch.sqrt(v / (1 - 0.99**t)) + 1e-6)
        r = r + (0.1 * p if matrix else 0)
        ratio = torch.linalg.norm(p.reshape(-1)) / torch.linalg.norm(r.reshape(-1))
        return p - 0.02 * (ratio if matrix else 1.0) * r

    mask = optim.decay_mask(AXES) if roles else None
    optimizer = optim.lamb(0.02, axes=AXES, b2=0.99, weight_decay=0.1, mask=mask, trust_mask=mask)
    assert_same(trained(optimizer), by_rule(rule))


def test_lamb_leaves_zeros_by_the_size_of_the_update() -> None:
    optimizer = optim.lamb(0.5, axes={"w": "layers embed"}, weight_decay=0.0)
    params = {"w": torch.tensor([[0.0, 0.0], [3.0, 4.0], [3.0, 4.0]])}
    grads = {"w": torch.tensor([[1.0, 1.0], [0.0, 0.0], [1.0, 1.0]])}
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    expected = torch.tensor([[-0.5, -0.5], [0.0, 0.0], [-2.5 / 2**0.5] * 2])
    torch.testing.assert_close(updates["w"], expected, rtol=1e-5, atol=1e-6)


# Adafactor


@pytest.mark.parametrize(
    ("options", "theirs"),
    [
        ({}, {}),
        ({"weight_decay": 0.1, "threshold": 2.0}, {"weight_decay": 0.1, "d": 2.0}),
        ({"decay_rate": 0.5, "eps": (1e-3, 0.1)}, {"beta2_decay": -0.5, "eps": (1e-3, 0.1)}),
    ],
    ids=["defaults", "decay", "eps"],
)
def test_adafactor_is_torchs_adafactor_layer_by_layer(options: Any, theirs: Any) -> None:
    expected = by_torch(lambda p: [torch.optim.Adafactor(list(p.values()), lr=0.5, **theirs)])
    # 0.5 is above 1/√t from the fifth step on: both rates are seen.
    assert_same(trained(optim.adafactor(0.5, axes=AXES, **options)), expected)


def test_adafactor_keeps_rows_and_columns_only() -> None:
    state = optim.adafactor(axes=AXES).init(drawn(0))
    row, column, full = state[0].row, state[0].column, state[0].full
    assert row["blocks"]["wq"].shape == (LAYERS, 6, 1, 1)
    assert column["blocks"]["wq"].shape == (LAYERS, 1, 2, 4)
    assert full["blocks"]["wq"] is None and row["blocks"]["bq"] is None
    assert full["blocks"]["bq"].shape == (LAYERS, 2, 4)


def test_a_dim_of_experts_is_a_batch_of_matrices_as_in_torch() -> None:
    torch.manual_seed(0)
    params = {"w": torch.randn(4, 3, 5, dtype=torch.float64)}
    theirs = torch.nn.Parameter(params["w"].clone())
    reference = torch.optim.Adafactor([theirs], lr=0.1)
    optimizer = optim.adafactor(0.1, axes={"w": "experts embed mlp"})
    state = optimizer.init(params)
    for _ in range(5):
        grad = torch.randn(4, 3, 5, dtype=torch.float64)
        theirs.grad = grad.clone()
        reference.step()
        updates, state = optimizer.update({"w": grad}, state, params)
        params = optim.apply_updates(params, updates)
    torch.testing.assert_close(params["w"], theirs.detach(), rtol=0, atol=1e-12)


# Muon


def test_muon_is_torchs_muon_with_adamw_for_the_rest() -> None:
    """In bfloat16, torch's only dtype to iterate in, and in the shape that torch stores."""
    for adjust in ("original", "match_rms_adamw"):

        def make(params: Mapping[str, Any], adjust: str = adjust) -> list[Any]:
            matrices = [p for key, p in params.items() if is_matrix(key)]
            vectors = [p for key, p in params.items() if not is_matrix(key) and key != "table"]
            return [
                torch.optim.Muon(matrices, lr=0.03, weight_decay=0.2, adjust_lr_fn=adjust),
                torch.optim.AdamW(vectors, lr=0.03, weight_decay=0.0),
                torch.optim.AdamW([params["table"]], lr=0.03, weight_decay=0.2),
            ]

        optimizer = optim.muon(
            0.03, axes=AXES, weight_decay=0.2, adjust=adjust, dtype=torch.bfloat16, outputs="first"
        )
        found, expected = trained(optimizer), by_torch(make)
        # 8 bits of mantissa; the order of sums differs between a batch of matrices and one.
        assert_same(found, expected, atol=2e-2 * 0.03 * STEPS)
        for key, value in apart(found).items():
            if not is_matrix(key):
                torch.testing.assert_close(value, expected[key], rtol=0, atol=1e-12, msg=key)


@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_is_the_equations_in_float64(nesterov: bool) -> None:
    a, b, c = 3.4445, -4.7750, 2.0315

    def rule(p: torch.Tensor, g: torch.Tensor, memory: Any, t: int) -> torch.Tensor:
        if p.ndim < 2 or p.shape == (5, 6):
            return p - 0.1 * g
        m = memory["m"] = 0.9 * memory.get("m", torch.zeros_like(p)) + 0.1 * g
        x = 0.9 * m + 0.1 * g if nesterov else m
        x = x / torch.linalg.norm(x)
        for _ in range(5):
            x = a * x + b * (x @ x.T @ x) + c * (x @ x.T @ x @ x.T @ x)
        outputs, inputs = p.shape[1], p.shape[0]  # x @ W
        return p - 0.03 * (math.sqrt(max(1, outputs / inputs)) * x + 0.2 * p)

    optimizer = optim.muon(
        0.03, axes=AXES, momentum=0.9, nesterov=nesterov, weight_decay=0.2, others=optim.sgd(0.1)
    )
    assert_same(trained(optimizer), by_rule(rule), atol=1e-10)


def test_q_k_and_v_in_one_parameter_are_three_matrices() -> None:
    torch.manual_seed(0)
    parts = [torch.randn(2, 6, 3, 4, dtype=torch.float64) for _ in range(3)]
    one = {"w": torch.stack(parts, dim=3)}
    three = dict(zip("qkv", parts, strict=True))
    found = _orthogonal(one, {"w": "layers embed heads qkv head_dim"})["w"]
    expected = _orthogonal(three, dict.fromkeys("qkv", "layers embed heads head_dim"))
    for i, name in enumerate("qkv"):
        torch.testing.assert_close(found[:, :, :, i], expected[name])


def _orthogonal(grads: Any, axes: Any) -> Any:
    transform = optim.scale_by_muon(axes=axes)
    return transform.update(grads, transform.init(grads))[0]


@given(
    rows=st.integers(1, 6),
    columns=st.integers(1, 6),
    stack=st.lists(st.integers(1, 3), max_size=2),
    seed=st.integers(0, 9),
)
def test_orthogonalize_keeps_the_singular_vectors(
    rows: int, columns: int, stack: list[int], seed: int
) -> None:
    """The law: singular values go to those of the polynomial, vectors stay; so X Xᵀ nears one."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*stack, rows, columns, generator=generator, dtype=torch.float64)
    found = optim.orthogonalize(x)
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    s = s / torch.linalg.norm(s, dim=-1, keepdim=True)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    torch.testing.assert_close(found, u @ torch.diag_embed(s) @ vh, rtol=0, atol=1e-7)
    assert torch.equal(optim.orthogonalize(torch.zeros_like(x)), torch.zeros_like(x))


@pytest.mark.parametrize(
    ("dims", "marked"),
    [
        ("layers embed mlp", True),
        ("layers heads head_dim embed", True),
        ("layers embed heads qkv head_dim", True),
        ("layers experts embed mlp", True),
        ("embed mlp", True),
        ("layers embed experts", True),
        ("vocab embed", False),
        ("positions embed", False),
        ("layers heads qkv head_dim", False),
        ("layers mlp", False),
        ("", False),
    ],
)
def test_matrix_mask(dims: str, marked: bool) -> None:
    assert optim.matrix_mask({"x": [dims]}) == {"x": [marked]}


# Stacking never changes a number

MAKERS: Mapping[str, Callable[[Any], optim.GradientTransformation]] = {
    "lion": lambda axes: optim.lion(0.1),
    "lamb": lambda axes: optim.lamb(0.1, axes=axes),
    "adafactor": lambda axes: optim.adafactor(0.1, axes=axes),
    "muon": lambda axes: optim.muon(0.1, axes=axes),
}


@given(name=st.sampled_from(sorted(MAKERS)), seed=st.integers(0, 99))
def test_stacked_layers_are_updated_as_each_alone(name: str, seed: int) -> None:
    params, grads = drawn(seed), drawn(seed + 100)
    optimizer = MAKERS[name](AXES)
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    for i in range(LAYERS):
        layer = lambda values, i=i: {name: stack[i] for name, stack in values["blocks"].items()}
        alone = MAKERS[name]({name: dims for name, (dims, _) in LAYER.items()})
        expected, _ = alone.update(layer(grads), alone.init(layer(params)), layer(params))
        for key, value in expected.items():
            torch.testing.assert_close(
                updates["blocks"][key][i], value, rtol=1e-9, atol=1e-12, msg=key
            )


# Schedules


@pytest.mark.parametrize(
    ("name", "options", "right"),
    [
        ("inverse_sqrt", {"warmup_steps": 10}, [0.1, 0.2, 1.0, (10 / 11) ** 0.5, 0.1**0.5]),
        ("inverse_sqrt", {"warmup_steps": 0}, [1.0, 0.5**0.5, 0.1**0.5, (1 / 11) ** 0.5, 0.1]),
        ("inverse_sqrt", {"warmup_steps": 1}, [1.0, 0.5**0.5, 0.1**0.5, (1 / 11) ** 0.5, 0.1]),
        (
            "constant",
            {"warmup_steps": 10, "warmup": "log"},
            [math.log(2) / math.log(11), math.log(3) / math.log(11), 1.0, 1.0, 1.0],
        ),
        ("constant", {"warmup_steps": 0, "warmup": "log"}, [1.0] * 5),
    ],
)  # fmt: skip
def test_learning_rates_at_updates(name: str, options: Any, right: list[float]) -> None:
    # B56: DeepSpeed#5287, accelerate#2124, gpt-neox#1373, Megatron-Bridge#5399, torchtitan#1261
    schedule = getattr(schedules, name)(1.0, **options)
    counts = [0, 1, 9, 10, 99]
    assert [schedule(k) for k in counts] == pytest.approx(right, rel=1e-12)
    now = [schedule(torch.tensor(k)).item() for k in counts]
    assert now == pytest.approx(right, rel=1e-12)


def test_the_papers_inverse_square_root() -> None:
    d, warmup = 64, 40
    schedule = schedules.inverse_sqrt((d * warmup) ** -0.5, warmup_steps=warmup)
    for k in (1, 2, 39, 40, 41, 1000):
        assert schedule(k - 1) == pytest.approx(d**-0.5 * min(k**-0.5, k * warmup**-1.5))


@given(
    warmup=st.sampled_from(["linear", "log"]),
    steps=st.integers(0, 50),
    low=st.floats(0, 1),
    name=st.sampled_from(["constant", "linear", "cosine", "wsd", "inverse_sqrt"]),
)
def test_a_ramp_rises_from_above_zero_to_the_peak(
    warmup: Any, steps: int, low: float, name: str
) -> None:
    ends: dict[str, Any] = {} if name == "constant" else {"min_lr": low}
    ends |= {"total_steps": 100} if name not in ("constant", "inverse_sqrt") else {}
    ends |= {"decay_steps": 20} if name == "wsd" else {}
    schedule = getattr(schedules, name)(1.0, warmup_steps=steps, warmup=warmup, **ends)
    rates = [schedule(k) for k in range(120)]
    top = max(steps, 1)
    assert rates[0] > 0 and rates[top - 1] == pytest.approx(1.0)
    assert all(a <= b + 1e-12 for a, b in zip(rates[: top - 1], rates[1:top], strict=True))
    assert all(a >= b - 1e-12 for a, b in zip(rates[top - 1 : -1], rates[top:], strict=True))
    for k in (0, steps, 119):
        assert schedule(torch.tensor(k)).item() == pytest.approx(rates[k], rel=1e-14)


# Errors


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: optim.lion(0.1, b1=1.0),
            "scale_by_lion: b1 is out of range.\n"
            "  b1 = 1.0 must be finite and at least 0, and below 1.\n"
            "  fix: pass a b1 in [0, 1)",
        ),
        (
            lambda: optim.adafactor(axes=None, decay_rate=-1.0),
            "scale_by_factored_rms: decay_rate is out of range.\n"
            "  decay_rate = -1.0 must be finite and at least 0.\n"
            "  fix: pass a decay_rate in [0, inf)",
        ),
        (
            lambda: optim.adafactor(axes=None, threshold=0.0),
            "clip_by_layer_rms: threshold is 0.\n  fix: threshold=1.0",
        ),
        (
            lambda: optim.adafactor(-1.0, axes=None),
            "adafactor: learning_rate is out of range.\n"
            "  learning_rate = -1.0 must be finite and at least 0.\n"
            "  fix: pass a learning_rate in [0, inf)",
        ),
        (
            lambda: optim.scale_by_parameter_rms(axes=None).update({"w": torch.ones(1)}, ()),
            "scale_by_parameter_rms: params is None.\n"
            "  the update is scaled to the size of the parameters.\n"
            "  fix: optimizer.update(grads, state, params)",
        ),
        (
            lambda: optim.scale_by_trust_ratio(axes=None).update({"w": torch.ones(1)}, ()),
            "scale_by_trust_ratio: params is None.\n"
            "  the ratio is that of the norm of the parameters.\n"
            "  fix: optimizer.update(grads, state, params)",
        ),
        (
            lambda: optim.muon(0.1, axes={"w": "embed mlp"}, adjust="rms"),
            "scale_by_muon: adjust 'rms' is unknown.\n"
            "  fix: one of ['original', 'match_rms_adamw']",
        ),
        (
            lambda: optim.muon(0.1, axes={"w": "embed mlp"}, outputs="rows"),
            "scale_by_muon: outputs 'rows' is unknown.\n  fix: one of ['first', 'last']",
        ),
        (
            lambda: schedules.constant(1.0, warmup="cubic"),
            "constant: warmup 'cubic' is unknown.\n  fix: one of ['linear', 'log']",
        ),
        (
            lambda: schedules.inverse_sqrt(1.0, warmup_steps=1, min_lr=2.0),
            "inverse_sqrt: min_lr is above the peak.\n"
            "  min_lr = 2.0, peak = 1.0.\n"
            "  fix: min_lr=1.0",
        ),
    ],
)
def test_value_error_texts(make: Callable[[], Any], text: str) -> None:
    with pytest.raises(ValueError) as caught:
        make()
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: optim.lamb(0.1, axes={"w": "embed"}).update(
                {"w": torch.ones(2, 3)},
                optim.lamb(0.1, axes=None).init({"w": torch.ones(2, 3)}),
                {"w": torch.ones(2, 3)},
            ),
            "scale_by_trust_ratio: axes['w'] does not name 2 dims.\n"
            "  axes: 'embed'\n"
            "  fix: axes=model.axes(config), a tree like the parameters; None where nothing is "
            "stacked",
        ),
        (
            lambda: optim.adafactor(axes={"v": "embed"}).init({"w": torch.ones(2)}),
            "scale_by_factored_rms: axes['w'] has no string of dim names.\n"
            "  fix: axes=model.axes(config), a tree like the parameters; None where nothing is "
            "stacked",
        ),
        (
            lambda: optim.scale_by_muon(axes={"b": "layers mlp"}).update(
                {"b": torch.ones(2, 3)}, optim.ScaleByMuonState({"b": torch.ones(2, 3)})
            ),
            "scale_by_muon: params['b'] is no matrix: 1 dims that are not stacked.\n"
            "  shape: (2, 3)\n"
            "  fix: pfx.optim.muon(..., axes=axes), which gives the others to AdamW",
        ),
    ],
)
def test_tree_error_texts(make: Callable[[], Any], text: str) -> None:
    with pytest.raises(TreeError) as caught:
        make()
    assert str(caught.value) == text


def test_axes_may_be_those_of_more_parameters() -> None:
    """A group of a partition sees a part of the parameters, and the axes of all."""
    whole = {"w": torch.ones(2, 3), "v": torch.ones(3)}
    axes = {"w": "layers embed", "v": "embed"}
    groups = {"a": optim.lamb(0.1, axes=axes), "b": optim.adafactor(axes=axes)}
    optimizer = optim.partition(groups, {"w": "a", "v": "b"})
    updates, _ = optimizer.update(whole, optimizer.init(whole), whole)
    assert tree.map(lambda u: u.shape, updates) == tree.map(lambda p: p.shape, whole)

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch.fx.experimental.proxy_tensor import make_fx

from pfx import optim, tree
from pfx.errors import TreeError
from pfx.optim import schedules

SHAPES = {"blocks": {"w": (2, 3, 4), "bias": (2, 4)}, "head": (4, 5), "scalar": ()}

# Every transformation and optimizer, for the laws that all of them obey.
TRANSFORMS = {
    "identity": optim.identity,
    "scale": lambda: optim.scale(-0.3),
    "scale_by_adam": optim.scale_by_adam,
    "trace": lambda: optim.trace(0.9),
    "nesterov": lambda: optim.trace(0.9, nesterov=True),
    "clip_by_global_norm": lambda: optim.clip_by_global_norm(0.5),
    "clip_by_value": lambda: optim.clip_by_value(0.2),
    "add_decayed_weights": lambda: optim.add_decayed_weights(0.1),
    "masked_decay": lambda: optim.add_decayed_weights(0.1, mask=lambda p: tree.map(is_matrix, p)),
    "scale_by_learning_rate": lambda: optim.scale_by_learning_rate(0.1),
    "scheduled": lambda: optim.scale_by_learning_rate(schedules.cosine(0.1, 9, warmup_steps=3)),
    "sgd": lambda: optim.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: optim.adam(0.1),
    "adamw": lambda: optim.adamw(schedules.wsd(0.1, 9, decay_steps=3, warmup_steps=2)),
    "clipped_adamw": lambda: optim.chain(
        optim.clip_by_global_norm(0.5), optim.adamw(0.1, mask=decayed(SHAPES))
    ),
    "lion": lambda: optim.lion(0.1, weight_decay=0.1),
    "lamb": lambda: optim.lamb(0.1, axes=AXES),
    "adafactor": lambda: optim.adafactor(0.1, axes=AXES, weight_decay=0.1),
    "muon": lambda: optim.muon(0.1, axes=AXES),
    "accumulated": lambda: optim.accumulate(optim.adamw(0.1), 2),
    "ema": lambda: optim.ema(0.9),
}
AXES = {
    "blocks": {"w": "layers embed mlp", "bias": "layers mlp"},
    "head": "embed mlp",
    "scalar": "",
}


def is_matrix(x):
    return x.ndim >= 2


def decayed(shapes):
    return tree.map(lambda shape: len(shape) >= 2, shapes, is_leaf=lambda x: isinstance(x, tuple))


def random_tree(seed, dtype=torch.float32, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return tree.map(
        lambda shape: (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(
            dtype
        ),
        SHAPES,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def train(optimizer, params, grads_of_step, steps):
    state = optimizer.init(params)
    for step in range(steps):
        updates, state = optimizer.update(grads_of_step(step), state, params)
        params = optim.apply_updates(params, updates)
    return params, state


def train_torch(make, params, grads_of_step, steps):
    leaves = [torch.nn.Parameter(p.clone()) for p in tree.leaves(params)]
    reference = make(leaves)
    for step in range(steps):
        for leaf, grad in zip(leaves, tree.leaves(grads_of_step(step)), strict=True):
            leaf.grad = grad.clone()
        reference.step()
    return [leaf.detach() for leaf in leaves]


def assert_equal_trees(left, right, rtol=0.0, atol=0.0):
    assert tree.structure(left) == tree.structure(right)
    for a, b in zip(tree.leaves(left), tree.leaves(right), strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol)


# Against torch.optim


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"b1": 0.8, "b2": 0.95, "eps": 1e-4, "weight_decay": 0.3},
        {"b1": 0.0, "b2": 0.5, "weight_decay": 0.0},
    ],
)
def test_adamw_is_torchs_adamw(options):
    rename = dict(options)
    betas = (rename.pop("b1", 0.9), rename.pop("b2", 0.999))
    params, grads = random_tree(0, torch.float64), lambda k: random_tree(k + 1, torch.float64)
    expected = train_torch(
        lambda leaves: torch.optim.AdamW(leaves, lr=0.03, betas=betas, **rename), params, grads, 20
    )
    found, _ = train(optim.adamw(0.03, **options), params, grads, 20)
    assert_equal_trees(tree.leaves(found), expected, atol=1e-12)


def test_adam_is_torchs_adam():
    params, grads = random_tree(0, torch.float64), lambda k: random_tree(k + 1, torch.float64)
    expected = train_torch(lambda leaves: torch.optim.Adam(leaves, lr=0.03), params, grads, 20)
    found, _ = train(optim.adam(0.03), params, grads, 20)
    assert_equal_trees(tree.leaves(found), expected, atol=1e-12)


@pytest.mark.parametrize(
    "options", [{}, {"momentum": 0.9}, {"momentum": 0.7, "nesterov": True}], ids=str
)
def test_sgd_is_torchs_sgd(options):
    params, grads = random_tree(0, torch.float64), lambda k: random_tree(k + 1, torch.float64)
    expected = train_torch(
        lambda leaves: torch.optim.SGD(leaves, lr=0.03, **options), params, grads, 20
    )
    found, _ = train(optim.sgd(0.03, **options), params, grads, 20)
    assert_equal_trees(tree.leaves(found), expected, atol=1e-12)


def test_clipped_and_scheduled_adamw_is_torchs_loop():
    schedule = schedules.cosine(0.1, 20, warmup_steps=5, min_lr=0.01)
    params, grads = random_tree(0, torch.float64), lambda k: random_tree(k + 1, torch.float64)
    leaves = [torch.nn.Parameter(p.clone()) for p in tree.leaves(params)]
    reference = torch.optim.AdamW(leaves)
    optimizer = optim.chain(optim.clip_by_global_norm(3.0), optim.adamw(schedule))
    state = optimizer.init(params)
    for step in range(20):
        for leaf, grad in zip(leaves, tree.leaves(grads(step)), strict=True):
            leaf.grad = grad.clone()
        norm = torch.nn.utils.clip_grad_norm_(leaves, 3.0)
        reference.param_groups[0]["lr"] = schedule(step)
        reference.step()
        updates, state = optimizer.update(grads(step), state, params)
        params = optim.apply_updates(params, updates)
        torch.testing.assert_close(optim.pre_clip_norm(state), norm, rtol=1e-12, atol=0.0)
        assert optim.learning_rate(state).item() == schedule(step)
    # clip_grad_norm_ divides by norm + 1e-6, a relative 1e-7 that Adam mostly cancels.
    assert_equal_trees(tree.leaves(params), [p.detach() for p in leaves], atol=1e-7)


def test_adamw_in_float32_is_torchs_to_rounding():
    params, grads = random_tree(0), lambda k: random_tree(k + 1)
    expected = train_torch(lambda leaves: torch.optim.AdamW(leaves, lr=0.03), params, grads, 20)
    found, _ = train(optim.adamw(0.03), params, grads, 20)
    assert_equal_trees(tree.leaves(found), expected, atol=2e-6)


# The known faults of other systems


def test_making_the_state_is_not_a_step():
    # B41: Megatron-LM#5976 (#5974), torchtitan#4382: the wrong value is -0.0744137
    params, grads = {"w": torch.zeros(())}, {"w": torch.ones(())}
    optimizer = optim.adam(0.1, eps=0.0)
    state = optimizer.init(params)
    assert [leaf.item() for leaf in tree.leaves(state)] == [0] * 5
    saved = [leaf.clone() for leaf in tree.leaves(state)]
    updates, _ = optimizer.update(grads, state, params)
    assert optim.apply_updates(params, updates)["w"].item() == pytest.approx(-0.1, abs=1e-8)
    for before, after in zip(saved, tree.leaves(state), strict=True):
        assert torch.equal(before, after)


@pytest.mark.parametrize("name", sorted(TRANSFORMS))
def test_init_is_all_zeros(name):
    # B41, for every transformation: counts are 0-d int64, moments look like the parameters
    params = random_tree(0, torch.bfloat16)
    shapes = {tuple(p.shape) for p in tree.leaves(params)} | {()}
    shapes |= {(2, 3, 1), (2, 1, 4), (4, 1), (1, 5)} if name == "adafactor" else set()
    if name == "ema":
        params = tree.map(torch.zeros_like, params)  # its average starts as they are
    for leaf in tree.leaves(TRANSFORMS[name]().init(params)):
        assert not leaf.any()
        assert leaf.dtype in (torch.int64, torch.float32, torch.float64)
        assert tuple(leaf.shape) in shapes


def test_an_infinite_norm_is_told_and_never_flips_a_gradient():
    # B45: DeepSpeed#8614, whose sentinel norm -1 turned b into -2.000002
    clip = optim.clip_by_global_norm(1.0)
    grads = {"a": torch.tensor([math.inf]), "b": torch.tensor([2.0])}
    updates, state = clip.update(grads, clip.init(grads))
    assert optim.pre_clip_norm(state).item() == math.inf
    assert updates["b"].item() == 0.0
    grads = {"a": torch.tensor([math.nan]), "b": torch.tensor([2.0])}
    updates, state = clip.update(grads, clip.init(grads))
    assert math.isnan(optim.pre_clip_norm(state).item())
    assert math.isnan(updates["b"].item())  # a partial update would hide the fault


def test_clipping_zeros_is_a_no_op():
    # B45: DeepSpeed#8614
    clip = optim.clip_by_global_norm(1.0)
    grads = {"a": torch.zeros(1), "b": torch.zeros(1)}
    updates, state = clip.update(grads, clip.init(grads))
    assert_equal_trees(updates, grads)
    assert optim.pre_clip_norm(state).item() == 0.0


@pytest.mark.parametrize(
    ("limit", "grad", "right"),
    [
        (0.0, [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]),
        (0.0, [3.0, 4.0], [0.0, 0.0]),
        (5.0, [3.0, 4.0], [3.0, 4.0]),
        (1e-60, [0.0, 0.0], [0.0, 0.0]),  # a limit that is 0 in float32
        (1e-60, [3.0, 4.0], [0.0, 0.0]),
    ],
)
def test_clip_with_limit_zero(limit, grad, right):
    # B46: optax#1752
    clip = optim.clip_by_global_norm(limit)
    grads = {"w": torch.tensor(grad)}
    updates, state = clip.update(grads, clip.init(grads))
    assert torch.equal(updates["w"], torch.tensor(right))
    assert optim.pre_clip_norm(state).item() == math.hypot(*grad)


def test_clip_at_zero_has_no_nan_in_its_derivative():
    # B46, for someone who differentiates through the optimizer
    clip = optim.clip_by_global_norm(0.0)

    def loss(norm_free):
        grads = {"w": norm_free * torch.tensor([3.0, 4.0])}
        return clip.update(grads, clip.init(grads))[0]["w"].sum()

    assert torch.func.grad(loss)(torch.tensor(1.0)).item() == 0.0


def test_weight_decay_follows_the_role_of_a_parameter():
    # B54: open_clip#358, verl#5070 (#7215), pytorch#101343, on one device
    params = {"W": torch.ones(2, 2), "b": torch.ones(2), "norm": torch.ones(2)}
    axes = {"W": "embed mlp", "b": "mlp", "norm": "embed"}
    optimizer = optim.adamw(0.1, weight_decay=0.5, mask=optim.decay_mask(axes))
    found, _ = train(optimizer, params, lambda _: tree.map(torch.zeros_like, params), 1)
    assert_equal_trees(found, {**params, "W": torch.full((2, 2), 0.95)})
    # Flattened and stacked copies of the same parameters are treated alike.
    flat = {"W": torch.ones(4), "b": torch.ones(1, 2), "norm": torch.ones(3, 2, 1)}
    found, _ = train(optimizer, flat, lambda _: tree.map(torch.zeros_like, flat), 1)
    assert_equal_trees(found, {**flat, "W": torch.full((4,), 0.95)})


@pytest.mark.parametrize(
    ("dims", "decays"),
    [
        ("vocab embed", True),
        ("layers embed mlp", True),
        ("layers embed heads head_dim", True),
        ("layers heads head_dim embed", True),
        ("layers embed head_dim", True),
        ("layers experts embed mlp", True),
        ("layers embed experts", True),
        ("embed", False),
        ("layers embed", False),
        ("layers heads head_dim", False),
        ("layers kv_heads head_dim", False),
        ("layers head_dim", False),
        ("layers embed heads qkv head_dim", True),
        ("layers heads qkv head_dim", False),
        ("layers", False),
        ("", False),
    ],
)
def test_decay_mask(dims, decays):
    assert optim.decay_mask({"x": [dims]}) == {"x": [decays]}


def test_decay_mask_stacks_more_than_layers():
    axes = {"w": "layers experts embed mlp", "bias": "layers experts mlp", "to": "embed experts"}
    mask = optim.decay_mask(axes, stack=("layers", "experts"))
    assert mask == {"w": True, "bias": False, "to": True}


# Laws


@given(
    names=st.lists(st.sampled_from(sorted(TRANSFORMS)), min_size=0, max_size=4),
    cut=st.tuples(st.integers(0, 4), st.integers(0, 4)),
)
def test_chain_is_associative_and_identity_its_unit(names, cut):
    parts = [TRANSFORMS[name]() for name in names]
    low, high = sorted(cut)
    flat = optim.chain(*parts)
    nested = optim.chain(
        optim.chain(*parts[:low]),
        optim.identity(),
        optim.chain(optim.chain(*parts[low:high]), optim.chain(*parts[high:])),
    )
    params, grads = random_tree(0), lambda k: random_tree(k + 1)
    left, left_state = train(flat, params, grads, 2)
    right, right_state = train(nested, params, grads, 2)
    assert_equal_trees(left, right)
    assert_equal_trees(tree.leaves(left_state), tree.leaves(right_state))


@given(name=st.sampled_from(sorted(TRANSFORMS)), flags=st.lists(st.booleans(), min_size=4))
def test_masked_leaves_are_untouched_and_the_others_as_alone(name, flags):
    params, grads = random_tree(0), random_tree(1)
    treedef = tree.structure(params)
    mask = tree.unflatten(treedef, flags[:4])
    # A mask or axes inside the transformation would not fit a list of some parameters.
    whole = name in ("clipped_adamw", "lamb", "adafactor", "muon")
    inner = optim.scale_by_adam() if whole else TRANSFORMS[name]()
    masked = optim.masked(inner, mask)
    updates, state = masked.update(grads, masked.init(params), params)

    def part(values):
        return [v for v, flag in zip(tree.leaves(values), flags, strict=False) if flag]

    alone, alone_state = inner.update(part(grads), inner.init(part(params)), part(params))
    assert_equal_trees(part(updates), alone)
    assert_equal_trees(tree.leaves(state), tree.leaves(alone_state))
    for before, after, flag in zip(tree.leaves(grads), tree.leaves(updates), flags, strict=False):
        assert flag or after is before


# Zero, or of a size whose square float32 can hold.
sizes = st.just(0.0) | st.floats(2**-50, 2**20, width=32)
numbers = sizes | sizes.map(lambda x: -x)


@given(
    limit=sizes,
    values=st.lists(st.lists(numbers, max_size=4), min_size=1, max_size=4),
)
@settings(max_examples=200)
def test_clip_law(limit, values):
    grads = [torch.tensor(leaf) for leaf in values]
    clip = optim.clip_by_global_norm(limit)
    updates, state = clip.update(grads, clip.init(grads))
    norm = optim.global_norm(grads)
    assert torch.equal(optim.pre_clip_norm(state), norm)
    assert optim.global_norm(updates).item() <= limit * (1 + 1e-6)
    if norm.item() <= limit:
        assert_equal_trees(updates, grads)
    for g, u in zip(grads, updates, strict=True):
        assert torch.all(g * u >= 0)  # never the other direction


@given(values=st.lists(st.lists(numbers, max_size=4), max_size=4))
def test_global_norm_is_the_norm_of_all_numbers(values):
    flat = [x for leaf in values for x in leaf]
    found = optim.global_norm([torch.tensor(leaf, dtype=torch.float64) for leaf in values])
    assert found.item() == pytest.approx(math.hypot(*flat), rel=1e-12)


def test_global_norm_accumulates_in_float32():
    # In bfloat16 a sum of ones stops at 256; in float16 300² overflows.
    assert optim.global_norm([torch.ones(4096, dtype=torch.bfloat16)]).item() == 64.0
    assert optim.global_norm([torch.tensor([300.0, 400.0], dtype=torch.float16)]).item() == 500.0
    mixed = [torch.ones(1), torch.tensor([1e-5], dtype=torch.float64)]
    assert optim.global_norm(mixed).item() == math.sqrt(1 + 1e-10)


@pytest.mark.parametrize("name", sorted(TRANSFORMS))
@pytest.mark.parametrize(
    ("dtype", "wide"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32)]
    + [(torch.float64, torch.float64)],
    ids=str,
)
def test_precision(name, dtype, wide):
    """Updates and moments are wide; the state keeps its dtypes; parameters keep theirs."""
    params, grads = random_tree(0, dtype), random_tree(1, dtype)
    transform = TRANSFORMS[name]()
    state = transform.init(params)
    updates, new_state = transform.update(grads, state, params)
    assert tree.structure(new_state) == tree.structure(state)
    for before, after in zip(tree.leaves(state), tree.leaves(new_state), strict=True):
        assert (before.dtype, before.shape) == (after.dtype, after.shape)
    for leaf in tree.leaves(new_state):
        assert leaf.ndim == 0 or leaf.dtype == wide
    if name not in ("identity", "masked_decay", "ema"):
        assert {u.dtype for u in tree.leaves(updates)} == {wide}
    applied = optim.apply_updates(params, updates)
    assert {p.dtype for p in tree.leaves(applied)} == {dtype}


def test_low_precision_gradients_lose_nothing_on_the_way():
    grads = {"w": torch.tensor([6e-8], dtype=torch.float16)}  # the smallest float16 there is
    params = {"w": torch.zeros(1)}
    optimizer = optim.chain(optim.clip_by_global_norm(1e-9), optim.sgd(1e-3))
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    assert updates["w"].item() == pytest.approx(-1e-12, rel=1e-6)


def test_updates_are_added():
    params = {"w": torch.ones(2, dtype=torch.bfloat16), "none": None}
    updates = {"w": torch.tensor([0.5, -1.0]), "none": None}
    applied = optim.apply_updates(params, updates)
    assert torch.equal(applied["w"], torch.tensor([1.5, 0.0], dtype=torch.bfloat16))
    assert applied["none"] is None


def test_updates_are_rounded_once():
    # Rounded to bfloat16 first, the update would be half a step, a tie that goes back to 1.
    params, updates = torch.ones(1, dtype=torch.bfloat16), torch.tensor([2**-8 + 2**-20])
    assert optim.apply_updates(params, updates).item() == 1 + 2**-7


def test_clip_by_value():
    clip = optim.clip_by_value(0.5)
    found = clip.update([torch.tensor([-2.0, 0.25, math.inf])], clip.init([]))[0]
    assert torch.equal(found[0], torch.tensor([-0.5, 0.25, 0.5]))


def test_learning_rate_and_norm_are_found_wherever_they_are():
    params = {"a": torch.ones(1), "b": torch.ones(1)}
    inner = optim.chain(optim.clip_by_global_norm(0.5), optim.sgd(0.25))
    optimizer = optim.chain(optim.identity(), optim.masked(inner, {"a": True, "b": False}))
    state = optimizer.init(params)
    assert optim.learning_rate(state).item() == 0.0
    _, state = optimizer.update(params, state, params)
    assert optim.learning_rate({"opt": [state]}).item() == 0.25
    assert optim.pre_clip_norm(state).item() == 1.0
    assert optim.learning_rate(optim.trace(0.9).init(params)) is None
    assert optim.pre_clip_norm(optim.adamw(0.1).init(params)) is None


# Tracing


def trace_step(optimizer, params, grads):
    """Trace update and apply on fake tensors; return the graph and its flat arguments."""
    state = optimizer.init(params)
    flat, treedef = tree.flatten((params, grads, state))

    def step(*leaves):
        params, grads, state = tree.unflatten(treedef, leaves)
        updates, state = optimizer.update(grads, state, params)
        return tree.leaves((optim.apply_updates(params, updates), state))

    return make_fx(step, tracing_mode="fake")(*flat), step, flat


@pytest.mark.parametrize("name", sorted(TRANSFORMS))
def test_traces_to_a_pure_graph_with_the_same_bits(name):
    graph, step, flat = trace_step(TRANSFORMS[name](), random_tree(0), random_tree(1))
    calls = [node for node in graph.graph.nodes if node.op == "call_function"]
    assert not [node.target for node in calls if node.target._schema.is_mutable]
    assert not [node for node in graph.graph.nodes if node.op == "get_attr"]
    copies = [leaf.clone() for leaf in flat]
    for found, expected in zip(graph(*flat), step(*flat), strict=True):
        assert torch.equal(found, expected)
    for leaf, copy in zip(flat, copies, strict=True):
        assert torch.equal(leaf, copy)


@pytest.mark.parametrize("name", sorted(TRANSFORMS))
def test_everything_stays_on_the_device_of_the_parameters(name):
    params = tree.map(lambda p: p.to("meta"), random_tree(0))
    updates, state = train(TRANSFORMS[name](), params, lambda _: params, 2)
    assert {leaf.device.type for leaf in tree.leaves((updates, state))} == {"meta"}


def test_init_traces():
    params = random_tree(0)
    flat, treedef = tree.flatten(params)
    optimizer = TRANSFORMS["clipped_adamw"]()
    graph = make_fx(
        lambda *leaves: tree.leaves(optimizer.init(tree.unflatten(treedef, leaves))),
        tracing_mode="fake",
    )(*flat)
    for found, expected in zip(graph(*flat), tree.leaves(optimizer.init(params)), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("name", "per_leaf"), [("adamw", 10), ("adam", 9), ("sgd", 4), ("clip_by_global_norm", 5)]
)
def test_operations_per_leaf(name, per_leaf):
    """A compiler runs these one by one: what the leaves share is computed once."""

    def operations(leaves):
        params = [torch.ones(3) for _ in range(leaves)]
        graph, _, _ = trace_step(TRANSFORMS[name](), params, params)
        return sum(node.op == "call_function" for node in graph.graph.nodes)

    assert operations(7) - operations(6) == per_leaf
    assert operations(6) - 6 * per_leaf < 30


def test_works_under_vmap_and_grad():
    optimizer = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(0.1))

    def after(grad):
        params = {"w": torch.ones(3)}
        updates, _ = optimizer.update({"w": grad}, optimizer.init(params), params)
        return optim.apply_updates(params, updates)["w"]

    grads = torch.stack([torch.arange(1.0, 4.0), torch.arange(4.0, 1.0, -1.0)])
    batched = torch.func.vmap(after)(grads)
    torch.testing.assert_close(batched, torch.stack([after(g) for g in grads]))
    assert torch.func.grad(lambda g: after(g).sum())(grads[0]).isfinite().all()


# Errors


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: optim.adamw(-0.1),
            "scale_by_learning_rate: learning_rate is out of range.\n"
            "  learning_rate = -0.1 must be finite and at least 0.\n"
            "  fix: pass a learning_rate in [0, inf)",
        ),
        (
            lambda: optim.adamw(0.1, b1=1.0),
            "scale_by_adam: b1 is out of range.\n"
            "  b1 = 1.0 must be finite and at least 0, and below 1.\n"
            "  fix: pass a b1 in [0, 1)",
        ),
        (
            lambda: optim.adam(0.1, b2=-0.5),
            "scale_by_adam: b2 is out of range.\n"
            "  b2 = -0.5 must be finite and at least 0, and below 1.\n"
            "  fix: pass a b2 in [0, 1)",
        ),
        (
            lambda: optim.adam(0.1, eps=math.nan),
            "scale_by_adam: eps is out of range.\n"
            "  eps = nan must be finite and at least 0.\n"
            "  fix: pass a eps in [0, inf)",
        ),
        (
            lambda: optim.adamw(0.1, weight_decay=math.inf),
            "add_decayed_weights: weight_decay is out of range.\n"
            "  weight_decay = inf must be finite and at least 0.\n"
            "  fix: pass a weight_decay in [0, inf)",
        ),
        (
            lambda: optim.sgd(0.1, momentum=1.5),
            "sgd: momentum is out of range.\n"
            "  momentum = 1.5 must be finite and at least 0, and below 1.\n"
            "  fix: pass a momentum in [0, 1)",
        ),
        (
            lambda: optim.sgd(0.1, nesterov=True),
            "sgd: nesterov needs a momentum.\n  fix: momentum=0.9",
        ),
        (
            lambda: optim.trace(1.5),
            "trace: decay is out of range.\n"
            "  decay = 1.5 must be finite and at least 0, and below 1.\n"
            "  fix: pass a decay in [0, 1)",
        ),
        (
            lambda: optim.clip_by_global_norm(-1.0),
            "clip_by_global_norm: max_norm is out of range.\n"
            "  max_norm = -1.0 must be finite and at least 0.\n"
            "  fix: pass a max_norm in [0, inf)",
        ),
        (
            lambda: optim.add_decayed_weights(0.1).update({"w": torch.ones(1)}, ()),
            "add_decayed_weights: params is None.\n"
            "  the decay is a multiple of the parameters.\n"
            "  fix: optimizer.update(grads, state, params)",
        ),
    ],
)
def test_value_error_texts(make, text):
    with pytest.raises(ValueError) as caught:
        make()
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("mask", "detail"),
    [
        (
            {"blocks": {"w": True}, "head": True, "scalar": False},
            """['blocks']: keys differ; missing ["['bias']"], extra []""",
        ),
        (
            {"blocks": True, "head": {"w": True}, "scalar": False},
            "['head']: a dict where the value is a Tensor of shape (4, 5)",
        ),
    ],
)
def test_a_mask_that_does_not_fit_names_the_key_path(mask, detail):
    with pytest.raises(TreeError) as caught:
        optim.adamw(0.1, mask=mask).init(random_tree(0))
    assert str(caught.value) == (
        "masked: the mask does not match the parameters.\n"
        f"  {detail}\n"
        "  fix: give the mask the parameters' keys, or one bool for a whole subtree"
    )


def test_a_mask_may_stop_at_a_subtree():
    mask = {"blocks": False, "head": True, "scalar": False}
    double = optim.masked(optim.scale(2.0), mask)
    params = random_tree(0)
    found, _ = double.update(params, double.init(params))
    assert_equal_trees(found, {**params, "head": params["head"] * 2})


def test_a_mask_of_values_is_refused():
    mask = {"blocks": {"w": True, "bias": torch.tensor(True)}, "head": True, "scalar": True}
    with pytest.raises(TypeError) as caught:
        optim.masked(optim.scale(2.0), mask).init(random_tree(0))
    assert str(caught.value) == (
        "masked: the mask at params['blocks']['bias'] is not a bool.\n"
        "  got a Tensor; a mask is fixed before any value is known.\n"
        "  fix: True or False"
    )


def test_axes_that_are_not_names_are_refused():
    with pytest.raises(TypeError) as caught:
        optim.decay_mask({"blocks": {"w": 2}})
    assert str(caught.value) == (
        "role_mask: axes['blocks']['w'] is not a string of dim names.\n"
        "  got a int.\n"
        '  fix: "layers embed mlp"'
    )


def test_integer_leaves_are_refused():
    with pytest.raises(TypeError) as caught:
        optim.adamw(0.1).init({"table": [torch.zeros(2, dtype=torch.int32)]})
    assert str(caught.value) == (
        "optim: leaf ['table'][0] has dtype torch.int32.\n"
        "  parameters, gradients and moments must be real floating-point tensors.\n"
        "  fix: keep this leaf out of the parameters"
    )


def test_gradients_unlike_the_parameters_name_the_key_path():
    optimizer, params = optim.adamw(0.1), {"a": {"w": torch.ones(1)}}
    with pytest.raises(TreeError, match=r"\['a'\]: keys differ; missing \[\"\['w'\]\"\]"):
        optimizer.update({"a": {"v": torch.ones(1)}}, optimizer.init(params), params)

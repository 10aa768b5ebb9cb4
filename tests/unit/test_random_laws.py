"""The laws of `pfx.random`: blocks, batches of keys, transforms and traces."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from pfx import random
from pfx.random import threefry

KEY = random.key(42)


def draw_block(data: st.DataObject) -> tuple[list[int], list[int], list[int]]:
    whole = data.draw(st.lists(st.integers(0, 9), max_size=4), label="global shape")
    start = [data.draw(st.integers(0, size)) for size in whole]
    shape = [data.draw(st.integers(0, size - at)) for size, at in zip(whole, start, strict=True)]
    return shape, start, whole


@given(st.data(), st.sampled_from([1, 3, 16, 1 << 16]), st.sampled_from([32, 64]))
def test_a_block_is_the_slice_of_the_whole(data: st.DataObject, cache: int, width: int) -> None:
    shape, start, whole = draw_block(data)
    window = tuple(slice(at, at + size) for at, size in zip(start, shape, strict=True))
    zeros = [0] * len(whole)
    want = torch.ops.pfx.random_bits(KEY, whole, zeros, whole, width)[window]
    keys = random.split(KEY, data.draw(st.integers(0, 4), label="keys"))
    with pytest.MonkeyPatch.context() as patch:  # small blocks, to go round every loop
        patch.setattr(threefry, "_BLOCK", cache)
        patch.setattr(threefry, "_DEVICE_BLOCK", cache)
        assert torch.equal(torch.ops.pfx.random_bits(KEY, shape, start, whole, width), want)
        assert torch.equal(threefry.random_bits_torch(KEY, shape, start, whole, width), want)
        batch = torch.ops.pfx.random_bits(keys, shape, start, whole, width)
        assert torch.equal(threefry.random_bits_torch(keys, shape, start, whole, width), batch)
    assert batch.shape == (len(keys), *shape)
    for key, words in zip(keys, batch, strict=True):
        assert torch.equal(words, torch.ops.pfx.random_bits(key, shape, start, whole, width))


@given(st.data())
def test_both_kernels_of_the_hash_agree(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(0, 4), max_size=3))
    low = st.integers(-(2**63), 2**63 - 1)
    size = math.prod(shape)
    counts = torch.tensor(data.draw(st.lists(low, min_size=size, max_size=size)), dtype=torch.int64)
    counts = counts.reshape(shape)
    batch = shape[data.draw(st.integers(0, len(shape))) :]
    for key in (KEY, random.split(KEY, batch)):
        words = torch.ops.pfx.threefry(key, counts)
        assert (words.shape, words.dtype) == ((*shape, 2), torch.uint32)
        assert torch.equal(words, threefry.threefry_torch(key, counts))


# Under transforms and traces.

DRAWERS: dict[str, Callable[[Tensor], Tensor]] = {
    "split": lambda key: random.split(key, 3),
    "fold_in": lambda key: random.fold_in(key, 5),
    "bits": lambda key: random.bits(key, (3, 2)),
    "uniform": lambda key: random.uniform(key, (3, 2), minval=-0.3),
    "normal": lambda key: random.normal(key, (3, 2)),
    "normal in float64": lambda key: random.normal(key, (3, 2), torch.float64),
    "truncated_normal": lambda key: random.truncated_normal(key, -1, 1, (3, 2)),
    "bernoulli": lambda key: random.bernoulli(key, 0.3, (3, 2)),
    "randint": lambda key: random.randint(key, (3, 2), 0, 9),
    "permutation": lambda key: random.permutation(key, 9),
    "permutation of rows": lambda key: random.permutation(key, torch.arange(6).reshape(3, 2)),
    "categorical": lambda key: random.categorical(key, torch.zeros(4), shape=(3,)),
}


@pytest.mark.parametrize("name", DRAWERS)
def test_vmap_over_keys_is_a_loop(name: str) -> None:
    draw = DRAWERS[name]
    keys = random.split(KEY, (4, 3))
    want = torch.stack([torch.stack([draw(key) for key in row]) for row in keys])
    assert torch.equal(torch.func.vmap(torch.func.vmap(draw))(keys), want)
    swapped = torch.func.vmap(torch.func.vmap(draw), in_dims=1, out_dims=1)(keys)
    assert torch.equal(swapped, want)
    assert torch.equal(torch.func.vmap(draw, in_dims=1)(keys[0].mT.contiguous()), want[0])


def test_vmap_pairs_keys_with_data() -> None:
    keys, data = random.split(KEY, 3), torch.arange(4)
    row = torch.func.vmap(random.fold_in, (None, 0))
    column = torch.func.vmap(random.fold_in, (0, None))
    table = torch.stack([torch.stack([random.fold_in(key, int(d)) for d in data]) for key in keys])
    assert torch.equal(torch.func.vmap(row, (0, None))(keys, data), table)
    assert torch.equal(torch.func.vmap(column, (None, 0), 1)(keys, data), table)
    assert torch.equal(torch.func.vmap(random.fold_in)(keys, data[:3]), table[range(3), range(3)])
    split = torch.func.vmap(lambda key, d: random.split(random.fold_in(key, d), (2, 2)))
    want = torch.stack([random.split(random.fold_in(key, 0), (2, 2)) for key in keys])
    assert torch.equal(split(keys, torch.zeros(3, dtype=torch.int64)), want)


def targets(function: Callable[..., Any], *args: Tensor) -> list[str]:
    graph = make_fx(function, tracing_mode="fake")(*args).graph
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("name", DRAWERS)
def test_a_trace_replays_other_keys(name: str) -> None:
    draw = DRAWERS[name]
    graph = make_fx(draw, tracing_mode="fake")(KEY)
    other = random.key(7)
    assert torch.equal(graph(other), draw(other))


def test_each_draw_is_one_opaque_node_and_pointwise_ops() -> None:
    assert targets(lambda key: random.bits(key, (3,)), KEY) == ["pfx.random_bits.default"]
    assert targets(torch.func.vmap(lambda key: random.bits(key, (3,))), random.split(KEY)) == [
        "pfx.random_bits.default"
    ]
    assert targets(lambda key: random.split(key, 3), KEY) == [
        "aten.arange.default",
        "pfx.threefry.default",
    ]
    assert targets(lambda key: random.normal(key, (3,)), KEY) == [
        "pfx.random_bits.default",
        "aten.view.dtype",
        "aten.detach.default",
        "aten.__rshift__.Scalar",
        "aten.bitwise_and.Scalar",
        "aten._to_copy.default",
        "aten.mul.Tensor",
        "aten.add.Tensor",
        "aten.erfinv.default",
        "aten.mul.Tensor",
    ]


def test_a_trace_may_begin_with_a_seed() -> None:
    def draw(seed: Tensor, step: Tensor) -> Tensor:
        return random.uniform(random.fold_in(random.key(seed), step), (3,)) + random.uniform(
            random.key(5), (3,)
        )

    arguments = torch.tensor(2**40 + 3), torch.tensor(9)
    graph = make_fx(draw, tracing_mode="fake")(torch.tensor(0), torch.tensor(0))
    assert torch.equal(graph(*arguments), draw(*arguments))
    assert not any(node.op == "get_attr" for node in graph.graph.nodes)


def dropped(x: Tensor, key: Tensor) -> Tensor:
    return (x * random.bernoulli(key, 0.5, x.shape)).square().sum() / 2


def test_keys_under_gradients() -> None:
    x = torch.arange(8.0)
    want = x * random.bernoulli(KEY, 0.5, (8,))
    assert 0 < want.count_nonzero() < 7
    assert torch.equal(torch.func.grad(dropped)(x, KEY), want)
    assert torch.equal(torch.func.grad(lambda x: dropped(x, KEY))(x), want)
    second = torch.func.jacrev(torch.func.grad(dropped))(x, KEY)
    assert torch.equal(second.diagonal(), random.bernoulli(KEY, 0.5, (8,)).float())
    keys = random.split(KEY, 3)
    rows = torch.stack([torch.func.grad(dropped)(x, key) for key in keys])
    assert torch.equal(torch.func.vmap(torch.func.grad(dropped), (None, 0))(x, keys), rows)
    graph = make_fx(torch.func.grad(dropped), tracing_mode="fake")(x, KEY)
    assert torch.equal(graph(x, KEY), want)
    found = [str(node.target) for node in graph.graph.nodes]
    assert found.count("pfx.random_bits.default") == 1


def test_bounds_have_gradients() -> None:
    high = torch.tensor(2.0)
    draw = lambda high: random.uniform(KEY, (3,), maxval=high).sum()
    torch.testing.assert_close(torch.func.grad(draw)(high), random.uniform(KEY, (3,)).sum())


def test_no_data_is_needed() -> None:
    key = KEY.to("meta")
    x = random.normal(random.fold_in(key, 3), (2**20, 2**20))
    assert (x.device.type, x.shape) == ("meta", (2**20, 2**20))


def test_no_global_generator_is_touched() -> None:
    state = torch.get_rng_state()
    before = {name: draw(KEY) for name, draw in DRAWERS.items()}
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(1)
    for name, draw in DRAWERS.items():
        assert torch.equal(draw(KEY), before[name])

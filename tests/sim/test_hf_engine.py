"""Any table of names and layouts: files hold what einops says, and come back on any mesh bit for bit."""

from __future__ import annotations

import itertools
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from einops import rearrange
from hypothesis import given
from hypothesis import strategies as st

import pfx
from pfx import P
from pfx.interop.hf import Table, load_params, merge, save_params, split
from pfx.interop.hf.runs import count, held, product
from pfx.testing import meshes
from pfx.testing import specs as draw_specs

safetensors_torch = pytest.importorskip("safetensors.torch")


@st.composite
def index_along(draw: st.DrawFn, size: int) -> slice | tuple[int, ...]:
    if draw(st.booleans()):
        first = draw(st.integers(0, size))
        return slice(first, draw(st.integers(first, size)))
    return tuple(sorted(draw(st.sets(st.integers(0, size - 1)))))


@given(st.data())
def test_runs_of_a_product_are_its_rows(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    indices = [data.draw(index_along(size)) for size in sizes]
    found = product([(held(i, n), n) for i, n in zip(indices, sizes, strict=True)])
    lists = [
        list(range(n))[i] if isinstance(i, slice) else i
        for i, n in zip(indices, sizes, strict=True)
    ]
    expected = [np.ravel_multi_index(p, sizes) for p in itertools.product(*lists)]
    rows = [row for first, n in found for row in range(first, first + n)]
    assert sorted(rows) == sorted(expected)
    assert rows == expected or not rows
    assert count(found) == len(expected)


@given(st.data())
def test_runs_leave_out_padding(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 9))
    real = data.draw(st.integers(0, size))
    index = data.draw(index_along(size))
    rows = list(range(size))[index] if isinstance(index, slice) else list(index)
    found = [row for first, n in held(index, real) for row in range(first, first + n)]
    assert found == [row for row in rows if row < real]


SIZES = {"a": 4, "b": 6, "c": 2, "d": 3, "layers": 3, "experts": 2}


@st.composite
def tables(draw: st.DrawFn) -> tuple[Table, dict[str, str]]:
    """A table with stacks, groups, transpositions and fused parts; einops patterns to its files."""
    entries, axes, patterns = {}, {}, {}
    for number in range(draw(st.integers(1, 3))):
        stacked = draw(st.sampled_from([(), ("layers",), ("layers", "experts")]))
        inner = draw(st.lists(st.sampled_from("abcd"), min_size=1, max_size=3, unique=True))
        order = draw(st.permutations(inner))
        cuts = sorted(draw(st.sets(st.integers(1, len(order) - 1)))) if len(order) > 1 else []
        ends = [0, *cuts, len(order)]
        groups = [order[i:j] for i, j in itertools.pairwise(ends)]
        parts = draw(st.integers(1, 3))
        at = draw(st.integers(0, len(groups) - 1))
        before = draw(st.integers(0, len(groups[at])))
        name = f"x{number}." + "".join(f"{dim}.{{{dim}}}." for dim in stacked) + "w"
        for part in range(parts):
            fused = [list(group) for group in groups]
            if parts > 1:
                fused[at].insert(before, f"{part}/{parts}")
            dims = " ".join(f"({' '.join(group)})" for group in fused)
            entries[f"p{number}{part}"] = f"{name}: {dims}"
            axes[f"p{number}{part}"] = " ".join((*stacked, *inner))
            to = dims.replace(f"{part}/{parts}", "part") if parts > 1 else dims
            patterns[f"p{number}{part}"] = f"{' '.join(inner)} -> {to}"
    return Table(entries, axes, SIZES), patterns


def assert_same(a: Any, b: Any) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype, name
        assert torch.equal(a[name], b[name]), name


@given(st.data())
def test_any_table_reads_what_it_writes_and_what_einops_says(data: st.DataObject) -> None:
    table, patterns = data.draw(tables())
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    params = {
        ".".join(leaf.path)[2:-2]: torch.randn(leaf.shape, generator=generator)
        for leaf in table.leaves
    }
    mesh, other = data.draw(meshes(max_devices=6)), data.draw(meshes(max_devices=6))
    placed = pfx.device_put(params, mesh, data.draw(draw_specs(params, mesh)))
    specs = data.draw(draw_specs(params, other))
    with tempfile.TemporaryDirectory() as folder:
        most = data.draw(st.sampled_from([1, 100, 2**30]))
        save_params(f"{folder}/out", placed, table, config={}, max_shard_bytes=most)
        stored: dict[str, torch.Tensor] = {}
        for path in Path(folder, "out").glob("*.safetensors"):
            stored |= safetensors_torch.load_file(path)
        assert_same(load_params(f"{folder}/out", table), params)
        arrays = load_params(f"{folder}/out", table, mesh=other, specs=specs)
    assert_same(pfx.device_get(arrays), params)
    assert all(
        arrays[name].layout == pfx.device_put(params[name], other, specs[name]).layout
        for name in params
    )
    assert_same(stored, by_einops(table, patterns, params))


def by_einops(table: Table, patterns: dict[str, str], params: dict[str, Any]) -> dict[str, Any]:
    """What the files hold: each tensor a rearrangement of the stack of its parts."""
    out = {}
    for name, pieces in table.tensors.items():
        keys = [".".join(piece.leaf.path)[2:-2] for piece in pieces]
        values = [params[key][piece.position] for key, piece in zip(keys, pieces, strict=True)]
        pattern = patterns[keys[0]]
        if " part" in pattern or "(part" in pattern:
            out[name] = rearrange(torch.stack(values), f"part {pattern}", **some_sizes(pattern))
        else:
            out[name] = rearrange(values[0], pattern, **some_sizes(pattern)).clone()
    return out


def some_sizes(pattern: str) -> dict[str, int]:
    return {dim: SIZES[dim] for dim in "abcd" if dim in pattern.split(" -> ")[0].split()}


# Fused weights under tensor parallelism (bigscience-workshop/Megatron-DeepSpeed#338)

GATE_UP = "(gate_up mlp) embed"


def rows(*names: str) -> torch.Tensor:
    """Rows that are told apart: g0 to g3 are 0 to 3, u0 to u3 are 10 to 13."""
    numbers = [int(name[1:]) + 10 * (name[0] == "u") for name in names]
    return torch.tensor(numbers, dtype=torch.float32).unsqueeze(1).expand(-1, 3)


def test_fused_gate_and_up_of_two_ranks_become_one_and_four() -> None:
    ranks = [rows("g0", "g1", "u0", "u1"), rows("g2", "g3", "u2", "u3")]
    whole = merge(ranks, GATE_UP, over="mlp", gate_up=2)
    assert torch.equal(whole, rows("g0", "g1", "g2", "g3", "u0", "u1", "u2", "u3"))
    four = split(whole, GATE_UP, over="mlp", count=4, gate_up=2)
    assert torch.equal(four[1], rows("g1", "u1"))
    assert torch.equal(merge(four, GATE_UP, over="mlp", gate_up=2), whole)


def test_a_fused_file_is_read_by_the_rows_that_each_device_has(tmp_path: Path) -> None:
    table = Table(
        {"w_gate": "gate_up.weight: (0/2 mlp) embed", "w_up": "gate_up.weight: (1/2 mlp) embed"},
        {"w_gate": "embed mlp", "w_up": "embed mlp"},
        {"embed": 3, "mlp": 4},
    )
    whole = rows("g0", "g1", "g2", "g3", "u0", "u1", "u2", "u3").contiguous()
    safetensors_torch.save_file({"gate_up.weight": whole}, tmp_path / "model.safetensors")
    mesh = pfx.make_mesh("simulated", tp=4)
    arrays = load_params(tmp_path, table, mesh=mesh, specs=P(None, "tp"))
    assert torch.equal(arrays["w_gate"].parts[1], rows("g1").T)
    assert torch.equal(arrays["w_up"].parts[1], rows("u1").T)
    save_params(tmp_path / "again", arrays, table, config={})
    stored = safetensors_torch.load_file(tmp_path / "again" / "model.safetensors")
    assert torch.equal(stored["gate_up.weight"], whole)


@given(
    st.sampled_from([1, 2, 3, 4]),
    st.sampled_from([
        ("(qkv heads head_dim) embed", "heads", {"qkv": 3, "heads": 1, "head_dim": 2}, (6, 5)),
        ("(kv_heads group head_dim) embed", "kv_heads", {"group": 4, "head_dim": 2}, (16, 5)),
        ("embed (gate_up mlp)", "mlp", {"gate_up": 2}, (5, 6)),
        ("mlp embed", "embed", {}, (3, 2)),
        ("mlp embed", "mlp", {}, (3, 2)),
    ]),
)  # fmt: skip
def test_split_and_merge_are_inverses(ranks: int, case: Any) -> None:
    dims, over, sizes, shape = case
    parts = [torch.randn(shape) for _ in range(ranks)]
    whole = merge(parts, dims, over=over, **sizes)
    assert whole.numel() == ranks * math.prod(shape)
    back = split(whole, dims, over=over, count=ranks, **sizes)
    assert all(torch.equal(a, b) for a, b in zip(back, parts, strict=True))


def test_merging_is_what_each_rank_computes() -> None:
    """SwiGLU of the merged weight is that of the ranks, side by side: what a plain concat breaks."""
    parts = [torch.randn(6, 5, dtype=torch.float64) for _ in range(3)]
    x = torch.randn(4, 5, dtype=torch.float64)

    def swiglu(weight: torch.Tensor) -> torch.Tensor:
        gate, up = (x @ weight.T).chunk(2, -1)
        return torch.nn.functional.silu(gate) * up

    whole = merge(parts, GATE_UP, over="mlp", gate_up=2)
    expected = torch.cat([swiglu(part) for part in parts], -1)
    torch.testing.assert_close(swiglu(whole), expected)
    assert (swiglu(torch.cat(parts)) - expected).abs().max() > 0.1


def test_mixed_devices_of_a_stack_keep_negative_zero(tmp_path: Path) -> None:
    """Who does not hold a layer adds nothing to it, not even a sign."""
    table = Table({"w": "w.{layers}: a"}, {"w": "layers a"}, SIZES)
    mesh = pfx.make_mesh("simulated", pp=3, tp=2)
    value = torch.full((3, 4), -0.0)
    array = pfx.device_put({"w": value}, mesh, P("pp", "tp"))
    save_params(tmp_path / "out", array, table, config={})
    stored = safetensors_torch.load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.signbit(each).all() for each in stored.values())

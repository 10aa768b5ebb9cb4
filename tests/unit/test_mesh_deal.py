"""A mesh axis that deals the rows of a dim: which device holds which, and what is refused."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pfx
import pfx.viz
from pfx import P
from pfx.errors import MeshError, ShardingError
from pfx.mesh import Deal, Mesh, make_mesh
from pfx.spec import layout_of, local_shape, local_slices, part_of

# deal, size of the dim, the rows of each device
CASES: tuple[tuple[Deal, int, Any], ...] = (
    (Deal((0, 1)), 7, (range(4), range(4, 7))),
    (Deal((0, 1, 2)), 10, (range(4), range(4, 7), range(7, 10))),
    (Deal((0, 1, 2, 3)), 3, ([0], [1], [2], [])),
    (Deal((0, 1, 2, 3)), 30, (range(8), range(8, 16), range(16, 23), range(23, 30))),
    (Deal((0, 1, 2, 3), (6, 8, 8, 8)), 30,
     (range(6), range(6, 14), range(14, 22), range(22, 30))),
    (Deal((0, 1, 0, 1)), 8, ([0, 1, 4, 5], [2, 3, 6, 7])),
    (Deal((0, 1, 0, 1)), 6, ([0, 1, 4], [2, 3, 5])),
    (Deal((0, 1, 1, 0)), 8, ([0, 1, 6, 7], [2, 3, 4, 5])),
    (Deal((1, 0)), 2, ([1], [0])),
    (Deal((0, 1, 0), (1, 3, 0)), 4, ([0], [1, 2, 3])),
)  # fmt: skip


def mesh_of(deal: Deal, **axes: int) -> Mesh:
    return make_mesh(pp=max(deal.place) + 1, deals={"pp": deal}, **axes)


@st.composite
def deals(draw: st.DrawFn, max_devices: int = 4) -> tuple[Deal, int]:
    """A deal, and a size of a dim that it deals."""
    devices = draw(st.integers(1, max_devices))
    more = draw(st.lists(st.integers(0, devices - 1), max_size=3))
    place = tuple(draw(st.permutations([*range(devices), *more])))
    if draw(st.booleans()):
        return Deal(place), draw(st.integers(0, 12))
    sizes = draw(st.lists(st.integers(0, 3), min_size=len(place), max_size=len(place)))
    return Deal(place, tuple(sizes)), sum(sizes)


@pytest.mark.parametrize(("deal", "size", "rows"), CASES, ids=str)
def test_rows(deal: Deal, size: int, rows: Any) -> None:
    mesh = mesh_of(deal)
    assert mesh.rows("pp", size) == tuple(map(tuple, rows))
    assert mesh.extent(("pp",), size) == max(map(len, rows))
    assert not mesh.even(("pp",), size) and mesh.dealt(("pp",), size) == "pp"
    layout = layout_of(P("pp"), (size, 3), mesh)
    assert local_shape((size, 3), layout, mesh) == (max(map(len, rows)), 3)
    value = torch.arange(1, 3 * size + 1).view(size, 3)
    for place, held in enumerate(rows):
        index = local_slices((size, 3), layout, mesh, {"pp": place})
        assert index == (tuple(held), slice(0, 3))
        part = part_of(value, layout, mesh, {"pp": place})
        assert torch.equal(part[: len(held)], value[list(held)])
        assert not part[len(held) :].any()


@given(deals())
def test_every_row_is_held_once_and_found(case: tuple[Deal, int]) -> None:
    deal, size = case
    mesh = mesh_of(deal)
    blocks, rows = mesh.blocks("pp", size), mesh.rows("pp", size)
    assert [row for block in blocks for row in range(*block)] == list(range(size))
    assert sorted(row for held in rows for row in held) == list(range(size))
    extent = mesh.extent(("pp",), size)
    laid: list[int | None] = [None] * (extent * len(rows))
    for device, held in enumerate(rows):
        laid[device * extent : device * extent + len(held)] = held
    assert all(laid[at] == row for row, at in enumerate(mesh.positions("pp", size)))
    equal = size % len(rows) == 0 and rows == make_mesh(pp=len(rows)).rows("pp", size)
    assert mesh.even(("pp",), size) == equal


@pytest.mark.parametrize(
    ("deal", "size", "want"),
    [
        (Deal((0, 1)), 8, True),
        (Deal((0, 0, 1, 1)), 8, True),
        (Deal((0, 1), (4, 4)), 8, True),
        (Deal((0, 1), (3, 5)), 6, True),
        (Deal((0, 1), (3, 5)), 8, False),
        (Deal((1, 0)), 8, False),
        (Deal((0, 1)), 7, False),
    ],
    ids=str,
)
def test_a_deal_may_be_the_ordinary_split(deal: Deal, size: int, want: bool) -> None:
    mesh = mesh_of(deal)
    assert mesh.even(("pp",), size) is want
    assert (mesh.dealt(("pp",), size) is None) is want
    if want:
        index = local_slices((size,), layout_of(P("pp"), (size,), mesh), mesh, {"pp": 1})
        assert index == (slice(size // 2, size),)


def test_a_deal_is_part_of_what_a_mesh_is() -> None:
    mesh = make_mesh(pp=2, dp=2, deals={"pp": Deal((0, 1, 1, 0))})
    assert mesh != make_mesh(pp=2, dp=2) and hash(mesh) == hash(copy.deepcopy(mesh))
    assert pickle.loads(pickle.dumps(mesh)) == mesh == copy.deepcopy(mesh)
    assert make_mesh(pp=2, deals={"pp": Deal([0, 1])}) == make_mesh(
        pp=2, deals={"pp": Deal((0, 1))}
    )  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("deals", "why"),
    [
        ({"qq": Deal((0, 1))}, "is for an axis that is not there"),
        ({"pp": Deal((0, 0))}, "the device 1 has no block"),
        ({"pp": Deal(())}, "the device 0 has no block"),
        ({"pp": Deal((0, 1, 2))}, "place has 2; the devices are 0 to 1"),
        ({"pp": Deal((0, 1, -1))}, "place has -1"),
        ({"pp": Deal((0, 1), (1, -2))}, "a block has the size -2"),
        ({"pp": Deal((0, 1), (1, 2, 3))}, "3 sizes for 2 blocks"),
    ],
    ids=str,
)
def test_deals_that_do_not_fit(deals: dict[str, Deal], why: str) -> None:
    with pytest.raises(MeshError, match=why) as error:
        make_mesh(pp=2, deals=deals)
    assert "make_mesh: deals['" in str(error.value) and "fix:" in str(error.value)


@pytest.mark.parametrize("axes", [("pp", "dp"), ("dp", "pp")], ids=str)
def test_a_dim_dealt_unequally_is_not_shared_with_another_axis(axes: tuple[str, str]) -> None:
    mesh = make_mesh(pp=2, dp=2, deals={"pp": Deal((0, 1, 1, 0))})
    with pytest.raises(ShardingError, match="'pp' deals its rows as") as error:
        pfx.device_put(torch.ones(8), mesh, P(axes))
    assert "fix: leave 'pp' alone on this dim" in str(error.value)
    with pytest.raises(ShardingError, match="7 % 4 = 3"):
        pfx.device_put(torch.ones(7), mesh, P(axes))
    plain = make_mesh(pp=2, dp=2, deals={"pp": Deal((0, 1))})
    assert pfx.device_put(torch.ones(8), plain, P(axes)).shards[0].data.shape == (2,)


def test_an_axis_without_a_deal_still_has_to_divide() -> None:
    mesh = make_mesh(pp=2, dp=2, deals={"pp": Deal((0, 1))})
    assert pfx.device_put(torch.ones(7), mesh, P("pp")).shards[0].data.shape == (4,)
    with pytest.raises(ShardingError, match="7 % 2 = 1"):
        pfx.device_put(torch.ones(7), mesh, P("dp"))


def test_a_region_wants_equal_blocks_in_order() -> None:
    mesh = make_mesh(pp=2, deals={"pp": Deal((0, 1, 1, 0))})
    double = pfx.shard_map(lambda x: x * 2, mesh=mesh, in_specs=P("pp"), out_specs=P("pp"))
    with pytest.raises(ShardingError, match=r"args\[0\](.|\n)*deals its rows as"):
        double(torch.ones(8))
    rows = pfx.shard_map(
        lambda x: x + pfx.lax.axis_index("pp"), mesh=mesh, in_specs=P(), out_specs=P("pp")
    )
    with pytest.raises(ShardingError, match=r"output(.|\n)*deals its rows as"):
        rows(torch.ones(4))


def test_a_region_is_compiled_for_the_deals_it_was_written_for() -> None:
    mesh = make_mesh(pp=2, deals={"pp": Deal((0, 1, 1, 0))})
    plain = make_mesh(pp=2)
    double = pfx.shard_map(lambda x: x * 2, mesh=plain, in_specs=P("pp"), out_specs=P("pp"))
    with pytest.raises(ShardingError, match="one mesh for both"):
        pfx.jit(double, mesh=mesh)(torch.ones(8))


def test_arrays_go_from_one_deal_to_another_and_are_not_mixed() -> None:
    plain = make_mesh(pp=2)
    mesh = make_mesh(pp=2, deals={"pp": Deal((0, 1, 1, 0))})
    x = torch.arange(8.0)
    array = pfx.device_put(x, plain, P("pp"))
    with pytest.raises(ShardingError, match="lives on another mesh") as error:
        pfx.jit(lambda x: x, mesh=mesh)(array)
    assert "pp deals to (0, 1, 1, 0)" in str(error.value)
    moved = pfx.device_put(array, mesh)
    assert moved.mesh == mesh and moved.spec == P("pp")
    assert moved.shards[0].data.tolist() == [0, 1, 6, 7]
    assert torch.equal(pfx.device_get(pfx.device_put(moved, plain)), x)

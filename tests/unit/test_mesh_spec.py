"""Meshes, specs and layouts: the arithmetic between a global shape and one device's part."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pfx
from pfx import P
from pfx.errors import MeshError, ShardingError
from pfx.mesh import Mesh, make_mesh
from pfx.spec import (
    Layout,
    distinct_coordinates,
    dtype_name,
    effective,
    layout_of,
    local_bytes,
    local_shape,
    local_slices,
)

meshes = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(
    lambda sizes: make_mesh(**dict(zip("abc", sizes, strict=False)))
)


@st.composite
def placements(draw: st.DrawFn) -> tuple[Mesh, tuple[int, ...], Layout]:
    """A mesh, a shape, and a layout of it that may use any axes in any order."""
    mesh = draw(meshes)
    ndim = draw(st.integers(1, 3))
    order = draw(st.permutations(mesh.axis_names))
    places = [draw(st.one_of(st.none(), st.integers(0, ndim - 1))) for _ in order]
    dims = tuple(
        tuple(axis for axis, at in zip(order, places, strict=True) if at == dim)
        for dim in range(ndim)
    )
    shape = tuple(mesh.count(axes) * draw(st.integers(1, 3)) for axes in dims)
    return mesh, shape, Layout(dims)


# Meshes -------------------------------------------------------------------------------------------


@given(meshes)
def test_numbers_and_coordinates_are_inverse(mesh: Mesh) -> None:
    points = list(mesh.coordinates())
    assert len(points) == mesh.size == math.prod(mesh.shape.values())
    for number, point in enumerate(points):
        assert mesh.index(point) == number
        assert mesh.coordinate(number) == point


def test_devices_are_numbered_row_major() -> None:
    mesh = make_mesh(dp=2, tp=3)
    assert [mesh.index({"dp": d, "tp": t}) for d in range(2) for t in range(3)] == list(range(6))
    assert mesh.index({"dp": 1, "tp": 2}, ("tp", "dp")) == 5  # 2 * 2 + 1: the order given counts
    assert mesh.index({"dp": 1, "tp": 2}, ("tp",)) == 2


def test_a_mesh_is_a_value() -> None:
    mesh = make_mesh(dp=2, tp=2)
    assert mesh == make_mesh(dp=2, tp=2) and hash(mesh) == hash(make_mesh(dp=2, tp=2))
    assert mesh != make_mesh(tp=2, dp=2) and mesh != make_mesh(dp=2, tp=2, kind="abstract")
    assert pickle.loads(pickle.dumps(mesh.axes)) == mesh.axes
    with pytest.raises(TypeError):
        mesh.shape["dp"] = 4  # type: ignore[index]


def test_a_mesh_prints_its_axes() -> None:
    assert str(make_mesh(dp=2, tp=4)) == "dp=2 tp=4"
    assert str(make_mesh()) == "one device"
    assert make_mesh().size == 1 and list(make_mesh().coordinates()) == [{}]


def test_torchrun_makes_a_process_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    assert make_mesh(dp=2).kind == "simulated"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert make_mesh(dp=2).kind == "process"
    assert make_mesh(dp=2, kind="simulated").kind == "simulated"


@pytest.mark.parametrize("size", [0, -1, 1.5, True, "2"])
def test_a_size_is_an_integer_of_at_least_1(size: Any) -> None:
    with pytest.raises(MeshError) as caught:
        make_mesh(dp=size)
    assert str(caught.value).splitlines()[0] == f"make_mesh: axis 'dp' has size {size!r}."


def test_an_unknown_kind() -> None:
    with pytest.raises(MeshError, match="kind='threads' is unknown"):
        make_mesh(kind="threads", dp=2)


# Specs --------------------------------------------------------------------------------------------


def test_a_spec_is_a_value_that_keeps_its_type() -> None:
    spec = P("dp", None, ("tp", "cp"))
    assert spec == P("dp", None, ["tp", "cp"]) and hash(spec) == hash(P("dp", None, ("tp", "cp")))
    assert repr(spec) == "P('dp', None, ('tp', 'cp'))"
    for other in (pickle.loads(pickle.dumps(spec)), copy.deepcopy(spec), copy.copy(spec)):
        assert other == spec and isinstance(other, P)


def test_unreduced_and_reduced_are_part_of_a_spec() -> None:
    spec = P("x", None, unreduced=("dp",), reduced="tp")
    assert (spec.unreduced, spec.reduced) == (("dp",), ("tp",))
    assert repr(spec) == "P('x', None, unreduced=('dp',), reduced=('tp',))"
    assert repr(P(unreduced="dp")) == "P(unreduced=('dp',))"
    same = P("x", None, unreduced="dp", reduced=["tp"])
    assert spec == same and hash(spec) == hash(same) and (spec != same) is False
    for other in (P("x", None), P("x", None, unreduced="dp"), P("x", None, reduced="tp"),
                  P("x", unreduced="dp", reduced="tp"), ("x", None)):  # fmt: skip
        assert spec != other and other != spec and (spec == other) is False
    assert P(unreduced="tp") != P(reduced="tp") != P()
    for copied in (
        *(pickle.loads(pickle.dumps(spec, protocol)) for protocol in range(6)),
        copy.deepcopy(spec),
        copy.copy(spec),
    ):
        assert copied == spec and isinstance(copied, P) and hash(copied) == hash(spec)
    assert eval(repr(spec)) == spec
    assert spec.dual == P("x", None, unreduced="tp", reduced="dp") and spec.dual.dual == spec
    assert spec.with_dims(None, *spec) == P(None, "x", None, unreduced="dp", reduced="tp")


def test_the_order_of_unreduced_axes_means_nothing() -> None:
    assert P(unreduced=("a", "b")) == P(unreduced=("b", "a")) == P(unreduced={"a", "b"})
    assert len({P(unreduced=("a", "b")), P(unreduced=("b", "a"))}) == 1
    mesh = make_mesh(a=2, b=2)
    assert layout_of(P(unreduced=("b", "a")), (3,), mesh) == Layout(((),), ("a", "b"))
    assert layout_of(P(reduced=("b", "a")), (3,), mesh) == Layout(((),))


def test_a_spec_without_them_is_the_tuple_it_was() -> None:
    plain = ("x",)
    assert P("x") == plain and plain == P("x") and hash(P("x")) == hash(plain)
    assert P() == () and P("x", unreduced=()) == P("x") == P("x", reduced=[])
    assert (P("x") != plain) is False and P("x") != ("y",)
    assert {P("x"): 1}[("x",)] == 1  # type: ignore[index]


@pytest.mark.parametrize("axes", [None, 3, ("dp", None), [("dp",)], P("dp", None)])
def test_unreduced_names_axes(axes: Any) -> None:
    for make in (lambda: P(unreduced=axes), lambda: P(reduced=axes)):
        with pytest.raises(ShardingError) as caught:
            make()
        assert str(caught.value) == (
            f'P: {axes!r} does not name axes.\n  fix: P("tp", unreduced=("dp",))'
        )


@given(placements())
def test_layouts_and_specs_say_the_same(placement: tuple[Mesh, tuple[int, ...], Layout]) -> None:
    mesh, shape, layout = placement
    assert layout_of(layout.spec, shape, mesh) == layout
    for count in range(len(mesh.axis_names)):
        unused = [axis for axis in mesh.axis_names if axis not in layout.axes]
        owed = Layout(layout.dims, tuple(unused[:count]))
        assert layout_of(owed.spec, shape, mesh) == owed
    assert Layout(((),), ("a",), "max").spec == P(None)


def test_what_varies_stays_so() -> None:
    layout = Layout((("a",), ()), ("b",), varying=("c",))
    assert layout.axes == ("a", "b", "c")
    assert layout.whole() == Layout((("a",), ()), varying=("c",))
    assert layout.stacked() == Layout(((), ("a",), ()), ("b",), varying=("c",))
    assert layout.stacked().sliced() == layout
    mesh = make_mesh(a=2, b=2, c=1, d=3)
    assert effective(layout, mesh) == Layout((("a",), ()), ("b",))
    varying = Layout(((), ()), varying=("d", "a"))
    assert local_shape((8, 6), varying, mesh) == (8, 6)
    assert len(list(distinct_coordinates(varying, mesh))) == 6
    assert layout.text((8, 4), torch.float32) == "f32[8/a, 4]+b~c"


def test_a_short_spec_leaves_the_other_dims_whole() -> None:
    mesh = make_mesh(dp=2)
    assert layout_of(P("dp"), (4, 3, 5), mesh).dims == (("dp",), (), ())
    assert layout_of(None, (4, 3), mesh).dims == ((), ())
    assert layout_of(P(), (), mesh).dims == ()


# The part of a device -----------------------------------------------------------------------------


@given(placements())
def test_the_distinct_parts_tile_the_tensor(
    placement: tuple[Mesh, tuple[int, ...], Layout],
) -> None:
    """Each element lies in exactly one of them, all are of the local shape."""
    mesh, shape, layout = placement
    seen = torch.zeros(shape, dtype=torch.int64)
    places = list(distinct_coordinates(layout, mesh))
    for place in places:
        part = seen[local_slices(shape, layout, mesh, place)]
        assert tuple(part.shape) == local_shape(shape, layout, mesh)
        part += 1
    assert bool((seen == 1).all())
    assert len(places) == mesh.count(layout.axes)
    bytes_ = local_bytes(shape, torch.float64, layout, mesh)
    assert bytes_ * len(places) == seen.nbytes


@given(placements())
def test_several_axes_split_a_dim_row_major_in_the_order_given(
    placement: tuple[Mesh, tuple[int, ...], Layout],
) -> None:
    """The same as splitting by the first, and each part by the next."""
    mesh, shape, layout = placement
    for place in mesh.coordinates():
        for dim, axes in enumerate(layout.dims):
            index = torch.arange(shape[dim])
            for axis in axes:
                index = index.chunk(mesh.shape[axis])[place[axis]]
            got = local_slices(shape, layout, mesh, place)[dim]
            assert torch.arange(shape[dim])[got].tolist() == index.tolist()


@given(placements())
def test_put_and_get_are_inverse(placement: tuple[Mesh, tuple[int, ...], Layout]) -> None:
    mesh, shape, layout = placement
    x = torch.arange(math.prod(shape)).reshape(shape)
    array = pfx.device_put(x, mesh, layout.spec)
    assert array.spec == layout.spec and array.shape == shape and array.dtype == x.dtype
    assert torch.equal(pfx.device_get(array), x)
    for shard in array.shards:
        assert torch.equal(shard.data, x[shard.index])
        assert shard.data.nbytes == array.bytes_per_device


@given(placements())
def test_an_axis_of_size_1_places_nothing(
    placement: tuple[Mesh, tuple[int, ...], Layout],
) -> None:
    mesh, shape, layout = placement
    real = effective(layout, mesh)
    assert all(mesh.shape[axis] > 1 for axis in real.axes)
    for place in mesh.coordinates():
        assert local_slices(shape, real, mesh, place) == local_slices(shape, layout, mesh, place)


def test_an_axis_of_size_1_is_kept_in_what_users_see_and_costs_nothing() -> None:
    mesh = make_mesh(dp=1, tp=2)
    step = pfx.jit(
        lambda x: pfx.constrain(x * 2, P(None, "tp")).sum(0),
        mesh=mesh, in_specs=P("dp", "tp"), out_specs=P(("tp", "dp")),
    )  # fmt: skip
    y = step(torch.ones(3, 4))
    assert y.spec == P(("tp", "dp")) and pfx.device_get(y).tolist() == [6.0] * 4
    assert step.lower(torch.ones(3, 4)).collectives() == []
    summed = pfx.jit(lambda x: x.sum(), mesh=mesh, in_specs=P("dp"))
    assert summed.lower(torch.ones(3, 4)).collectives() == []


# Errors and printing -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "shape", "text"),
    [
        (
            P(None, "tp"),
            (4, 90),
            """\
w cannot be split.
  P(None, 'tp') puts dim 1 (size 90) on axis "tp" (size 4).
  90 % 4 = 2: it is not evenly divisible.
  mesh: dp=2 tp=4
  fix: make dim 1 a multiple of 4 (88 or 92), or drop 'tp' from this spec.""",
        ),
        (
            P(("dp", "tp")),
            (3,),
            """\
w cannot be split.
  P(('dp', 'tp')) puts dim 0 (size 3) on axis "dp" (size 2) and "tp" (size 4).
  3 % 8 = 3: it is not evenly divisible.
  mesh: dp=2 tp=4
  fix: make dim 0 a multiple of 8 (8), or drop 'dp', 'tp' from this spec.""",
        ),
        (
            P("dp", None),
            (4,),
            """\
w has fewer dims than its spec.
  P('dp', None) has 2 entries; the shape (4,) has 1 dims.
  mesh: dp=2 tp=4
  fix: use P('dp')""",
        ),
        (
            P("ep"),
            (4,),
            """\
w names the unknown axis 'ep'.
  spec: P('ep')
  mesh: dp=2 tp=4
  fix: use one of 'dp', 'tp'""",
        ),
        (
            P("dp", ("tp", "dp")),
            (4, 8),
            """\
w uses the axis 'dp' twice.
  spec: P('dp', ('tp', 'dp')); an axis can split one dim only.
  mesh: dp=2 tp=4
  fix: drop one 'dp' from this spec""",
        ),
        (
            P("dp", None, unreduced="tp"),
            (4,),
            """\
w has fewer dims than its spec.
  P('dp', None, unreduced=('tp',)) has 2 entries; the shape (4,) has 1 dims.
  mesh: dp=2 tp=4
  fix: use P('dp', unreduced=('tp',))""",
        ),
        (
            P(unreduced="ep"),
            (4,),
            """\
w names the unknown axis 'ep'.
  spec: P(unreduced=('ep',))
  mesh: dp=2 tp=4
  fix: use one of 'dp', 'tp'""",
        ),
        (
            P("dp", reduced="dp"),
            (4,),
            """\
w uses the axis 'dp' twice.
  spec: P('dp', reduced=('dp',)); an axis splits one dim, is unreduced, or is reduced.
  mesh: dp=2 tp=4
  fix: drop one 'dp' from this spec""",
        ),
    ],
    ids=["one axis", "two axes", "too long", "unknown", "twice", "long", "owed", "owed twice"],
)
def test_a_spec_that_does_not_fit(spec: P, shape: tuple[int, ...], text: str) -> None:
    with pytest.raises(ShardingError) as caught:
        layout_of(spec, shape, make_mesh(dp=2, tp=4), "w")
    assert str(caught.value) == text


def test_a_sharded_value_prints_one_way() -> None:
    layout = Layout((("dp",), (), ("tp", "cp")))
    assert layout.text((8, 128, 256), torch.float32) == "f32[8/dp, 128, 256/tp/cp]"
    partial = Layout((("dp",),), ("tp",))
    assert partial.text((8,), torch.bfloat16) == "bf16[8/dp]+tp"
    assert Layout(((),), ("tp",), "max").text((8,), torch.int64) == "i64[8]+tp(max)"
    manual = Layout(((), ()), varying=("tp",))
    assert manual.text((8, 4), torch.float32) == "f32[8, 4]~tp"


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.float64, "f64"), (torch.float16, "f16"), (torch.bfloat16, "bf16"),
        (torch.int32, "i32"), (torch.uint8, "u8"), (torch.bool, "bool"),
        (torch.complex64, "c64"), (torch.float8_e4m3fn, "f8_e4m3fn"),
    ],
)  # fmt: skip
def test_dtypes_have_short_names(dtype: torch.dtype, name: str) -> None:
    assert dtype_name(dtype) == name

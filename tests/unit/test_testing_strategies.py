"""The strategies of `pfx.testing`: what they draw is valid, and covers what they say it does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import Phase, find, given, seed, settings
from hypothesis import strategies as st

import pfx
import pfx.testing
from pfx import P
from pfx.errors import TraceError
from pfx.testing import assert_parallel_equal
from pfx.testing.steps import STEPS, lines

MESH = pfx.make_mesh(x=2, y=3)


@given(pfx.testing.meshes(max_devices=6, max_axes=2, min_devices=2, axis_names=("dp", "tp")))
def test_meshes_are_bounded(mesh: pfx.Mesh) -> None:
    assert 2 <= mesh.size <= 6 and mesh.axis_names in (("dp",), ("dp", "tp"))


@given(st.data())
def test_specs_fit(data: st.DataObject) -> None:
    mesh = data.draw(pfx.testing.meshes())
    value = {
        "a": pfx.ShapeDtype(data.draw(pfx.testing.shapes(mesh))),
        "b": [torch.ones(24, 6), None],
    }
    specs = data.draw(pfx.testing.specs(value, mesh))
    assert pfx.tree.structure(specs, is_leaf=lambda x: isinstance(x, P)) == pfx.tree.structure(
        value
    )
    put = pfx.device_put({**value, "a": torch.zeros(value["a"].shape)}, mesh, specs)
    assert put["a"].spec[: len(specs["a"])] == specs["a"]


MESHES_2_2 = pfx.make_mesh(x=2, y=2)


@pytest.mark.parametrize("spec", [P(("x", "y")), P(("y", "x")), P("y", "x"), P(None, ("x", "y"))])
def test_every_way_to_split_is_drawn(spec: P) -> None:
    value = torch.ones(4, 4)
    assert find(pfx.testing.specs(value, MESHES_2_2), lambda found: found == spec) == spec


def test_specs_that_do_not_divide_are_drawn_on_demand() -> None:
    value = torch.ones(3, 4)
    misfit = find(pfx.testing.specs(value, MESHES_2_2, divisible=False), lambda s: s and s[0])
    with pytest.raises(pfx.errors.ShardingError):
        pfx.device_put(value, MESHES_2_2, misfit)
    with pytest.raises(TraceError, match=r"value\[1\] is 3, which has no shape"):
        pfx.testing.specs((value, 3), MESHES_2_2)


@given(pfx.testing.shapes(MESH, min_dims=1, max_dims=2, max_local=2))
def test_shapes_are_multiples_of_axes(shape: tuple[int, ...]) -> None:
    assert 1 <= len(shape) <= 2
    assert all(n in {1, 2, 3, 4, 6, 12} for n in shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.int32, torch.bool])
def test_tensors_have_their_form(dtype: torch.dtype) -> None:
    x = find(pfx.testing.tensors((50,), dtype, low=-2, high=2), lambda _: True)
    assert x.dtype == dtype and x.shape == (50,) and bool((x != x[0]).any())
    if dtype == torch.int32:
        assert x.min() == -2 and x.max() == 1
    ranked = pfx.testing.tensors(pfx.testing.shapes(MESH), dtype)
    assert find(ranked, lambda x: x.ndim == 2).dtype == dtype


@given(pfx.testing.programs())
@settings(max_examples=8)
def test_the_law_of_any_program(p: pfx.testing.SmallProgram) -> None:
    assert_parallel_equal(p.fn, p.args, mesh=p.mesh, in_specs=p.specs, grad=True)


@given(pfx.testing.programs(max_devices=4, max_args=2, max_lines=4, dtype=torch.float32))
@settings(max_examples=25)
def test_a_printed_program_is_the_program(p: pfx.testing.SmallProgram) -> None:
    scope: dict[str, Any] = {"pfx": pfx, "torch": torch, "F": torch.nn.functional, "P": P}
    exec(str(p), scope)
    assert scope["mesh"] == p.mesh and scope["specs"] == p.specs and p.mesh.size <= 4
    found, expected = scope["fn"](*scope["args"]), p.fn(*p.args)
    assert len(p.lines) <= 4 and len(p.args[0]) <= 2
    for name in p.outputs:
        assert torch.equal(found[name], expected[name]) and found[name].dtype == torch.float32


@pytest.mark.parametrize("kind", STEPS)
def test_each_kind_of_step_states_the_shape_of_its_value(kind: str) -> None:
    """A step that misstated a shape would let a later one be drawn that does not run."""
    shapes = {"a": (), "b": (4,), "d": (3, 4), "e": (4, 3), "g": (2, 1, 4), "h": (2, 3, 4)}
    found = lines(kind, shapes, MESHES_2_2)
    assert found
    scope = {name: torch.randn(shape).double() for name, shape in shapes.items()}
    for text, shape in found:
        value = eval(text, {"pfx": pfx, "torch": torch, "F": torch.nn.functional, "P": P, **scope})
        assert value.shape == shape and value.dtype == torch.float64, text
        assert bool(value.isfinite().all()), text


def test_every_kind_of_step_is_drawn() -> None:
    drawn: list[str] = []
    options = settings(max_examples=100, database=None, phases=[Phase.generate], derandomize=False)
    for number in range(10):  # what a seed draws also depends on the tests before it

        @seed(number)
        @options
        @given(pfx.testing.programs(MESHES_2_2))
        def collect(p: pfx.testing.SmallProgram) -> None:
            drawn.extend(p.lines)

        collect()
        unseen = [word for word in WORDS if not any(word in line for line in drawn)]
        if not unseen:
            return
    raise AssertionError(unseen)


# What only the line of one kind of step has, for some of them.
WORDS = [" + ", " @ ", ".mT", "sum(", "softmax", "cumsum", "layer_norm", "transpose", "flatten",
         "torch.cat", "::2", "index_select", "flip", "F.pad", "remat", "scan", "constrain"]  # fmt: skip


def test_a_failing_law_shrinks_to_the_line_that_fails() -> None:
    fails = lambda p: "softmax" in str(p) and any(p.specs[0].values())
    p = find(pfx.testing.programs(), fails)
    assert len(p.lines) == 1 and len(p.shapes) == 1

"""Pictures and tables: the text forms are golden, a figure has the parts and labels it must have."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

import pfx
from pfx import P, viz
from pfx.compiler.ir import Value
from pfx.compiler.program import Program
from pfx.spec import layout_of
from pfx.viz import blocks, figure, units

MESH = pfx.make_mesh(dp=2, tp=4)


def put(shape: tuple[int, ...], spec: P | None = None, mesh: pfx.Mesh = MESH) -> pfx.Array:
    return pfx.device_put(torch.zeros(shape), mesh, spec)


def matmul(in_specs: tuple[P, P]) -> Program:
    """The program of a matmul, (8, 16) by (16, 4), on eight devices."""
    step = pfx.jit(torch.matmul, mesh=MESH, in_specs=in_specs)
    return step.lower(torch.ones(8, 16), torch.ones(16, 4))


ROWS = (P("tp"), P())
CONTRACTION = (P("dp", "tp"), P("tp"))


def words(text: str) -> list[str]:
    return text.split()


def colours(axes: Any) -> list[Any]:
    return [patch.get_facecolor() for patch in axes.patches if isinstance(patch, Rectangle)]


# Placement ---------------------------------------------------------------------------------------

GRIDS = [
    (
        (8, 16),
        P("dp", "tp"),
        """
f32[8/dp, 16/tp] on dp=2 tp=4: 8 blocks, each on 1 device
dim 0 down, dim 1 across
  0   4   8   12  16
0 ┌───┬───┬───┬───┐
  │ 0 │ 1 │ 2 │ 3 │
4 ├───┼───┼───┼───┤
  │ 4 │ 5 │ 6 │ 7 │
8 └───┴───┴───┴───┘""",
    ),
    (
        (8, 16),
        P(None, "tp"),
        """
f32[8, 16/tp] on dp=2 tp=4: 4 blocks, each on 2 devices (copies along dp)
dim 0 down, dim 1 across
  0     4     8     12    16
0 ┌─────┬─────┬─────┬─────┐
  │ 0 4 │ 1 5 │ 2 6 │ 3 7 │
8 └─────┴─────┴─────┴─────┘""",
    ),
    (
        (8,),
        P(("tp", "dp")),
        """
f32[8/tp/dp] on dp=2 tp=4: 8 blocks, each on 1 device
0   1   2   3   4   5   6   7   8
┌───┬───┬───┬───┬───┬───┬───┬───┐
│ 0 │ 4 │ 1 │ 5 │ 2 │ 6 │ 3 │ 7 │
└───┴───┴───┴───┴───┴───┴───┴───┘""",
    ),
    (
        (),
        P(),
        """
f32[] on dp=2 tp=4: 1 block, on 8 devices (copies along dp, tp)
┌─────┐
│ 0–7 │
└─────┘""",
    ),
    (
        (2, 8, 6),
        P("dp"),
        """
f32[2/dp, 8, 6] on dp=2 tp=4: 2 blocks, each on 4 devices (copies along tp)
dim 0 down, dim 2 across
  0     6
0 ┌─────┐
  │ 0–3 │
1 ├─────┤
  │ 4–7 │
2 └─────┘""",
    ),
]


@pytest.mark.parametrize(("shape", "spec", "text"), GRIDS, ids=lambda value: str(value)[:24])
def test_text_of_a_placement(shape: tuple[int, ...], spec: P, text: str) -> None:
    assert viz.placement_text(put(shape, spec)) == text.strip()


def test_more_than_two_split_dims_give_a_grid_for_each_block_of_the_others() -> None:
    mesh = pfx.make_mesh(a=2, b=2, c=2)
    assert viz.placement_text((4, 2, 6), P("a", "b", "c"), mesh) == (
        "[4/a, 2/b, 6/c] on a=2 b=2 c=2: 8 blocks, each on 1 device\n"
        "dim 1 down, dim 2 across\n"
        "dim 0: 0–1\n"
        "  0   3   6\n"
        "0 ┌───┬───┐\n"
        "  │ 0 │ 1 │\n"
        "1 ├───┼───┤\n"
        "  │ 2 │ 3 │\n"
        "2 └───┴───┘\n"
        "dim 0: 2–3\n"
        "  0   3   6\n"
        "0 ┌───┬───┐\n"
        "  │ 4 │ 5 │\n"
        "1 ├───┼───┤\n"
        "  │ 6 │ 7 │\n"
        "2 └───┴───┘"
    )
    drawn = viz.placement((4, 2, 6), P("a", "b", "c"), mesh)
    assert len(drawn.axes) == 2
    across = [axes.get_xlabel() for axes in drawn.axes]
    assert across == ["dim 0: 0–1   dim 2 / c", "dim 0: 2–3   dim 2 / c"]


@pytest.mark.parametrize(("shape", "spec"), [grid[:2] for grid in GRIDS], ids=str)
def test_figure_of_a_placement(shape: tuple[int, ...], spec: P) -> None:
    """One patch and one colour a block, one label a device."""
    array = put(shape, spec)
    drawn = viz.placement(array)
    assert isinstance(drawn, Figure)
    (axes,) = drawn.axes
    assert len(axes.patches) == len(array.shards)
    assert len(set(colours(axes))) == len(array.shards)
    assert sorted(int(text.get_text()) for text in axes.texts) == list(range(8))
    title, summary = (text.get_text() for text in drawn.texts)
    assert f"{title} {summary}" == viz.placement_text(array).split("\n")[0]


def test_labels_of_a_placement() -> None:
    (axes,) = viz.placement(put((8, 16), P("dp", "tp"))).axes
    assert (axes.get_ylabel(), axes.get_xlabel()) == ("dim 0 / dp", "dim 1 / tp")
    assert list(axes.get_yticks()) == [0, 4, 8]
    assert list(axes.get_xticks()) == [0, 4, 8, 12, 16]


def test_a_shape_is_enough_and_so_is_anything_with_one() -> None:
    form = pfx.ShapeDtype((8, 16), torch.bfloat16)
    grid = viz.placement_text((8, 16), P("dp"), MESH).split(" ", 2)
    assert grid[:2] == ["[8/dp,", "16]"]
    assert viz.placement_text(form, P("dp"), MESH).startswith("bf16[8/dp, 16] on")
    assert viz.placement_text(torch.Size([8, 16]), P("dp"), MESH).startswith("[8/dp, 16] on")


def test_many_devices_share_one_label() -> None:
    mesh = pfx.make_mesh(kind="abstract", dp=64, tp=4)
    assert "│ 0–255 │" in viz.placement_text((4, 4), P(), mesh)
    drawn = viz.placement((4, 64), P(None, "tp"), mesh)
    labels = [text.get_text() for text in drawn.axes[0].texts]
    assert labels == [f"{i} {i + 4} … {i + 252}" for i in range(4)]


@given(
    st.dictionaries(st.sampled_from("abc"), st.integers(1, 3), min_size=1),
    st.permutations("abc"),
    st.integers(0, 3),
)
def test_every_device_is_in_exactly_one_block(
    sizes: dict[str, int], order: list[str], ndim: int
) -> None:
    """The blocks are the array's shards, and each names the devices whose slices it has."""
    mesh = pfx.make_mesh(**sizes)
    axes = [axis for axis in order if axis in sizes][:ndim]
    spec = P(*axes)
    array = put((6,) * ndim, spec, mesh)
    tensor = blocks.placed(array, None, None, "test")
    found = sorted(device for block in tensor.blocks for device in block.devices)
    assert found == list(range(mesh.size))
    assert tensor.num_blocks == len(tensor.blocks) == len(array.shards)
    by_slices = {str(block.slices): block.devices for block in tensor.blocks}
    for shard in array.shards:
        place = dict.fromkeys(sizes, 0) | dict(shard.coordinate)
        assert mesh.index(place) in by_slices[str(shard.index)]


@pytest.mark.parametrize("draw", [viz.placement, viz.placement_text])
@pytest.mark.parametrize(
    ("args", "error", "lines"),
    [
        (
            ((8, 16),),
            TypeError,
            [
                "needs an Array, or a shape with a spec and a mesh.",
                "got: (8, 16), None, None",
                'fix: {}((8, 16), P("dp"), mesh)',
            ],
        ),
        (
            (3, P("dp"), MESH),
            TypeError,
            ["needs an Array, or a shape with a spec and a mesh.", "got: 3, P('dp')"],
        ),
        (
            (put((8,)), P("dp")),
            TypeError,
            ["an Array brings its own spec and mesh.", "array: Array(f32[8] on dp=2 tp=4)"],
        ),
        (
            ((7, 2), P("dp"), MESH),
            pfx.errors.ShardingError,
            ["{}: the shape (7, 2) cannot be split.", '(size 7) on axis "dp" (size 2).'],
        ),
        (
            ((512,), P("x"), pfx.make_mesh(kind="abstract", x=512)),
            pfx.errors.ShardingError,
            ["{}: [512/x] has 512 blocks, too many to draw.", "at most 256 blocks."],
        ),
    ],
    ids=["no spec", "no shape", "spec for an array", "does not divide", "too many"],
)
def test_what_cannot_be_placed(
    draw: Callable[..., Any], args: tuple[Any, ...], error: type[Exception], lines: list[str]
) -> None:
    with pytest.raises(error) as caught:
        draw(*args)
    for line in lines:
        assert line.format(f"viz.{draw.__name__}") in str(caught.value)


# Devices -----------------------------------------------------------------------------------------


def filled(axes: Any) -> list[tuple[float, float, float, float, Any]]:
    """The filled parts of one panel, relative to their tensors: x, y, width, height, colour."""
    parts = [p for p in axes.patches if isinstance(p, Rectangle)]
    found = []
    for whole, part, _ in zip(*[iter(parts)] * 3, strict=True):
        w, h = whole.get_width(), whole.get_height()
        x, y = part.get_x() - whole.get_x(), part.get_y() - whole.get_y()
        span = (x / w, y / h, part.get_width() / w, part.get_height() / h)
        found.append((*(round(value, 6) for value in span), part.get_facecolor()))
    return found


def test_devices_fills_what_each_device_holds() -> None:
    drawn = viz.devices({"x": put((8, 16), P("dp")), "w": put((16, 32), P(None, "tp"))})
    assert len(drawn.axes) == 8
    for device, axes in enumerate(drawn.axes):
        dp, tp = divmod(device, 4)
        x, w = filled(axes)
        assert x[:4] == (0, dp / 2, 1, 0.5)
        assert w[:4] == (tp / 4, 0, 0.25, 1)
        texts = [text.get_text() for text in axes.texts]
        assert texts[:2] == [f"device {device}", f"dp={dp}  tp={tp}"]
        assert texts[2:] == ["x", "w", "holds 768 B of 2.5 KiB"]


def test_devices_gives_equal_colours_to_equal_parts_only() -> None:
    panels = [filled(axes) for axes in viz.devices([put((8, 16), P("dp")), put((8,))]).axes]
    split = [panel[0][4] for panel in panels]
    assert split[:4] == [split[0]] * 4
    assert split[4:] == [split[4]] * 4
    assert split[0] != split[4]
    assert len({panel[1][4] for panel in panels}) == 1


def test_devices_gives_a_row_to_each_key_of_a_nested_dict_in_the_order_written() -> None:
    tree = {"params": {"up": put((8, 4)), "down": put((4, 8))}, "mu": {"up": put((8, 4), P("dp"))}}
    texts = [text.get_text() for text in viz.devices(tree).axes[0].texts]
    assert texts[2:-1] == ["params", "down", "up", "mu", "up"]
    assert texts[-1] == "holds 320 B of 384 B"


def test_devices_draws_one_array_and_names_what_is_not_unique_by_two_steps() -> None:
    (axes,) = viz.devices(put((2,), None, pfx.make_mesh(x=1))).axes
    assert [text.get_text() for text in axes.texts] == ["device 0", "x=0", "", "holds all 8 B"]
    twice = {"a": {"l": {"w": put((2,))}, "m": {"w": put((2,))}, "n": put(())}}
    names = [text.get_text() for text in viz.devices(twice).axes[0].texts][3:6]
    assert names == ["l.w", "m.w", "n"]


@pytest.mark.parametrize(
    ("axes", "grid"),
    [
        ({"x": 4}, (1, 4)),
        ({"x": 16}, (2, 8)),
        ({"x": 2, "y": 3}, (2, 3)),
        ({"x": 1, "y": 4}, (1, 4)),
        ({"x": 2, "y": 2, "z": 2}, (2, 4)),
    ],
)
def test_panels_of_devices_lie_as_the_mesh_does(
    axes: dict[str, int], grid: tuple[int, int]
) -> None:
    drawn = viz.devices(put((12,), None, pfx.make_mesh(**axes)))
    places = [panel.get_position() for panel in drawn.axes]
    rows = len({round(place.y0, 6) for place in places})
    columns = len({round(place.x0, 6) for place in places})
    assert (rows, columns) == grid
    assert places == sorted(places, key=lambda place: (-round(place.y0, 6), place.x0))


@pytest.mark.parametrize(
    ("arrays", "error", "lines"),
    [
        (
            {"a": {"w": torch.ones(2)}},
            TypeError,
            ["viz.devices: arrays['a']['w'] is a Tensor, not an Array.", "pfx.device_put(x, mesh"],
        ),
        ({}, TypeError, ["viz.devices: the tree holds no Array."]),
        (
            [put((8,)), put((8,), None, pfx.make_mesh(dp=8))],
            pfx.errors.MeshError,
            [
                "viz.devices: arrays[1] is on another mesh.",
                "dp=8 (simulated); the first leaf: dp=2 tp=4 (simulated)",
            ],
        ),
        (
            put((8,), None, pfx.make_mesh(dp=33)),
            pfx.errors.MeshError,
            ["viz.devices: 33 devices are too many to draw.", "at most 32 devices."],
        ),
    ],
    ids=["tensor", "empty", "two meshes", "too many"],
)
def test_what_devices_cannot_draw(arrays: Any, error: type[Exception], lines: list[str]) -> None:
    with pytest.raises(error) as caught:
        viz.devices(arrays)
    for line in lines:
        assert line in str(caught.value)


# Memory and collectives ----------------------------------------------------------------------------


def state(spec: P) -> Program:
    """A step that does nothing to parameters (16 KiB) kept as `spec` says, and to an input."""
    forms = {
        "params['w']": ((64, 64), spec),
        "opt_state.mu['w']": ((64, 64), spec),
        "x": ((8,), P()),
    }
    inputs = [
        Value(number, shape, torch.float32, layout_of(spec, shape, MESH))
        for number, (shape, spec) in enumerate(forms.values())
    ]
    return Program(MESH, inputs, inputs, [], list(forms))


STATES = [("whole", state(P())), ("split", state(P("tp", "dp")))]


def test_text_of_memory() -> None:
    assert viz.memory_text(STATES[0][1]) == (
        "parameters       16 KiB\n"
        "optimizer state  16 KiB\n"
        "inputs             32 B\n"
        "peak             32 KiB"
    )


def test_text_of_memory_of_several_programs() -> None:
    assert viz.memory_text(STATES) == (
        "                  whole     split\n"
        "parameters       16 KiB     2 KiB\n"
        "optimizer state  16 KiB     2 KiB\n"
        "inputs             32 B      32 B\n"
        "peak             32 KiB  4.03 KiB"
    )


def test_a_role_that_one_program_lacks_is_a_dash() -> None:
    """The product keeps its result; the state has none."""
    lines = viz.memory_text([("state", STATES[0][1]), ("product", matmul(ROWS))]).split("\n")
    table = {line[:15].strip(): words(line[15:]) for line in lines}
    assert table["parameters"] == ["16", "KiB", "–"]
    assert table["activations"] == ["–", "32", "B"]


def test_figure_of_memory() -> None:
    """A bar of each program adds up to its peak, and a role has one colour in all of them."""
    (axes,) = viz.memory(STATES).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["whole", "split"]
    assert axes.get_xlabel() == "KiB"
    legend = axes.get_legend()
    shown = zip(legend.get_texts(), legend.get_patches(), strict=True)
    keys = {text.get_text(): patch.get_facecolor() for text, patch in shown}
    assert list(keys) == ["parameters", "optimizer state", "inputs"]
    assert len(set(keys.values())) == 3
    for i, (_, program) in enumerate(STATES):
        bar = [p for p in axes.patches if round(p.get_y() + p.get_height() / 2) == i]
        roles = program.memory().at_peak
        widths = {patch.get_facecolor(): patch.get_width() * 1024 for patch in bar}
        assert widths == {keys[role]: size for role, size in roles.items()}
    assert [text.get_text() for text in axes.texts] == ["16", "16", "32 KiB", "2", "2", "4.03 KiB"]


def test_text_of_collectives() -> None:
    lines = viz.collectives_text(matmul(CONTRACTION)).split("\n")
    assert words(lines[0]) == ["op", "axis", "count", "bytes", "each", "why"]
    assert lines[1].startswith(
        "all_reduce  tp        1   64 B  f32[4, 4]  the layout of the output"
    )
    assert lines[2] == "1 collective in 1 message, 64 B a step and device"
    assert viz.collectives_text(matmul(ROWS)) == "no collectives"


def loop() -> Program:
    """Three layers over tp: an all-reduce in each, the same line of the bill."""

    def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        def layer(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, None]:
            return pfx.constrain(pfx.constrain(x, P(None, "tp")) @ w, P()), None

        return pfx.scan(layer, x, w)[0]

    compiled = pfx.jit(step, mesh=MESH, in_specs=(P(), P(None, "tp")))
    return compiled.lower(torch.ones(4, 8), torch.ones(3, 8, 8))


def test_loops_are_multiplied_out() -> None:
    lines = viz.collectives_text(loop()).split("\n")
    assert words(lines[1])[:5] == ["all_reduce", "tp", "3", "384", "B"]
    assert lines[-1] == "3 collectives in 3 messages, 384 B a step and device"


def test_text_of_the_collectives_of_several_programs() -> None:
    pairs = [("rows", matmul(ROWS)), ("sum", matmul(CONTRACTION)), ("loop", loop())]
    assert viz.collectives_text(pairs) == (
        "                rows       sum       loop\nall_reduce  tp     –  1 · 64 B  3 · 384 B"
    )
    assert viz.collectives_text(pairs[:1]) == "no collectives"


def test_figure_of_collectives() -> None:
    pairs = [("rows", matmul(ROWS)), ("sum", matmul(CONTRACTION))]
    (axes,) = viz.collectives(pairs).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["rows", "sum · tp"]
    assert [patch.get_width() for patch in axes.patches] == [64]
    assert [text.get_text() for text in axes.texts] == ["none", "64", "64 B, 1 collective"]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["all_reduce"]


@pytest.mark.parametrize(
    "draw", [viz.memory, viz.memory_text, viz.collectives, viz.collectives_text]
)
@pytest.mark.parametrize("programs", [[], "step", [("a", 1)], [1], None], ids=repr)
def test_what_is_no_program(draw: Callable[..., Any], programs: Any) -> None:
    with pytest.raises(TypeError) as caught:
        draw(programs)
    assert str(caught.value) == (
        f"viz.{draw.__name__}: needs a Program, or a list of (name, Program).\n"
        f"  got: {programs!r}\n"
        f'  fix: viz.{draw.__name__}([("my step", step.lower(*args))])'
    )


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1000 * 1024, "1000 KiB"),
        (1024**2 - 1, "1 MiB"),
        (1536 * 1024, "1.5 MiB"),
        (3 * 1024**3, "3 GiB"),
        (1e15, "909 TiB"),
    ],
)
def test_bytes_text(count: float, text: str) -> None:
    assert units.bytes_text(count) == text


# All of them -------------------------------------------------------------------------------------

FIGURES: dict[str, Callable[[], Any]] = {
    "placement": lambda: viz.placement((8, 16), P("dp"), MESH),
    "devices": lambda: viz.devices(put((8, 16), P("dp"))),
    "memory": lambda: viz.memory(matmul(ROWS)),
    "collectives": lambda: viz.collectives(matmul(CONTRACTION)),
}


@pytest.mark.parametrize("name", FIGURES)
def test_without_matplotlib_the_error_says_what_to_install(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError) as caught:
        FIGURES[name]()
    assert str(caught.value) == (
        f"viz.{name}: draws with matplotlib, which is not installed.\n  fix: pip install 'pfx[viz]'"
    )


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_is_the_same_every_time_and_leaves_nothing_behind(name: str) -> None:
    """Whatever the user's settings are; they stay as they were."""
    import matplotlib
    import matplotlib.pyplot as plt

    def pixels() -> bytes:
        canvas = FigureCanvasAgg(FIGURES[name]())
        canvas.draw()
        return bytes(canvas.buffer_rgba())

    first = pixels()
    with matplotlib.rc_context({"font.size": 20, "font.family": "serif"}):
        assert pixels() == first
        assert matplotlib.rcParams["font.size"] == 20
    assert plt.get_fignums() == []


@pytest.mark.parametrize("name", FIGURES)
def test_no_text_of_a_figure_is_cut_off(name: str) -> None:
    drawn = FIGURES[name]()
    canvas = FigureCanvasAgg(drawn)
    canvas.draw()
    renderer = canvas.get_renderer()
    texts = [*drawn.texts, *(text for axes in drawn.axes for text in axes.texts)]
    texts += [label for axes in drawn.axes for label in (axes.xaxis.label, axes.yaxis.label)]
    for text in texts:
        if text.get_text():
            box = text.get_window_extent(renderer)
            assert box.x0 >= 0 and box.y0 >= 0, text
            assert box.x1 <= drawn.bbox.x1 and box.y1 <= drawn.bbox.y1, text


def test_colours_are_distinct_however_many() -> None:
    for count in (1, 8, 9, blocks.MAX_BLOCKS):
        assert len(set(map(str, figure.shard_colours(count)))) == count

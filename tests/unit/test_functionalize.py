"""In-place torch ops inside a traced function: the graph without them computes what eager computes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import pfx
from pfx import P, _torch
from pfx.errors import TraceError
from pfx.lax.ops.functionalize import functionalize
from tests.tracing import Function, assert_same, pure_module, seeded

# Programs that people write, each over x of shape (4, 6).


def assign_a_column(x: torch.Tensor) -> list[torch.Tensor]:
    y = x * 1
    y[:, 0] = 0
    return [y]


def change_the_transpose(x: torch.Tensor) -> list[torch.Tensor]:
    y = x * 1
    y.T.add_(1)
    return [y, y.T]


def change_through_many_views(x: torch.Tensor) -> list[torch.Tensor]:
    cube = torch.stack([x, x * 2])
    cube.permute(2, 0, 1)[1:5:2].unflatten(0, (2, 1)).squeeze(1).unbind(1)[1].mul_(3)
    cube.movedim(0, -1).reshape(3, 8, 2).split([1, 2])[1].narrow(1, 2, 3).transpose(0, 2).neg_()
    cube.diagonal(1, 1, 2)[:, ::2] = 0
    return [cube]


def change_a_row_and_read_all(x: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone()
    early, flat = x[1, 2:], x.view(-1)
    y = x[1]
    y.mul_(2)
    return [x, y, early, flat, x[1]]


def change_the_whole_and_read_views(x: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone()
    row, before = x[0], x[0] * 1
    x.sub_(row.clone())
    late = x[0]
    row.add_(7)
    return [x, row, before, late]


def swap_rows(x: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone()
    x[0], x[1] = x[1].clone(), x[0].clone()
    x[2:] = x[:2]
    return [x]


def fill_a_buffer(x: torch.Tensor) -> list[torch.Tensor]:
    out = torch.empty(8, 6)  # float32: what is written is converted
    for i, part in enumerate(out.split(4)):
        part.copy_(x)
        part.diagonal().fill_(i)
    return [out]


def write_to_out(x: torch.Tensor) -> list[torch.Tensor]:
    out, values, index = torch.empty_like(x), x[0].clone(), torch.arange(6)
    torch.add(x, 1, out=out)
    torch.max(x, 0, out=(values, index))
    grown = torch.mul(x, 2, out=x.new_empty(0))
    return [out, values, index, grown, torch.arange(4, out=index[:4]), index]


def mask_and_index(x: torch.Tensor) -> list[torch.Tensor]:
    y = x.clone()
    y[y < 0] = 0
    y[torch.tensor([0, 2]), 1] = torch.tensor([5.0, 6.0], dtype=y.dtype)
    y[..., -1] += 1
    y.index_put_((torch.tensor([1, 1]),), x[:1], accumulate=True)
    seen = y > 0
    seen &= x > 0
    return [y, seen]


def literal_changed(x: torch.Tensor) -> list[torch.Tensor]:
    scale = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    scale.add_(1)
    return [x * scale]


def by_strides(x: torch.Tensor) -> list[torch.Tensor]:
    x = x.T.clone()
    x.fill_diagonal_(9)
    window = x.as_strided((2, 3), (1, 4), 5)
    window.mul_(2)
    return [x, window, x[1:].as_strided((2,), (3,))]


def reshaped_in_place(x: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone()
    row = x[0]
    x.unsqueeze_(0).squeeze_().t_()
    x[0, 0] = 3
    return [x, row]


def complex_parts(x: torch.Tensor) -> list[torch.Tensor]:
    z = torch.complex(x, x * 2)
    z.real[0] = 1
    z.conj().imag.add_(1)
    torch.view_as_real(z)[1] = 4
    return [z]


def running_statistics(x: torch.Tensor) -> list[torch.Tensor]:
    mean, var = x.new_zeros(6), x.new_ones(6)
    y = F.batch_norm(x, mean, var, training=True)
    y = F.batch_norm(y, mean, var, training=True)
    return [y, mean, var, F.batch_norm(x, mean, var)]


def inside_transforms(x: torch.Tensor) -> list[torch.Tensor]:
    def loss(row: torch.Tensor) -> torch.Tensor:
        y = row * row
        y[0] = 0
        y.mul_(row)[1:3].neg_()
        return F.silu(y, inplace=True).sum()

    return [torch.vmap(torch.func.grad(loss))(x), torch.func.jacrev(torch.func.grad(loss))(x[0])]


PROGRAMS = [
    assign_a_column, change_the_transpose, change_through_many_views, change_a_row_and_read_all,
    change_the_whole_and_read_views, swap_rows, fill_a_buffer, write_to_out, mask_and_index,
    literal_changed, by_strides, reshaped_in_place, complex_parts, running_statistics,
    inside_transforms,
]  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_program_equals_eager(program: Function):
    assert_same(program, seeded(4, 6))


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_program_equals_eager_on_a_mesh(program: Function):
    x = seeded(4, 6)
    step = pfx.jit(program, mesh=pfx.make_mesh(dp=2, tp=2), in_specs=(P("dp", "tp"),), check=True)
    expected = program(x.clone())
    for one, other in zip(pfx.device_get(step(x)), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_silu_under_grad_in_jit_and_in_scan():
    """torch writes silu's derivative with fill_ and sub_."""
    x, weights = seeded(4, 6), seeded(3, 6, 6)
    mesh = pfx.make_mesh(dp=2, tp=2)

    def loss(weights: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        x, _ = pfx.scan(lambda x, w: (pfx.remat(lambda x: F.silu(x @ w))(x), None), x, weights)
        return F.silu(x).sum()

    gradient = torch.func.grad(loss, argnums=(0, 1))
    specs = (P(None, "tp"), P("dp"))
    found = pfx.jit(gradient, mesh=mesh, in_specs=specs, check=True)(weights, x)
    for one, other in zip(pfx.device_get(found), gradient(weights, x), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def in_place_body(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = x @ w
    first = y[:, 0]
    y[:, 1] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    y.T.mul_(0.5)
    first.mul_(2)
    return y.tanh_() + 1, first


def pure_body(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = x @ w
    column = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=y.dtype)
    y = torch.cat([y[:, :1] * 2, column[:, None], y[:, 2:]], 1) * 0.5
    y = torch.tanh(y)
    return y + 1, y[:, 0]


@pytest.mark.parametrize("remat", [None, "full"])
def test_a_scan_body_with_changes_in_place(remat: str | None):
    x, weights = seeded(4, 6), seeded(3, 6, 6) / 4

    def loss(body: Callable[..., object]) -> Callable[..., torch.Tensor]:
        def run(weights: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            carry, ys = pfx.scan(body, x, weights, remat=remat)
            return (carry * carry).sum() + ys.sum()

        return run

    def twice(f: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return torch.func.grad(lambda w, x: (torch.func.grad(f)(w, x) ** 2).sum())

    for transform in (torch.func.grad, twice):
        found = transform(loss(in_place_body))(weights, x)
        expected = transform(loss(pure_body))(weights, x)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_a_constrained_value_is_still_the_value():
    def step(x: torch.Tensor) -> list[torch.Tensor]:
        y = x * 1
        pfx.constrain(y, P("dp"))[0] = 5
        return [y]

    mesh = pfx.make_mesh(dp=2)
    x = seeded(4, 6)
    (found,) = pfx.device_get(pfx.jit(step, mesh=mesh)(x))
    assert torch.equal(found, step(x)[0])


def test_a_graph_without_changes_is_left_alone():
    traced = _torch.trace(lambda x: [x[0] + 1], [seeded(4, 6)])
    assert functionalize(traced, "f") is traced.module


def test_values_keep_their_form_their_line_and_their_part():
    def step(x: torch.Tensor) -> list[torch.Tensor]:
        y = x.clone()
        with _torch.recomputing():
            y[1] += 1
        return [y]

    nodes = [n for n in pure_module(step, seeded(4, 6)).graph.nodes if n.op == "call_function"]
    first = step.__code__.co_firstlineno
    assert [(n.target.overloadpacket._qualified_op_name, n.meta["source"]) for n in nodes] == [
        ("aten::clone", f"unit/test_functionalize.py:{first + 1}"),
        ("aten::select", f"unit/test_functionalize.py:{first + 3}"),
        ("aten::add", f"unit/test_functionalize.py:{first + 3}"),
        ("aten::select_scatter", f"unit/test_functionalize.py:{first + 3}"),
    ]
    assert [n.meta["late"] for n in nodes] == [False, True, True, True]
    assert [tuple(n.meta["val"].shape) for n in nodes] == [(4, 6), (6,), (6,), (4, 6)]


def test_a_gradient_never_looks_at_memory_by_strides():
    def loss(x: torch.Tensor) -> torch.Tensor:
        y = x * 1
        y[:, 0] = 0
        return y.sum()

    module = pure_module(lambda x: [torch.func.grad(loss)(x)], seeded(4, 6))
    assert not [n for n in module.graph.nodes if "as_strided" in str(n.target)]


def refused(fn: Callable[..., object], *inputs: torch.Tensor) -> str:
    with pytest.raises(TraceError) as error:
        functionalize(_torch.trace(fn, inputs), "jit(f)", ["x", 'state["w"]'])
    line = f"unit/test_functionalize.py:{fn.__code__.co_firstlineno + 1}"
    return str(error.value).replace(line, "LINE")


def test_a_changed_input_is_refused():
    def step(x, w):
        w.T[0].mul_(2)
        return [x, w]

    assert refused(step, seeded(2), seeded(4, 6)) == (
        'jit(f): mul_ at LINE changes the input state["w"] in place.\n'
        "  a step must be a pure function of its arguments.\n"
        "  fix: change a copy (.clone() first) or use the out-of-place form (mul), "
        "and return the new value"
    )


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.zero_(),
        lambda x: x.unsqueeze_(0),
        lambda x: x.detach()[0].fill_(1),
        lambda x: torch.add(x, 1, out=x),
        lambda x: torch._foreach_neg_([x]),
        lambda x: pfx.constrain(x, P("dp")).add_(1),
        lambda x: torch.vmap(lambda row: row.add_(1))(x),
        lambda x: F.batch_norm(x.clone(), x[0], x[1], training=True),
        lambda x: pfx.scan(lambda c, row: (c + row.add_(1), None), x[0], x),
        lambda x: pfx.remat(lambda row: row.neg_())(x),
    ],
)
def test_every_way_to_change_an_input_is_refused(change: Callable[[torch.Tensor], object]):
    def step(x: torch.Tensor) -> torch.Tensor:
        change(x)
        return x * 2

    with pytest.raises(TraceError, match=r"changes (the input x|an input) in place"):
        pfx.jit(step, mesh=pfx.make_mesh(dp=2))(seeded(4, 6))


def test_a_changed_closed_over_tensor_is_refused():
    counter = torch.zeros(3)

    def step(x):
        counter.add_(1)
        return [x + counter]

    assert refused(step, seeded(3)).startswith(
        "jit(f): add_ at LINE changes a tensor that the function closed over in place.\n"
    )


def test_a_tensor_that_overlaps_itself_is_refused():
    def step(x):
        x.clone().expand(4, 3)[0].add_(1)
        return [x]

    assert refused(step, seeded(3)) == (
        "jit(f): add_ at LINE changes a tensor that overlaps itself.\n"
        "  shape (4, 3), strides (0, 1): several elements share one place in memory.\n"
        "  fix: change a copy: .clone() first"
    )


def test_a_view_that_repeats_elements_is_refused():
    def step(x):
        x.clone().unfold(0, 2, 1)[0].add_(1)
        return [x]

    assert refused(step, seeded(3)) == (
        "jit(f): add_ at LINE changes a tensor through its unfold.\n"
        "  a change cannot be carried back through that view.\n"
        "  fix: change a copy: .clone() first"
    )


@pytest.mark.parametrize("inside_scan", [False, True])
def test_an_in_place_draw_is_a_draw(inside_scan: bool):
    def dropout(x: torch.Tensor) -> torch.Tensor:
        return x * torch.empty_like(x).bernoulli_(0.5)

    def step(x: torch.Tensor) -> torch.Tensor:
        return (
            pfx.scan(lambda c, _: (dropout(c), None), x, length=2)[0] if inside_scan else dropout(x)
        )

    with pytest.raises(TraceError, match=r"bernoulli at .* draws from torch's global random"):
        pfx.jit(step, mesh=pfx.make_mesh(dp=2))(seeded(4, 6))

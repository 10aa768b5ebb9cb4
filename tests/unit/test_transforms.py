"""`value_and_grad` and `stop_gradient`: JAX's conventions, torch.autograd's numbers."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

import pfx
from pfx import P
from pfx.lax.stop_gradient import stop_gradient
from pfx.transforms import value_and_grad


class Layer(NamedTuple):
    w: torch.Tensor
    b: Any


def params() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=generator)
    return {"out": [draw(4)], "in": Layer(draw(3, 4), draw(4)), "none": Layer(draw(2), None)}


def data() -> torch.Tensor:
    return torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def loss(p: dict[str, Any], x: torch.Tensor) -> torch.Tensor:
    hidden = torch.tanh(x @ p["in"].w + p["in"].b)
    return ((hidden @ p["out"][0]) ** 2).mean() + (p["none"].w ** 3).sum()


def by_autograd(*wrt: Any) -> list[torch.Tensor]:
    """Value and gradients by plain autograd, flat."""
    wrt = pfx.tree.map(lambda t: t.clone().requires_grad_(), wrt)
    value = loss(*wrt) if len(wrt) == 2 else loss(wrt[0], data())
    return [value.detach(), *torch.autograd.grad(value, pfx.tree.leaves(wrt))]


def assert_equal(found: Any, expected: list[torch.Tensor]) -> None:
    for a, b in zip(pfx.tree.leaves(found), expected, strict=True):
        assert b.abs().max() > 0
        torch.testing.assert_close(a, b, rtol=1e-14, atol=1e-14)


def test_value_and_gradient_are_autograds_and_keep_the_tree() -> None:
    value, gradient = value_and_grad(loss)(params(), data())
    assert isinstance(gradient["in"], Layer) and isinstance(gradient["out"], list)
    assert gradient["none"].b is None
    assert_equal((value, gradient), by_autograd(params()))


@pytest.mark.parametrize("argnums", [(0, 1), (-2, -1)])
def test_a_tuple_of_argnums_gives_a_tuple(argnums: tuple[int, ...]) -> None:
    value, gradients = value_and_grad(loss, argnums)(params(), data())
    assert isinstance(gradients, tuple) and len(gradients) == 2
    assert_equal((value, gradients), by_autograd(params(), data()))
    _, single = value_and_grad(loss, argnums[1])(params(), data())
    assert isinstance(single, torch.Tensor) and torch.equal(single, gradients[1])
    _, (alone,) = value_and_grad(loss, (1,))(params(), data())
    assert torch.equal(alone, single)


def test_argnums_give_gradients_in_the_order_asked() -> None:
    f = lambda x, y: x * y**2
    x, y = torch.tensor(2.0), torch.tensor(3.0)
    _, (dy, dx) = value_and_grad(f, (1, 0))(x, y)
    assert (float(dx), float(dy)) == (9.0, 12.0)


def test_aux_may_be_any_tree() -> None:
    def f(p: Any, x: Any, scale: Any = 1.0) -> Any:
        value = loss(p, x) * scale
        return value, {"value": value, "n": 6, "none": None, "s": ("text", p["out"][0] * 2)}

    (value, aux), gradient = value_and_grad(f, has_aux=True)(params(), data(), scale=1.0)
    assert aux["n"] == 6 and aux["none"] is None and aux["s"][0] == "text"
    assert torch.equal(aux["value"], value) and not aux["value"].requires_grad
    assert torch.equal(aux["s"][1], params()["out"][0] * 2)
    assert_equal((value, gradient), by_autograd(params()))


def test_it_composes_with_itself_and_with_vmap() -> None:
    x = torch.linspace(-1, 1, 5, dtype=torch.float64)
    f = lambda x: (x**4).sum()
    value, second = value_and_grad(lambda x: value_and_grad(f)(x)[1].sum())(x)
    torch.testing.assert_close(value, (4 * x**3).sum())
    torch.testing.assert_close(second, 12 * x**2)
    values, gradients = pfx.vmap(value_and_grad(f))(x)
    torch.testing.assert_close(values, x**4)
    torch.testing.assert_close(gradients, 4 * x**3)


def test_inside_jit_it_is_the_eager_one() -> None:
    step = lambda p, x: value_and_grad(lambda p: (loss(p, x), {"n": x.sum()}), has_aux=True)(p)
    jitted = pfx.jit(step, mesh=pfx.make_mesh(dp=2), in_specs=(P(), P("dp")))
    found = pfx.device_get(jitted(params(), data()))
    (value, aux), gradient = found
    assert_equal((value, gradient), by_autograd(params()))
    torch.testing.assert_close(aux["n"], data().sum())


def test_a_python_float_is_a_scalar() -> None:
    value, gradient = value_and_grad(lambda x: x**2)(3.0)
    assert (float(value), float(gradient)) == (9.0, 6.0)


@pytest.mark.parametrize(
    ("fn", "options", "args", "text"),
    [
        (lambda x: x * 2, {}, (torch.ones(3),), "the function returns another form.\n  value: "
         "float32 (3,)\n  fix: .sum() or .mean()"),
        (lambda x: (x > 0).sum(), {}, (torch.ones(3),), "value: int64 ()\n  fix: return a float"),
        (lambda x: (x.sum(), x), {}, (torch.ones(3),), "returns a tuple.\n  fix: return value, aux"
         " with has_aux=True"),
        (lambda x: x.sum(), {"has_aux": True}, (torch.ones(3),), "needs a pair (value, aux), got a "
         "Tensor"),
        (lambda x: x["a"].sum(), {}, ({"a": torch.ones(2), "n": torch.arange(2)},), "argument 0"
         "['n'] is a Tensor of int64: it has no gradient."),
        (lambda n, x: x.sum(), {"argnums": 2}, (1, torch.ones(2)), "argnums=2 does not name"),
        (lambda n, x: x.sum(), {"argnums": (1, -1)}, (1, torch.ones(2)), "each once"),
    ],
)  # fmt: skip
def test_misuse_says_what_to_write(fn: Any, options: Any, args: Any, text: str) -> None:
    with pytest.raises(TypeError) as error:
        value_and_grad(fn, **options)(*args)
    assert text in str(error.value)
    assert str(error.value).startswith("value_and_grad(<lambda>):")


def test_stop_gradient_is_a_constant_to_every_derivative() -> None:
    x = torch.tensor(1.5, dtype=torch.float64)
    f = lambda x: x**2 * stop_gradient({"x": x, "n": 3, "none": None})["x"]
    assert float(f(x)) == 1.5**3
    assert float(pfx.grad(f)(x)) == 2 * 1.5**2
    assert float(pfx.grad(pfx.grad(f))(x)) == 2 * 1.5
    assert float(pfx.vmap(pfx.grad(f))(x[None])) == 2 * 1.5**2
    kept = stop_gradient((x, 3, "text"))
    assert kept[1:] == (3, "text") and torch.equal(kept[0], x)


def test_stop_gradient_inside_a_scan_and_a_jit() -> None:
    xs = torch.linspace(1, 2, 4, dtype=torch.float64)
    body = lambda c, x: (c + x * stop_gradient(x), None)
    f = lambda xs: pfx.scan(body, torch.zeros((), dtype=torch.float64), xs)[0]
    torch.testing.assert_close(pfx.grad(f)(xs), xs)
    jitted = pfx.jit(pfx.grad(f), mesh=pfx.make_mesh(dp=2), in_specs=(P("dp"),))
    torch.testing.assert_close(pfx.device_get(jitted(xs)), xs)


def test_the_order_of_keys_is_no_part_of_a_tree() -> None:
    """`pfx.tree.map` sorts the keys of a dict; torch.func compares trees in insertion order."""
    p = {"up": torch.ones(2), "down": torch.full((2,), 3.0)}
    f = lambda p: {"y": (p["up"] * p["down"]).sum()}
    out, pushed = pfx.jvp(f, (p,), (pfx.tree.map(torch.ones_like, p),))
    assert out["y"] == 6.0 and pushed["y"] == 8.0
    out, pull = pfx.vjp(f, p)
    (pulled,) = pull({"y": torch.tensor(2.0)})
    assert torch.equal(pulled["up"], torch.full((2,), 6.0))
    with pytest.raises(ValueError, match="keys differ"):
        pfx.jvp(f, (p,), ({"up": torch.ones(2)},))
    with pytest.raises(TypeError, match="float32"):
        pull({"y": torch.ones(3)})


@pytest.mark.parametrize("out_dims", [0, 1, 2, -1, -2, -3])
def test_vmap_puts_the_batch_of_any_result_anywhere(out_dims: int) -> None:
    """torch's own vmap reads past the sizes of a result that does not depend on the batch."""
    x = torch.ones(5)
    constant = pfx.vmap(lambda x: torch.arange(12.0).reshape(3, 4), 0, out_dims)(x)
    expected = torch.arange(12.0).reshape(3, 4).expand(5, 3, 4).movedim(0, out_dims)
    assert torch.equal(constant, expected)
    batched = pfx.vmap(lambda x: x * torch.arange(12.0).reshape(3, 4), 0, out_dims)(x)
    assert torch.equal(batched, expected)


def test_a_pull_that_outlives_its_transform() -> None:
    """What `vjp` returned runs inside others, after the level that saved its tensors has ended."""
    f = pfx.remat(lambda x: torch.sin(x) * torch.cos(x))

    def pulled(x: torch.Tensor) -> torch.Tensor:
        y, pull = pfx.vjp(f, x)
        return pull(torch.ones_like(y))[0]

    x = torch.tensor([0.3, 2.0], dtype=torch.float64)
    torch.testing.assert_close(pfx.vmap(pulled)(x), torch.cos(2 * x))
    torch.testing.assert_close(pfx.grad(lambda x: pulled(x).sum())(x), -2 * torch.sin(2 * x))
    torch.testing.assert_close(pfx.jvp(pulled, (x,), (x,))[1], -2 * x * torch.sin(2 * x))


def test_a_nest_that_torch_cannot_trace_leaves_torch_as_it_was() -> None:
    mesh, f = pfx.make_mesh(i=2), lambda x: torch.sin(x**2).sum()
    x = torch.ones(2, 2, dtype=torch.float64)
    with pytest.raises(TypeError, match=r"(?s)torch cannot trace.*jacrev\(grad\(f\)\)"):
        pfx.jit(lambda x: pfx.vmap(pfx.hessian(f))(x), mesh=mesh)(x)
    expected = pfx.vmap(pfx.hessian(f))(x)  # functorch still works
    found = pfx.jit(lambda x: pfx.vmap(pfx.jacrev(pfx.grad(f)))(x), mesh=mesh)(x)
    torch.testing.assert_close(pfx.device_get(found), expected)

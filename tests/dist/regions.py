"""The tests of manual regions once more, on processes: what `checks.py` runs of `tests/sim`.

Where a launcher runs, `make_mesh` makes process meshes, so those are what these tests build. What they
run is also run on the simulated mesh, in the same process, and the two must agree.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import pytest
import torch

import pfx
from pfx import P
from tests.sim import manual

SIZE = int(os.environ["WORLD_SIZE"])
FILES = [f"tests/sim/test_shard_map_{name}.py"
         for name in ("layout", "collectives", "gradients", "training", "nesting")]  # fmt: skip
KIND: ContextVar[str] = ContextVar("KIND", default="process")


@contextlib.contextmanager
def on(kind: str) -> Iterator[None]:
    """Have every `Twin` run on meshes of a kind."""
    token = KIND.set(kind)
    try:
        yield
    finally:
        KIND.reset(token)


class Twin:
    """`pfx.shard_map` of a function on the processes, and on the simulated mesh of the same axes."""

    def __init__(
        self, fn: Callable[..., Any], mesh: pfx.Mesh, in_specs: Any, out_specs: Any, **options: Any
    ) -> None:
        self.mesh = mesh
        self.regions = {
            kind: pfx.shard_map(
                fn, mesh=of_kind(mesh, kind), in_specs=in_specs, out_specs=out_specs, **options
            )
            for kind in ("process", "simulated")
        }

    def __call__(self, *args: Any) -> Any:
        fits(self.mesh)
        return self.regions[KIND.get()](*args)


def fits(mesh: pfx.Mesh) -> None:
    """Skip a test whose mesh has more devices, or fewer, than processes run."""
    if mesh.size != SIZE:
        pytest.skip(f"a mesh of {mesh.size} devices")


def of_kind(mesh: pfx.Mesh, kind: str) -> pfx.Mesh:
    """The mesh with the same axes of another kind."""
    return dataclasses.replace(mesh, kind=kind)


def agree(found: Any, wanted: Any, *, exact: bool) -> None:
    """Assert that two trees of tensors are equal: bit for bit, or but for the order of a few sums."""
    for a, b in zip(pfx.tree.leaves(found), pfx.tree.leaves(wanted), strict=True):
        if isinstance(a, torch.Tensor):
            tolerances: Any = {"rtol": 0, "atol": 0} if exact else {}
            torch.testing.assert_close(a, b, equal_nan=True, **tolerances)
        else:
            assert a == b


def placed(mesh: pfx.Mesh, args: Any) -> Any:
    """The tensors of a tree as replicated Arrays."""
    put = lambda x: pfx.device_put(x, mesh, P()) if isinstance(x, torch.Tensor) else x
    return pfx.tree.map(put, args)


# As in `manual`: each runs a function of global tensors, in its own way


def alone(fn: Callable[..., Any], mesh: pfx.Mesh, *args: Any) -> Any:
    """Tensors in, tensors out, nothing around it; under `pfx.grad` it is not compiled."""
    fits(mesh)
    found = fn(*args)
    with on("simulated"):
        agree(found, fn(*args), exact=False)
    return found


def arrays(fn: Callable[..., Any], mesh: pfx.Mesh, *args: Any) -> Any:
    """Arrays in, Arrays out; only a region itself takes them."""
    if not isinstance(fn, Twin) or not any(
        isinstance(x, torch.Tensor) for x in pfx.tree.leaves(args)
    ):
        pytest.skip("no region of tensors")
    fits(mesh)
    out = fn(*placed(mesh, args))
    assert all(isinstance(x, pfx.Array) and x.mesh == mesh for x in pfx.tree.leaves(out))
    with on("simulated"):
        wanted = fn(*placed(of_kind(mesh, "simulated"), args))
    found = pfx.device_get(out)
    agree(found, pfx.device_get(wanted), exact=False)
    return found


def compiled(fn: Callable[..., Any], mesh: pfx.Mesh, *args: Any) -> Any:
    """Inside `pfx.jit`, with gradients and all: bit for bit what the simulated mesh computes."""
    fits(mesh)
    found = pfx.device_get(pfx.jit(fn, mesh=mesh, deterministic=True)(*placed(mesh, args)))
    with on("simulated"):
        wanted = pfx.device_get(pfx.jit(fn, mesh=of_kind(mesh, "simulated"))(*args))
    agree(found, wanted, exact=True)
    return found


class Seen:
    """A pytest plugin that keeps what passed and why the rest failed."""

    def __init__(self) -> None:
        self.passed: list[str] = []
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(f"{report.nodeid}\n{report.longreprtext}")
        elif report.passed and report.when == "call":
            self.passed.append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed.append(report.longreprtext)


def run(families: list[str], names: list[str], *, without: list[str]) -> None:
    """Run tests on all ranks alike until one fails.

    Args:
        families: numbers of cases; of each a test must pass alone, and one compiled.
        names: words in the names of more tests; of each a test must pass.
        without: words in the names of tests to leave out, for there are enough like them.
    """
    # Before pytest imports the tests, which take these names from `manual`.
    manual.mapped = Twin
    manual.EACH_WAY = pytest.mark.parametrize("run", [alone, arrays, compiled])
    seen = Seen()
    words = [f"test_{family}_" for family in families] + names
    options = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "--capture=no"]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # other checks import hypothesis
    select = f"({' or '.join(words)}) and not ({' or '.join(without)})"
    pytest.main([*FILES, "-k", select, *options], plugins=[seen])
    assert not seen.failed, "\n".join(seen.failed)
    for word in words:
        ways = ("alone", "compiled") if word not in names else ("",)
        for way in ways:
            assert any(word in name and way in name for name in seen.passed), (word, way)

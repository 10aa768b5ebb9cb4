"""What a process asks of its C library and of Python: each once, and nothing that outlives an error."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

import pfx
from pfx.runtime import device


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int]]]:
    """What is asked of an allocator that only writes it down."""
    calls: list[tuple[int, int]] = []
    library = SimpleNamespace(mallopt=lambda *what: calls.append(what))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_ARENA_MAX", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    device._keep_freed_memory.cache_clear()
    yield calls
    device._keep_freed_memory.cache_clear()


def test_a_process_on_the_cpu_keeps_freed_memory_and_asks_once(asked):
    device.select("cpu", 0)
    device.select("cpu", 5)
    assert asked == [(-1, 1 << 30), (-3, 1 << 30)]


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"])
def test_who_has_set_the_allocator_is_obeyed(asked, monkeypatch, name):
    monkeypatch.setenv(name, "1")
    device.select("cpu", 0)
    assert asked == []


def test_another_c_library_has_no_such_call(asked, monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace())
    device.select("cpu", 0)


def test_garbage_is_collected_again_after_compiling_and_after_an_error():
    seen = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        seen.append(gc.isenabled())
        if len(seen) == 2:
            raise ZeroDivisionError
        return x + 1

    compile_it = lambda: pfx.jit(fn, mesh=pfx.make_mesh(dp=2)).lower(torch.ones(2))
    compile_it()
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError):
        compile_it()
    assert gc.isenabled()
    gc.disable()
    try:
        compile_it()
        assert not gc.isenabled()  # as it was found
    finally:
        gc.enable()
    assert seen == [False, False, False]

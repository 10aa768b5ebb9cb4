"""What ranks say to each other before they run anything, and every error of a failed start."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest
import torch
from torch.distributed import HashStore

import pfx
from pfx import P, make_mesh
from pfx.errors import MeshError, RuntimeMismatchError
from pfx.runtime import device, fingerprint
from pfx.runtime.process import ProcessRuntime
from tests.dist.launch import LAUNCHED, environment, free_port


def meet(texts: Sequence[str | None], timeout: float = 0.3) -> list[str]:
    """Let a thread be a rank with each text (None never comes); what each was told, "" for fine."""
    store, told = HashStore(), [""] * len(texts)

    def rank(number: int, text: str) -> None:
        try:
            fingerprint.agree(store, "program", text, rank=number, size=len(texts),
                              timeout=timeout, where="here:")  # fmt: skip
        except RuntimeMismatchError as error:
            told[number] = str(error)

    threads = [threading.Thread(target=rank, args=(i, text))
               for i, text in enumerate(texts) if text is not None]  # fmt: skip
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return told


@pytest.fixture(autouse=True)
def _short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "GRACE", 0.5)


def test_ranks_with_one_text_agree() -> None:
    assert meet(["a\nb"] * 5, timeout=30.0) == [""] * 5


def test_every_rank_is_told_who_differs_and_where() -> None:
    want = """\
here: ranks 1 and 3 differ from rank 0.
  line 2 of program 1, on rank 0: %2 = b
  on rank 1: %2 = c
  fix: call the same functions in the same order, with the same shapes, on every rank"""
    texts = ["a\n  %2 = b\nd", "a\n  %2 = c\nd", "a\n  %2 = b\nd", "other"]
    assert meet(texts, timeout=30.0) == [want] * 4


def test_a_longer_program_differs_where_the_shorter_ends() -> None:
    assert "on rank 0: (nothing)\n  on rank 1: b" in meet(["a", "a\nb"], timeout=30.0)[0]


def test_every_rank_is_told_who_is_missing() -> None:
    want = """\
here: ranks 1 and 3 of 4 never arrived.
  the others waited 0.3 s at program 1.
  fix: read what ranks 1 and 3 printed, or wait longer: PFX_TIMEOUT=0.6"""
    assert meet(["a", None, "a", None]) == [want, "", want, ""]


def test_without_rank_0_the_others_find_out_alone() -> None:
    told = meet([None, "a", "a"])
    assert told[1] == told[2]
    assert told[1].startswith("here: rank 0 of 3 never arrived.\n  the others waited 0.3 s")


def test_many_ranks_are_named_shortly() -> None:
    told = meet(["a", *[None] * 13])
    assert told[0].splitlines()[0] == (
        "here: ranks 1, 2, 3, 4, 5, 6, 7, 8, 9, 10 and 3 more of 14 never arrived."
    )


def test_the_nth_meeting_of_one_rank_is_the_nth_of_another() -> None:
    store = HashStore()
    told: list[str] = []

    def rank(number: int, texts: Sequence[str]) -> None:
        for text in texts:
            try:
                fingerprint.agree(store, "program", text, rank=number, size=2,
                                  timeout=30.0, where="here:")  # fmt: skip
            except RuntimeMismatchError as error:
                told.append(str(error))

    threads = [threading.Thread(target=rank, args=(0, "abc")),
               threading.Thread(target=rank, args=(1, "abd"))]  # fmt: skip
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(told) == 2
    assert all("line 1 of program 3, on rank 0: c\n  on rank 1: d" in text for text in told)


# A start that fails, in this very process


def launch(monkeypatch: pytest.MonkeyPatch, rank: int, size: int, timeout: str = "1") -> int:
    """Look like one process of several, none of which exist; returns the port they would share."""
    port = free_port()
    for name, text in (environment(rank, size, port) | {"PFX_TIMEOUT": timeout}).items():
        monkeypatch.setenv(name, text)
    return port


def run_something(size: int) -> None:
    mesh = make_mesh(dp=size)
    assert mesh.kind == "process"
    pfx.jit(lambda x: x.sum(), mesh=mesh, in_specs=P("dp"))(torch.ones(8))


def test_a_rank_that_never_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "GRACE", 0.1)
    launch(monkeypatch, 0, 2)
    began = time.monotonic()
    with pytest.raises(RuntimeMismatchError) as caught:
        run_something(2)
    assert time.monotonic() - began < 30
    assert str(caught.value) == (
        "process mesh dp=2: rank 1 of 2 never arrived.\n"
        "  the others waited 1 s at start 1.\n"
        "  fix: read what rank 1 printed, or wait longer: PFX_TIMEOUT=2"
    )


def test_rank_0_never_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    port = launch(monkeypatch, 1, 2)
    with pytest.raises(RuntimeMismatchError) as caught:
        run_something(2)
    assert str(caught.value) == (
        "process mesh dp=2: rank 0 of 2 never arrived.\n"
        f"  the others waited 1 s at 127.0.0.1:{port}.\n"
        "  fix: read what rank 0 printed, or wait longer: PFX_TIMEOUT=2"
    )


def test_the_wrong_number_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    launch(monkeypatch, 0, 2)
    with pytest.raises(MeshError) as caught:
        pfx.device_put(torch.ones(8), make_mesh(dp=2, tp=2), P("dp"))
    assert str(caught.value) == (
        "process mesh dp=2 tp=2: has 4 devices, but 2 processes run.\n"
        "  2 * 2 = 4; WORLD_SIZE=2.\n"
        "  fix: torchrun --nproc-per-node 4 script.py, or axes whose sizes multiply to 2"
    )


def test_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(MeshError) as caught:
        pfx.device_put(torch.ones(8), make_mesh("process", dp=2))
    assert str(caught.value) == (
        "process mesh dp=2: nothing started its processes.\n"
        "  RANK and WORLD_SIZE are not set.\n"
        '  fix: torchrun --nproc-per-node 2 script.py, or make_mesh(..., kind="simulated")'
    )


def test_a_timeout_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    launch(monkeypatch, 0, 2, timeout="soon")
    with pytest.raises(MeshError) as caught:
        ProcessRuntime(make_mesh(dp=2))
    assert str(caught.value) == (
        "process mesh: a timeout of 'soon' seconds.\n  fix: PFX_TIMEOUT=60"
    )


def test_check_is_for_simulated_meshes(monkeypatch: pytest.MonkeyPatch) -> None:
    launch(monkeypatch, 0, 2)
    with pytest.raises(MeshError) as caught:
        pfx.jit(lambda x: x, mesh=make_mesh(dp=2), check=True)(torch.ones(8))
    assert str(caught.value) == (
        "process mesh dp=2: check=True needs every device's copy.\n"
        '  fix: drop check=True, or make_mesh(..., kind="simulated")'
    )


def test_a_device_without_backend() -> None:
    assert [device.backend_of(name) for name in ("cpu", "cuda", "npu")] == ["gloo", "nccl", "hccl"]
    with pytest.raises(MeshError) as caught:
        device.backend_of("tpu")
    assert str(caught.value) == (
        "process mesh: no backend moves tensors of device 'tpu'.\n"
        "  fix: device= one of 'cpu', 'cuda', 'npu'"
    )

"""Lines, JSON lines, signals, and when ranks stop."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import pytest

from pfx.recipe.agree import ROUNDS, stopping
from pfx.recipe.log import JsonLines, Lines, Several, TensorBoard, line, read_metrics
from pfx.recipe.lost import is_of_others, lost
from pfx.recipe.screen import screen
from pfx.recipe.signals import Stop, watching
from pfx.recipe.speed import mfu

NUMBERS = {
    "loss": 3.25, "grad_norm": 0.5, "lr": 1e-3, "tokens/s": 12345.6, "mfu": 0.4123,
    "memory": 1.5 * 2**30, "skipped": 2.0,
}  # fmt: skip


def test_lines_are_aligned_whatever_the_numbers():
    first = line(9, 1000, NUMBERS)
    assert first == (
        "step    9/1000  loss   3.250000  grad norm    0.5000  lr 1.00e-03     12,346 tokens/s"
        "  MFU  41.2%    1.50 GiB  skipped 2"
    )
    later = line(1000, 1000, {**NUMBERS, "loss": 12.0, "grad_norm": 123.4, "tokens/s": 9.0})
    assert len(first) == len(later)


def test_every_so_many_steps_and_the_ends_are_shown():
    shown: list[str] = []
    lines = Lines(shown.append, total=11, every=5)
    for step in range(1, 12):
        lines.step(step, {"loss": 1.0})
    assert [text.split()[1] for text in shown] == ["1/11", "5/11", "10/11", "11/11"]
    lines.event("evaluate", 11, {"loss": 0.123456789})
    assert shown[-1] == "evaluate at step 11: loss 0.123457"


@hypothesis.given(st.lists(st.floats(), min_size=1))
def test_json_lines_hold_every_bit_and_are_strict_json(tmp_path_factory, losses):
    path = tmp_path_factory.mktemp("log") / "metrics.jsonl"
    sink = JsonLines(path)
    for step, loss in enumerate(losses):
        sink.step(step, {"loss": loss})
    sink.close()
    strict = lambda text: json.loads(text, parse_constant=pytest.fail)
    records = [strict(text) for text in path.read_text().splitlines()]
    for loss, record in zip(losses, records, strict=True):
        back = float(record["loss"])
        assert back == loss or (math.isnan(back) and math.isnan(loss))


def test_a_killed_run_leaves_a_file_that_goes_on(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 5.0}\n{"step": 2, "loss": 4.0}\n{"step": 3, "lo')
    sink = JsonLines(path)
    sink.event("resume", 1, {})
    sink.step(2, {"loss": 4.5})
    sink.close()
    found = read_metrics(path)
    assert {step: record["loss"] for step, record in found.items()} == {1: 5.0, 2: 4.5}


def test_an_empty_file_gets_no_blank_line(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.touch()
    JsonLines(path).close()
    assert path.read_text() == ""


def test_tensorboard_gets_curves(tmp_path: Path):
    pytest.importorskip("tensorboard")
    sink = Several(TensorBoard(tmp_path / "tb"))
    sink.step(1, {"loss": 2.0})
    sink.event("evaluate", 1, {"loss": 2.5, "note": "x"})
    sink.close()
    (file,) = (tmp_path / "tb").iterdir()
    data = file.read_bytes()
    assert b"train/loss" in data and b"evaluate/loss" in data and b"evaluate/note" in data


def test_off_a_terminal_lines_are_plain(capsys: pytest.CaptureFixture[str]):
    with screen(3, every=1, progress=True) as sinks:
        Several(*sinks).step(1, {"loss": 1.0})
    assert capsys.readouterr().out == "step 1/3  loss   1.000000\n"


def test_on_a_terminal_a_bar_follows(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("rich")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "100")
    with screen(4, every=1, progress=True) as sinks:
        every = Several(*sinks)
        for step in range(1, 5):
            every.step(step, {"loss": 1.0})
        every.event("checkpoint", 4, {"tier": "final"})
        every.close()
    shown = capsys.readouterr().out
    assert "step 3/4  loss   1.000000" in shown and "4/4" in shown
    assert "checkpoint at step 4: tier final" in shown


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_collected_and_handlers_are_put_back(number):
    before = signal.getsignal(number)
    with watching() as stop:
        assert stop.reason == ""
        os.kill(os.getpid(), number)
        assert stop.reason == signal.Signals(number).name
    assert signal.getsignal(number) is before


def test_a_second_interrupt_interrupts():
    with watching():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_two_requests_to_end_are_one():
    with watching() as stop:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
    assert stop.reason == "SIGTERM"


class Memory:
    """A store in this process."""

    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        if self.held.get(key, b"") == expected.encode():
            self.held[key] = value.encode()
        return self.held[key]

    def set(self, key: str, value: bytes) -> None:
        self.held[key] = value

    def check(self, keys: list[str]) -> bool:
        return all(key in self.held for key in keys)

    def get(self, key: str) -> bytes:
        return self.held[key]


class Rank:
    def __init__(self, store: Memory, rank: int, size: int) -> None:
        self.store, self.rank, self.size, self.patience = store, rank, size, 5.0


@hypothesis.given(st.data())
def test_all_ranks_stop_in_the_same_round(data):
    """Ranks take turns in any order that their collectives allow: within one round of each other."""
    size = data.draw(st.integers(2, 4))
    store, stops = Memory(), [Stop() for _ in range(size)]
    asked = {rank: data.draw(st.integers(0, 6)) for rank in data.draw(
        st.sets(st.integers(0, size - 1), min_size=1))}  # fmt: skip
    rounds, ended = [0] * size, {}
    while len(ended) < size:
        # A rank begins round r + 2 only when all have begun round r: it has read its numbers.
        able = [r for r in range(size) if r not in ended and rounds[r] < min(rounds) + 2]
        rank = data.draw(st.sampled_from(able))
        if asked.get(rank) == rounds[rank]:
            stops[rank].ask("SIGTERM")
        reason = stopping(Rank(store, rank, size), stops[rank], rounds[rank])
        if reason:
            ended[rank] = rounds[rank]
        else:
            rounds[rank] += 1
    assert len(set(ended.values())) == 1
    # The first word counts, and it may be that of a rank one round ahead.
    assert max(ended.values()) <= min(asked.values()) + ROUNDS + 1


@pytest.mark.parametrize(
    ("here", "text"),
    [
        ([0, 1], "rank 0 of 3 (a): lost rank 2 (b)."),
        ([0], "rank 0 of 3 (a): lost rank 1 (a), rank 2 (b)."),
        ([0, 1, 2], "rank 0 of 3 (a): a collective failed although all ranks are here."),
    ],
)
def test_the_roll_call_names_who_is_gone(here, text):
    store = Memory()
    for rank in here[1:]:
        store.set(f"pfx/recipe/roll/{rank}", b"here")
    error = RuntimeError("[gloo] Connection closed by peer\nmore")
    found = lost(Rank(store, 0, 3), ["a", "a", "b"], error, patience=0.05)
    assert str(found).splitlines()[:2] == [text, "  [gloo] Connection closed by peer"]
    assert "start the same command again" in str(found)


def test_a_store_that_is_gone_is_the_host_that_is_gone(monkeypatch: pytest.MonkeyPatch):
    class Gone(Memory):
        def set(self, key: str, value: bytes) -> None:
            raise RuntimeError("Broken pipe")

    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    found = lost(Rank(Gone(), 2, 3), ["a", "a", "b"], RuntimeError("timed out"), patience=0.05)
    assert str(found).startswith(
        "rank 2 of 3 (b): lost the store at 10.0.0.1, and with it ranks on other hosts: 0 (a), 1 (a)."
    )


def test_a_store_that_never_answers_is_not_waited_for(monkeypatch: pytest.MonkeyPatch):
    class Silent(Memory):
        def check(self, keys: list[str]) -> bool:
            time.sleep(60)
            return False

    rank = Rank(Silent(), 1, 2)
    rank.patience = 0.05
    with pytest.raises(RuntimeError, match=r"the store has not answered for 0\.05 s") as error:
        stopping(rank, Stop(), 0)
    assert is_of_others(error.value)


def test_errors_of_ones_own_are_not_of_others():
    assert not is_of_others(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_of_others(ValueError("Connection closed by peer"))


def test_mfu_is_a_share_of_all_devices():
    assert mfu(6e12, seconds=2.0, devices=3, peak=10e12) == pytest.approx(0.1)

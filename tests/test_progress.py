"""What a terminal, and a log, shows of a sweep."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from iclens.cli import progress
from iclens.lab.recipe import load_recipe
from iclens.lab.work import Event

RECIPE = load_recipe("tiny")
STEPS = RECIPE.train.steps


@pytest.fixture
def clock(monkeypatch):
    """Time that a test sets."""
    now = SimpleNamespace(seconds=1000.0)
    monkeypatch.setattr(progress.time, "monotonic", lambda: now.seconds)
    return now


@pytest.fixture
def shown(clock):
    run = SimpleNamespace(recipe=RECIPE, cells=["a", "b", "c"])
    return progress.Progress(run)


def at_work(shown, clock) -> None:
    """One cell was there, one is done after 2 s, one is half way at 50 steps a second."""
    shown.on_event(Event("a", "skip"))
    for name in "bc":
        shown.on_event(Event(name, "start"))
    for name, steps in (("b", STEPS // 2), ("c", 10), ("b", STEPS), ("c", 60)):
        clock.seconds += 0.5
        shown.on_event(Event(name, "steps", steps))
    shown.on_event(Event("b", "done"))
    shown.on_event(Event("c", "phase", 60, "G2"))


def test_cells_rate_and_time_left(shown, clock) -> None:
    at_work(shown, clock)
    begun, (last, trained) = shown.window[0], shown.window[-1]
    # Steps a cell had when it was first heard of may be from before.
    assert trained == STEPS - STEPS // 2 + 50
    rate = (trained - begun[1]) / (last - begun[0])
    left = (STEPS - 60) / rate
    assert shown.summary() == (
        f"2 of 3 cells done, 1 running, 0 failed, {rate:.0f} steps/s, "
        f"{progress.duration(left)} left"
    )
    shown.on_event(Event("c", "fail", detail="Traceback\nValueError: planted"))
    assert "2 of 3 cells done, 0 running, 1 failed" in shown.summary()


def test_no_rate_while_no_worker_is_there(shown, clock) -> None:
    at_work(shown, clock)
    shown.on_event(Event("", "idle"))
    assert shown.summary() == "2 of 3 cells done, 0 running, 0 failed"


def test_plain_lines_where_there_is_no_terminal(shown, clock, capsys) -> None:
    shown.on_event(Event("", "dashboard", detail="http://127.0.0.1:1/status"))
    at_work(shown, clock)
    clock.seconds += 11
    shown.on_event(Event("c", "steps", 70))
    lines = capsys.readouterr().err.splitlines()
    assert lines[:4] == [
        "dashboard http://127.0.0.1:1/status",
        "a is done already",
        "b starts",
        "c starts",
    ]
    assert lines[4] == "b is done"
    assert lines[5].startswith("2 of 3 cells done, 1 running, 0 failed, ")
    assert lines[5].endswith("; c step 70 G2")
    shown.on_event(Event("c", "fail", detail="Traceback\nValueError: planted"))
    assert capsys.readouterr().err == "c failed: ValueError: planted\n"


@pytest.mark.parametrize("width", [60, 100])
def test_a_terminal_shows_the_label_of_each_running_cell(shown, clock, width) -> None:
    at_work(shown, clock)
    console = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)
    console.print(shown.render())
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert "2 of 3 cells done" in lines[0]
    assert lines[-1].split()[0] == "c"
    assert lines[-1].split()[-5:] == ["step", "60", "of", str(STEPS), "G2"]

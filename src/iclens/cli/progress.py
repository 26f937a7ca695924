"""Progress of a sweep, from all its workers, in one place on the terminal."""

import sys
import time
from collections import deque
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from iclens.report.style import PHASE_COLOURS

if TYPE_CHECKING:
    from iclens.lab.store import Run
    from iclens.lab.work import Event

PLAIN_SECONDS = 10.0
"""Time between lines of progress where there is no terminal."""
WINDOW_SECONDS = 60.0
"""Time over which the rate is taken."""


class Progress:
    """A live display in a terminal, plain lines elsewhere.  A context manager."""

    def __init__(self, run: "Run") -> None:
        self.steps = run.recipe.train.steps
        self.refines = run.recipe.sweep.refine
        self.cells = len(run.cells)
        self.done = self.failed = 0
        self.running: dict[str, tuple[int, str]] = {}  # steps and label
        self.trained = 0  # steps since the start
        self.window: deque[tuple[float, int]] = deque()
        self.shown = time.monotonic()
        console = Console(file=sys.stderr)
        self.live = Live(console=console, get_renderable=self.render, transient=True)
        self.console = console if console.is_terminal else None

    def __enter__(self) -> "Progress":
        if self.console:
            self.live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.live.stop()

    def on_event(self, event: "Event") -> None:
        """Take in what happens to a cell."""
        name = event.cell
        if not name:
            told = {
                "idle": "no worker is there: waiting for one",
                "dashboard": f"dashboard {event.detail}",
            }
            if event.kind == "idle":
                self.window.clear()
                self.running.clear()
            self.say(told.get(event.kind, event.detail))
            return
        if event.kind in ("skip", "done", "fail"):
            self.running.pop(name, None)
            self.done += event.kind != "fail"
            self.failed += event.kind == "fail"
        elif event.kind == "start":
            self.running[name] = (0, "")
            self.cells = max(self.cells, self.done + self.failed + len(self.running))
        elif name in self.running and event.kind in ("steps", "phase"):
            before, phase = self.running[name]
            if before:  # what a cell that goes on had before was not trained now
                self.count(event.steps - before)
            self.running[name] = (event.steps, event.detail or phase)
        told = {
            "start": "starts",
            "wait": "waits: another process is at it",
            "skip": "is done already",
            "set aside": f"was damaged ({event.detail}): set aside, computed again",
            "done": "is done",
            "fail": f"failed: {(event.detail.strip().splitlines() or [''])[-1]}",
        }
        if event.kind in told:
            self.say(f"{name} {told[event.kind]}")
        elif not self.console and time.monotonic() - self.shown > PLAIN_SECONDS:
            self.shown = time.monotonic()
            under_way = "; ".join(
                f"{cell} step {steps} {phase}".strip()
                for cell, (steps, phase) in self.running.items()
            )
            self.say(f"{self.summary()}; {under_way}")

    def count(self, steps: int) -> None:
        """Take in that steps were trained."""
        self.trained += max(0, steps)
        now = time.monotonic()
        self.window.append((now, self.trained))
        while now - self.window[0][0] > WINDOW_SECONDS:
            self.window.popleft()

    def summary(self) -> str:
        """What is done, at which rate, and the time left."""
        line = (
            f"{self.done} of {self.cells} cells done, {len(self.running)} running, "
            f"{self.failed} failed"
        )
        window = tuple(self.window)  # another thread changes it
        if len(window) < 2:
            return line
        (begun, first), (last, trained) = window[0], window[-1]
        rate = (trained - first) / max(last - begun, 1e-9)
        left = (self.cells - self.done - self.failed) * self.steps
        left -= sum(steps for steps, _ in dict(self.running).values())
        least = "at least " if self.refines else ""
        return f"{line}, {rate:.0f} steps/s, {least}{duration(left / max(rate, 1e-9))} left"

    def render(self) -> Group:
        """What the terminal shows."""
        table = Table.grid(padding=(0, 2))
        for name, (steps, phase) in dict(self.running).items():  # another thread changes it
            colour = PHASE_COLOURS.get(phase, "default")
            bar = ProgressBar(
                self.steps, steps, width=24, complete_style=colour, finished_style=colour
            )
            table.add_row(name, bar, f"step {steps} of {self.steps}", Text(phase, colour))
        return Group(Text(self.summary()), table)

    def say(self, line: str) -> None:
        """A line that stays."""
        if self.console:
            self.console.print(line, markup=False, highlight=False)
        else:
            print(line, file=sys.stderr, flush=True)


def duration(seconds: float) -> str:
    """Seconds as a text to read."""
    minutes = seconds / 60
    if minutes < 1:
        return f"{seconds:.0f} s"
    return f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.1f} h"

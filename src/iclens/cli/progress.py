"""Progress of a sweep on the terminal."""

import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from iclens.lab.cell import Cell
    from iclens.lab.store import Run

PLAIN_SECONDS = 10.0
"""Time between lines of progress where there is no terminal."""


def duration(seconds: float) -> str:
    """Seconds as a text to read."""
    minutes = seconds / 60
    if minutes < 1:
        return f"{seconds:.0f} s"
    return f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.1f} h"


class Progress:
    """Progress of a sweep: a live line in a terminal, plain lines elsewhere."""

    def __init__(self, run: "Run") -> None:
        self.left = len(run.recipe.sweep.chains) * len(run.recipe.sweep.seeds)
        self.left *= run.recipe.train.steps
        self.trained = 0  # steps, and the seconds they took, without compilation
        self.seconds = 0.0
        self.last: tuple[int, float] | None = None
        self.shown = time.monotonic()

    def on_cell(self, cell: "Cell", event: str) -> None:
        self.last = None
        if event in ("skip", "done", "fail"):
            self.left -= cell.recipe.train.steps
        told = {
            "start": "starts",
            "skip": "is done already",
            "set aside": f"is damaged ({cell.damage}): set aside, computed again",
            "done": "is done",
            "fail": "failed",
        }[event]
        self.say(f"{cell.name} {told}", final=True)

    def on_steps(self, cell: "Cell", steps: int) -> None:
        now = time.monotonic()
        if self.last is not None:
            self.trained += steps - self.last[0]
            self.seconds += now - self.last[1]
        self.last = steps, now
        live = sys.stderr.isatty()
        if not self.trained or now - self.shown < (0.2 if live else PLAIN_SECONDS):
            return
        self.shown = now
        rate = self.trained / self.seconds
        self.say(
            f"{cell.name} step {steps} of {cell.recipe.train.steps}, "
            f"{rate:.0f} steps/s, {duration((self.left - steps) / rate)} left",
            final=not live,
        )

    def say(self, line: str, *, final: bool) -> None:
        clear: Any = "\r\x1b[K" if sys.stderr.isatty() else ""
        print(f"{clear}{line}", end="\n" if final else "", file=sys.stderr, flush=True)

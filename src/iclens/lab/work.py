"""The work on one cell, in whatever process does it: hold it, train it, tell of it."""

from __future__ import annotations

import contextlib
import os
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from iclens.lab.cell import Cell, run_cell, tidy
from iclens.lab.files import hold_lock, write_file

TELL_SECONDS = 0.5
"""Time between two tellings of the steps of a cell."""
POLL_SECONDS = 1.0
"""Time between two looks at a cell that another process holds."""


Kind = Literal[
    "dashboard",
    "idle",
    "notice",
    "skip",
    "start",
    "wait",
    "set aside",
    "steps",
    "phase",
    "done",
    "fail",
]


@dataclass(frozen=True)
class Event:
    """What happens to a cell."""

    cell: str
    kind: Kind
    """Of no cell: where the dashboard is; no worker is there; another thing to know.  Else: done
    already; begins or goes on; another process is at it; was damaged and is computed again; steps
    done; label at the last evaluation; finished; failed."""
    steps: int = 0
    detail: str = ""
    """The address, the damage, the label, or the error."""


def work(cell: Cell, tell: Callable[[Event], None]) -> str | None:
    """Do a cell, unless it is done; returns the traceback if it fails."""
    told = Teller(cell.name, tell)
    try:
        with prepare(replace(cell), told) as wanting:
            if wanting is not None:
                run_cell(wanting, on_steps=told.steps, on_phase=told.phase)
    except Exception:
        reason = traceback.format_exc()
        keep_error(cell, reason)
        return reason
    return None


@contextlib.contextmanager
def prepare(cell: Cell, told: Teller) -> Iterator[Cell | None]:
    """Hold a cell and make it ready to be trained; yields None if it is done.

    While another process is at the cell, this one waits: that may be one given up for lost.
    """
    with hold_cell(cell, told):
        tidy(cell)
        if cell.status == "done":
            yield None
            return
        if cell.status == "damaged":
            told("set aside", detail=cell.damage or "")
            _set_aside(cell)
        told("start")
        yield replace(cell)


@contextlib.contextmanager
def hold_cell(cell: Cell, told: Teller) -> Iterator[None]:
    """Keep other processes from a cell meanwhile."""
    if not cell.folder.parent.is_dir():
        raise FileNotFoundError(f"the run's folder {str(cell.folder.parent)!r} is gone")
    cell.folder.mkdir(exist_ok=True)
    waited = False
    while True:
        with contextlib.ExitStack() as stack:
            if stack.enter_context(hold_lock(cell.lock_path)):
                yield
                return
        if not waited:
            told("wait")
        waited = True
        time.sleep(POLL_SECONDS)


class Teller:
    """Makes events of one cell, of steps only so many a second."""

    def __init__(self, name: str, tell: Callable[[Event], None]) -> None:
        self._name, self._tell, self._told = name, tell, 0.0

    def __call__(self, kind: Kind, steps: int = 0, detail: str = "") -> None:
        self._tell(Event(self._name, kind, steps, detail))

    def steps(self, done: int) -> None:
        if time.monotonic() - self._told > TELL_SECONDS:
            self._told = time.monotonic()
            self("steps", steps=done)

    def phase(self, steps: int, phase: str) -> None:
        self("phase", steps=steps, detail=phase)

    def ended(self, reason: str | None) -> None:
        """Tell that the cell is done, or why it failed."""
        self("fail" if reason else "done", detail=reason or "")


def keep_error(cell: Cell, reason: str) -> None:
    """Write why a cell failed into its folder, if that can be done."""
    with contextlib.suppress(OSError):  # a full disk, or a run that was removed
        if cell.folder.is_dir():
            cell.path.mkdir(exist_ok=True)
            write_file(cell.path / "error.txt", reason.encode())


def _set_aside(cell: Cell) -> None:
    """Rename the folder of a damaged cell, whose files a user may still want to see."""
    number = 1
    while (aside := cell.path.with_name(f"{cell.path.name}.damaged-{number}")).exists():
        number += 1
    cell.path.rename(aside)


@cache
def use_one_thread() -> None:
    """Let jax compute on one thread in this process, if it has not begun to.

    jax makes as many threads as the process may use cores when it starts, so it is started while
    that is one core.  Cells are trained so, for two threads hardly speed up small models, and
    results that depend on the number of threads could not be had again on another machine.
    """
    import jax

    if not hasattr(os, "sched_getaffinity"):  # not Linux
        jax.devices()
        return
    cores = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(cores)})
        jax.devices()
    finally:
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError):  # a thread that has ended
                os.sched_setaffinity(int(thread), cores)

"""Sweeps: the cells of a run, one after another, and what they will cost."""

from __future__ import annotations

import resource
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from iclens.lab.cell import Cell, run_cell
from iclens.lab.files import write_file
from iclens.lab.recipe import Recipe
from iclens.lab.store import Run, hold, open_run, record_provenance
from iclens.phases import float_diversity

CALIBRATION_STEPS = 128


@dataclass(frozen=True)
class Plan:
    """What a run will take on this machine, from a short calibration."""

    cells: int
    steps: int
    """Optimizer steps of all cells together."""
    seconds: float
    """Estimated time of the training, its evaluations and compilation."""
    peak_bytes: int
    """Peak resident memory of this process during the calibration at the largest K."""


def plan(recipe: Recipe) -> Plan:
    """Measure a few steps of the largest cell, twice, and extrapolate.

    The first measurement has compilation and set-up in it, the second cell of the same shape has
    not: their difference is counted once for each K.
    """
    largest = max(recipe.sweep.chains, key=float_diversity)
    steps = min(CALIBRATION_STEPS, recipe.train.steps)
    few = replace(recipe, train=replace(recipe.train, steps=steps, warmup=0, evaluations=1))

    def measure(seed: int, folder: str) -> tuple[float, float]:
        times = [time.perf_counter()]
        cell = Cell(Path(folder), few, largest, seed)
        run_cell(cell, on_steps=lambda _: times.append(time.perf_counter()))
        return time.perf_counter() - times[0], (times[-1] - times[1]) if len(times) > 2 else 0.0

    with tempfile.TemporaryDirectory() as folder:
        cold, _ = measure(0, folder)
        warm, block = measure(1, folder)
    blocks = max(1, steps // 64 - 1)
    step = block / (64 * blocks) if block else warm / steps
    overhead = max(0.0, warm - steps * step)
    cells = len(recipe.sweep.chains) * len(recipe.sweep.seeds)
    evaluations = len(recipe.train.evaluation_steps)
    unit = 1024 if sys.platform != "darwin" else 1
    return Plan(
        cells=cells,
        steps=cells * recipe.train.steps,
        seconds=len(recipe.sweep.chains) * (cold - warm)
        + cells * (recipe.train.steps * step + overhead * (1 + evaluations / 4)),
        peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit,
    )


def run_sweep(
    run: Run,
    *,
    on_cell: Callable[[Cell, str], None] = lambda cell, event: None,
    on_steps: Callable[[Cell, int], None] = lambda cell, steps: None,
) -> list[Cell]:
    """Run the cells that are not done yet; returns those that failed.

    `on_cell` hears of a cell `start`, `skip` (done already), `set aside` (damaged, and now
    computed again), `done` and `fail`; `on_steps` of the steps done in the running cell.
    Raises `ValueError` if another process works on the run.
    """
    failed = []
    with hold(run):
        record_provenance(run)
        for cell in open_run(run.path).cells:
            if cell.status == "done":
                on_cell(cell, "skip")
                continue
            if cell.status == "damaged":
                on_cell(cell, "set aside")
                cell = _set_aside(cell)
            on_cell(cell, "start")
            try:
                run_cell(cell, on_steps=partial(on_steps, cell))
            except Exception as error:
                reason = "".join(traceback.format_exception(error))
                cell.path.mkdir(parents=True, exist_ok=True)
                write_file(cell.path / "error.txt", reason.encode())
                failed.append(replace(cell))
                on_cell(failed[-1], "fail")
            else:
                on_cell(replace(cell), "done")
    return failed


def _set_aside(cell: Cell) -> Cell:
    """Rename the folder of a damaged cell, whose files a user may still want to see."""
    number = 1
    while (aside := cell.path.with_name(f"{cell.path.name}.damaged-{number}")).exists():
        number += 1
    cell.path.rename(aside)
    return replace(cell)

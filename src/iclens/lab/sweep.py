"""Sweeps: the cells of a run, one after another, and what they will cost."""

from __future__ import annotations

import contextlib
import resource
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from iclens.lab.cell import Cell, run_cell, tidy
from iclens.lab.files import write_file
from iclens.lab.recipe import Recipe
from iclens.lab.store import Run, hold, open_run, record_provenance

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
    """Train a little of the largest cell, three times, and extrapolate.

    The first time has compilation in it, once for each K; the second has two evaluations and the
    third six, which tells what one takes.
    """
    # Without end of chains there are no memorising references to compute.
    largest = max(recipe.sweep.chains, key=lambda chains: 0 if chains == "infinite" else chains)
    steps = min(CALIBRATION_STEPS, recipe.train.steps)

    def measure(seed: int, evaluations: int) -> tuple[float, float]:
        """Seconds in all, and of one step."""
        train = replace(
            recipe.train, steps=steps, warmup=0, evaluations=evaluations, spacing="linear"
        )
        times: list[tuple[float, int]] = []
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            run_cell(
                Cell(Path(folder), replace(recipe, train=train), largest, seed),
                on_steps=lambda done: times.append((time.perf_counter(), done)),
            )
        whole = time.perf_counter() - start
        (first, begun), (last, done) = times[0], times[-1]
        return whole, (last - first) / (done - begun) if done > begun else whole / steps

    cold, _ = measure(0, 1)
    warm, step = measure(1, 1)
    many, _ = measure(2, 5)
    evaluation = max(0.0, many - warm) / 4
    overhead = max(0.0, warm - steps * step - 2 * evaluation)
    cells = len(recipe.sweep.chains) * len(recipe.sweep.seeds)
    evaluations = len(recipe.train.evaluation_steps)
    unit = 1024 if sys.platform != "darwin" else 1
    return Plan(
        cells=cells,
        steps=cells * recipe.train.steps,
        seconds=len(recipe.sweep.chains) * max(0.0, cold - warm)
        + cells * (recipe.train.steps * step + evaluations * evaluation + overhead),
        peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit,
    )


def run_sweep(
    run: Run,
    *,
    on_cell: Callable[[Cell, str], None] = lambda cell, event: None,
    on_steps: Callable[[Cell, int], None] = lambda cell, steps: None,
) -> dict[str, str]:
    """Run the cells that are not done yet; returns why those failed that did, by name.

    `on_cell` hears of a cell `start`, `skip` (done already), `set aside` (damaged, and now
    computed again), `done` and `fail`; `on_steps` of the steps done in the running cell.
    Raises `ValueError` if another process works on the run.
    """
    failed = {}
    with hold(run):
        record_provenance(run)
        for cell in open_run(run.path).cells:
            try:
                tidy(cell)
                if cell.status == "done":
                    on_cell(cell, "skip")
                    continue
                if cell.status == "damaged":
                    on_cell(cell, "set aside")
                    _set_aside(cell)
                on_cell(cell, "start")
                run_cell(replace(cell), on_steps=partial(on_steps, cell))
            except Exception as error:
                failed[cell.name] = "".join(traceback.format_exception(error))
                with contextlib.suppress(OSError):  # a full disk must not stop the other cells
                    cell.path.mkdir(parents=True, exist_ok=True)
                    write_file(cell.path / "error.txt", failed[cell.name].encode())
                on_cell(cell, "fail")
            else:
                on_cell(cell, "done")
    return failed


def _set_aside(cell: Cell) -> None:
    """Rename the folder of a damaged cell, whose files a user may still want to see."""
    number = 1
    while (aside := cell.path.with_name(f"{cell.path.name}.damaged-{number}")).exists():
        number += 1
    cell.path.rename(aside)

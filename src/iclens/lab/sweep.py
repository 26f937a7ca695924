"""Sweeps: the cells of a run, where and in which order, and what they will cost."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from iclens.interrupts import held_back
from iclens.lab.cell import Cell, run_cell, tidy
from iclens.lab.ensemble import run_ensembles
from iclens.lab.files import hold_lock
from iclens.lab.recipe import Recipe
from iclens.lab.store import Run, hold, open_run, record_provenance
from iclens.lab.work import Event, Teller, work
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
    workers: int = 0,
    scheduler: str = "",
    ensemble: int = 1,
    on_event: Callable[[Event], None] = lambda event: None,
) -> dict[str, str]:
    """Run the cells that are not done yet; returns why those failed that did, by name.

    Cells are trained by the workers of the Dask scheduler at an address, by jobs of a batch system
    where the recipe says so, by as many processes of one thread each as there are `workers`, or
    one after another in this process, on all its cores.  A cell ends with the same bytes in any
    number of workers, and whenever it was interrupted.  With an `ensemble` of several members, as
    many cells are trained in one program in this process; their rounding differs.

    Raises `ValueError` if another process works on the run, `OSError` if there is no scheduler.
    """
    failed: dict[str, str] = {}
    with hold(run):
        record_provenance(run, _told(run, workers, scheduler, ensemble))
        seen: set[str] = set()
        if wanted := _wanted(run, seen, on_event):
            at_once = workers if run.recipe.sweep.refine else min(workers, len(wanted))
            with _trainer(run, at_once, scheduler, ensemble, on_event) as train_cells:
                while wanted:
                    failed |= train_cells(wanted)
                    wanted = _wanted(run, seen, on_event)
    return failed


def _told(run: Run, workers: int, scheduler: str, ensemble: int) -> dict[str, object]:
    """By what cells are trained, for the provenance."""
    cluster = run.recipe.cluster
    if scheduler:
        return {"scheduler": scheduler}
    if cluster.kind == "slurm":
        return {"slurm jobs": cluster.jobs, "cores of each": cluster.cores}
    return {"ensemble": ensemble} if ensemble > 1 else {"workers": workers}


def _wanted(run: Run, seen: set[str], on_event: Callable[[Event], None]) -> list[Cell]:
    """The cells to do, in order, of those that were not seen before; a refined sweep gets more."""
    wanted = []
    for cell in in_order(open_run(run.path).cells):
        if cell.name in seen:
            continue
        seen.add(cell.name)
        if replace(cell).status == "done":  # what it reads is not kept
            with hold_lock(cell.lock_path) as held:
                if held:
                    tidy(cell)
            on_event(Event(cell.name, "skip"))
        else:
            wanted.append(cell)
    return wanted


@contextlib.contextmanager
def _trainer(
    run: Run, workers: int, scheduler: str, ensemble: int, on_event: Callable[[Event], None]
) -> Iterator[Callable[[Sequence[Cell]], dict[str, str]]]:
    """What trains cells and returns why those failed that did."""
    if scheduler or (workers and ensemble == 1) or run.recipe.cluster.kind != "local":
        with held_back():
            from iclens.lab import cluster
            from iclens.lab.slurm import slurm_client

        keep: Callable[[], Iterable[str]] | None = None
        with contextlib.ExitStack() as stack:
            if scheduler:
                client = stack.enter_context(cluster.remote_client(scheduler, run.path))
            elif run.recipe.cluster.kind == "slurm":
                client, keep = stack.enter_context(slurm_client(run.recipe.cluster))
            else:
                client = stack.enter_context(cluster.local_client(workers))
            on_event(Event("", "dashboard", detail=client.dashboard_link or "none"))
            yield lambda cells: cluster.run_on(client, cells, on_event, keep)
    elif ensemble > 1:
        yield lambda cells: run_ensembles(cells, ensemble, on_event)
    else:
        yield lambda cells: _run_here(cells, on_event)


def _run_here(cells: Sequence[Cell], on_event: Callable[[Event], None]) -> dict[str, str]:
    """One cell after another in this process."""
    failed = {}
    for cell in cells:
        reason = work(cell, on_event)
        Teller(cell.name, on_event).ended(reason)
        if reason:
            failed[cell.name] = reason
    return failed


def in_order(cells: Sequence[Cell]) -> list[Cell]:
    """The order of work: every other K of one seed, the other K, the other seeds.

    A sweep that is stopped is then a coarse picture already.  Among equals the most chains come
    first, for they take longest.
    """
    diversities = sorted({cell.chains for cell in cells}, key=float_diversity)
    seeds = sorted({cell.seed for cell in cells})

    def rank(cell: Cell) -> tuple[int, int, float]:
        place = diversities.index(cell.chains)
        # Counted from the largest K, so that both ends of an odd number of K come early.
        coarse = (len(diversities) - 1 - place) % 2 == 0
        return seeds.index(cell.seed), not coarse, -float_diversity(cell.chains)

    return sorted(cells, key=rank)


def default_workers() -> int:
    """As many as the cores that this process may use; 0, which is this process, with a GPU."""
    import jax

    if jax.default_backend() != "cpu":
        return 0
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

"""The self-test of `iclens doctor`, in a process of its own: a line of JSON for each check.

It trains a little of the preset `tiny` and asks whether what iclens says of itself holds here.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import jax
import numpy as np

from iclens.chains import ChainPrior, ChainSet
from iclens.interrupts import held_back
from iclens.lab.cell import RESULTS, Cell, run_cell
from iclens.lab.recipe import Recipe, load_recipe
from iclens.lab.store import create_run, open_run, record_provenance
from iclens.predictors import reference_predictors

STEPS, CHAINS, ERROR = 256, 4, 1e-5
"""Optimizer steps and K of the cell, and by how much probabilities may miss brute force."""


def main() -> None:
    """Do all checks, in a folder that is removed again."""
    devices = jax.devices()
    kind = f"{devices[0].platform}: {devices[0].device_kind}"
    tell("device", True, kind if len(devices) == 1 else f"{len(devices)} of {kind}")
    tiny = load_recipe("tiny")
    recipe = replace(
        tiny,
        train=replace(tiny.train, steps=STEPS, evaluations=4, spacing="linear"),
        evaluation=replace(tiny.evaluation, sequences=32),
        sweep=replace(tiny.sweep, chains=(CHAINS,)),
    )
    with tempfile.TemporaryDirectory(prefix="iclens-doctor-") as folder:
        check("predictors", predictors)
        check("training", lambda: training(Path(folder), recipe))
        check("resume", lambda: resume(Path(folder), recipe))
        check("report", lambda: report(Path(folder)))


def check(name: str, test: Callable[[], str]) -> None:
    """Do one check and tell what it found; whatever it raises is what is wrong."""
    start = time.perf_counter()
    try:
        found, ok = test(), True
    except Exception as error:
        found, ok = f"{type(error).__name__}: {error}", False
    tell(name, ok, f"{found} ({time.perf_counter() - start:.1f} s)")


def tell(name: str, ok: bool, found: str) -> None:
    print(json.dumps({"name": name, "ok": ok, "found": found}), flush=True)


def predictors() -> str:
    """2-Gen and 2-Mem against counts and products that are worked out one by one."""
    prior = ChainPrior(3)
    chains = prior.sample(jax.random.key(0), CHAINS)
    states = np.random.default_rng(0).integers(0, 3, (4, 10))
    references = reference_predictors(chains, prior)
    for name, brute in (("2-Gen", _two_gen), ("2-Mem", _two_mem)):
        got = np.exp(np.asarray(references[name](states), float))
        expected = np.array(
            [[brute(row[: n + 1].tolist(), chains) for n in range(len(row))] for row in states]
        )
        if (worst := np.abs(got - expected).max()) > ERROR:
            raise ArithmeticError(f"{name} misses brute force by {worst:.2g}")
    return "2-Gen and 2-Mem are those of brute force"


def _two_gen(context: list[int], chains: ChainSet) -> list[float]:
    """The posterior mean of the current state's row under a uniform prior."""
    following = [b for a, b in pairwise(context) if a == context[-1]]
    count = chains.states
    return [(following.count(state) + 1) / (len(following) + count) for state in range(count)]


def _two_mem(context: list[int], chains: ChainSet) -> list[float]:
    """The rows of the current state, weighted by the probability of the context."""
    total = np.zeros(chains.states)
    for transition, stationary in zip(chains.transition, chains.stationary, strict=True):
        probability = stationary[context[0]]
        for a, b in pairwise(context):
            probability *= transition[a, b]
        total += probability * transition[context[-1]]
    return (total / total.sum()).tolist()


def training(folder: Path, recipe: Recipe) -> str:
    """Train a cell: its loss falls, and not below that of the Bayes-optimal predictor."""
    run = create_run(folder / "run", recipe)
    record_provenance(run, {"doctor": STEPS})
    run.cells[0].folder.mkdir(exist_ok=True)
    times: list[tuple[float, int]] = []
    run_cell(run.cells[0], on_steps=lambda done: times.append((time.perf_counter(), done)))
    (first, begun), (last, done) = times[0], times[-1]
    curves = open_run(run.path).cells[0].curves
    assert curves is not None
    loss = curves.loss.sel(set="id").values
    least = float(curves.reference_loss.sel(set="id", predictor="2-Mem"))
    if not least - 1e-4 < loss[-1] < loss[0] - 0.1:
        raise ArithmeticError(
            f"the loss went from {loss[0]:.3f} to {loss[-1]:.3f} nats; expected it to fall by more "
            f"than 0.1, and not below 2-Mem's {least:.3f}"
        )
    rate = (done - begun) / (last - first)
    return f"loss from {loss[0]:.3f} to {loss[-1]:.3f} nats, {rate:.0f} steps/s"


def resume(folder: Path, recipe: Recipe) -> str:
    """Interrupt the same training half-way; it goes on to the same bytes."""
    cell = Cell(folder / "again", recipe, CHAINS, recipe.sweep.seeds[0])

    class Interrupted(Exception):
        pass

    def interrupt(step: int, phase: str) -> None:
        if step >= STEPS // 2:
            raise Interrupted

    try:
        run_cell(cell, on_phase=interrupt)
    except Interrupted:
        run_cell(replace(cell))
    undisturbed = Cell(folder / "run" / "cells", recipe, CHAINS, recipe.sweep.seeds[0])
    for name in RESULTS:
        if (cell.path / name).read_bytes() != (undisturbed.path / name).read_bytes():
            raise ArithmeticError(f"{name} of a training that was interrupted is another one")
    return "interrupted, saved and resumed to the same bytes"


def report(folder: Path) -> str:
    """Write the page of the run."""
    with held_back():
        from iclens.report.page import write_page
        from iclens.report.reading import Reading

    path = write_page(Reading(open_run(folder / "run")))
    return f"a page of {len(path.read_bytes()) / 2**20:.1f} MiB"


if __name__ == "__main__":
    main()
    sys.exit(0)

"""Studies of trained runs: a folder of runs behind one result, an xarray dataset.

Such a folder goes on where it stopped, like any run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from iclens.lab import times
from iclens.lab.fits import growth_dataset
from iclens.lab.recipe import Recipe
from iclens.lab.reduced import InductionStudy, growth_times
from iclens.lab.store import Run, create_run, open_run
from iclens.lab.sweep import run_sweep
from iclens.theory.fits import CannotFit, fit_threshold
from iclens.theory.race import CIRCUITS, circuit_edges, predicted_visits


def run_study(
    folder: Path,
    recipes: dict[str, Recipe],
    on_run: Callable[[Run], dict[str, Any]] = lambda run: {},
) -> dict[str, str]:
    """Run each recipe into FOLDER/NAME; returns why cells failed that did.

    `on_run` gives the options of `run_sweep` for each run.
    """
    failed: dict[str, str] = {}
    for name, recipe in recipes.items():
        run = create_run(folder / name, recipe)
        found = run_sweep(run, **on_run(run))
        failed |= {f"{name}/{cell}": reason for cell, reason in found.items()}
    return failed


def context_recipes(recipe: Recipe, contexts: Iterable[int]) -> dict[str, Recipe]:
    """The recipe at each context.  Raises `ValueError` unless chains are fresh, of equal
    Dirichlet rows, and SGD trains."""
    if recipe.sweep.chains != ("infinite",) or recipe.train.optimizer != "sgd":
        raise ValueError(
            "the study of the context wants sweep.chains = ['infinite'] and train.optimizer = "
            f"'sgd', got {list(recipe.sweep.chains)} and {recipe.train.optimizer!r}"
        )
    if recipe.prior.kind != "dirichlet":
        raise ValueError(
            "the study of the context wants prior.kind = 'dirichlet', for which the theory holds, "
            f"got {recipe.prior.kind!r}"
        )
    contexts = tuple(contexts)
    if len(set(contexts)) < 3:
        raise ValueError(f"contexts: expected 3 different ones at least, got {list(contexts)}")
    return {f"context={n}": replace(recipe, task=replace(recipe.task, context=n)) for n in contexts}


def context_result(folder: Path) -> xr.Dataset:
    """tau_2Gen of the full transformer, in flow time, over N, with the fits.

    Beside it that of the reduced model; `counts`, over N, has the cells, those that had not reached
    2-Gen by the end, which are left out of the fits, and those that are lost: not finished.

    Raises `ValueError` where no run has reached 2-Gen, `CannotFit` for fewer than three contexts.
    """
    rows = []
    counts: dict[int, list[int]] = {}
    recipes: dict[str, Path] = {}
    for path in sorted(folder.glob("context=*"), key=lambda path: int(path.name[8:])):
        run = open_run(path)
        context, rate = run.recipe.task.context, run.recipe.train.learning_rate
        alike = replace(run.recipe, task=replace(run.recipe.task, context=2)).to_toml()
        recipes.setdefault(alike, path)
        cells = times.finished_cells(run)
        counts[context] = [len(run.cells), 0, len(run.cells) - len(cells)]
        for cell in cells:
            before, tau = times.time_to_2_gen(cell)
            if math.isfinite(tau):  # the middle of the interval between evaluations
                rows.append((context, cell.seed, rate * (before + tau) / 2))
            else:
                counts[context][1] += 1
    if len(recipes) > 1:
        raise ValueError(
            f"the runs under {str(folder)!r} differ in more than their context, as "
            f"{' and '.join(path.name for path in recipes.values())} do"
        )
    if not rows:
        raise ValueError(f"no finished cell under {str(folder)!r} reached 2-Gen")
    ordered = np.array(sorted(rows))
    table = growth_dataset(ordered[:, 0].astype(int), ordered[:, 2])
    task = run.recipe.task
    contexts = np.unique(table.context.values).tolist()
    alone = growth_times(InductionStudy(task.states, task.concentration), contexts)
    return (
        table.assign(
            seed=("run", ordered[:, 1].astype(int)),
            reduced_tau=("reduced", alone, table.tau.attrs),
            reduced_context=("reduced", contexts),
            counts=(("study", "count"), list(counts.values())),
        )
        .assign_coords(study=list(counts), count=["cells", "late", "lost"])
        .assign_attrs(title="full transformer, SGD", recipe=run.recipe.to_toml())
    )


def race_recipes(recipe: Recipe) -> dict[str, Recipe]:
    """The recipe for the whole model and for each circuit alone.

    The induction circuit is trained on fresh chains, for what it does is not of the set.
    """
    recipes = {
        circuit: replace(
            recipe,
            model=replace(recipe.model, circuit=circuit_edges(recipe.model, circuit)),
        )
        for circuit in CIRCUITS
    }
    fresh = replace(recipe.sweep, chains=("infinite",))
    return recipes | {"induction": replace(recipes["induction"], sweep=fresh)}


def race_result(folder: Path) -> xr.Dataset:
    """Times of each circuit over K and seeds, what they predict for the whole, and what it did.

    Raises `ValueError` if a cell of one of the three runs is not done.
    """
    runs = {circuit: open_run(folder / circuit) for circuit in CIRCUITS}
    cells = runs["whole"].cells
    rows: list[dict[str, Any]] = []
    alone: list[xr.DataArray] = []
    for whole in cells:
        parts = {
            circuit: run.cell("infinite" if circuit == "induction" else whole.chains, whole.seed)
            for circuit, run in runs.items()
        }
        for circuit, cell in parts.items():
            if cell.status != "done":
                raise ValueError(f"the race lacks {circuit}/{cell.name}: it is {cell.status}")
            if (outcome := times.curves(cell).attrs["outcome"]) != "finished":
                raise ValueError(f"the race lacks {circuit}/{cell.name}: it {outcome}")
        curves = {circuit: times.curves(cell) for circuit, cell in parts.items()}
        loss = curves["recognition"].loss.sel(set="id")
        tau = times.time_to_2_gen(parts["induction"])[1]
        visited = times.visits_g2(whole)
        alone.append(loss.drop_vars("set"))
        at_tau = float(loss.sel(step=int(tau))) if math.isfinite(tau) else math.nan
        rows.append(
            {
                "chains": whole.chains,
                "seed": whole.seed,
                "tau_induction": tau,
                "tau_recognition": times.time_to_2_mem(parts["recognition"])[1],
                "tau_whole_2_gen": times.time_to_2_gen(whole)[1] if visited else math.inf,
                "tau_whole_2_mem": times.time_to_2_mem(whole)[1],
                "recognition_loss": at_tau,
                "loss_of_2_gen": float(
                    curves["recognition"].reference_loss.sel(set="id", predictor="2-Gen")
                ),
                "visited": visited,
            }
        )
    table = xr.Dataset({name: ("run", [row[name] for row in rows]) for name in rows[0]})
    predicted = predicted_visits(
        table.tau_induction.values,
        table.tau_recognition.values,
        table.recognition_loss.values,
        table.loss_of_2_gen.values,
    )
    for name, visits in {"observed": table.visited.values, **predicted}.items():
        table[f"visits: {name}"] = ("run", visits)
        try:
            fit = fit_threshold(table.chains.values, visits, table.seed.values)
        except CannotFit as reason:
            table.attrs[f"K1* {name}"] = f"refused: {reason}"
        else:
            found = fit.parameters["threshold"]
            table.attrs[f"K1* {name}"] = [found.value, *(e or math.nan for e in found.profile)]
    table.attrs["recipe"] = runs["whole"].recipe.to_toml()
    return table.assign(recognition_curve=xr.concat(alone, "run"))

"""Fits of what runs did, as datasets."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable

import numpy as np
import xarray as xr

from iclens.lab import times
from iclens.lab.cell import Cell
from iclens.lab.store import Run
from iclens.phases import BEYOND, successive_phases
from iclens.theory.fits import CannotFit, Fit, fit_growth, fit_switching, fit_threshold


def fit_run(run: Run) -> dict[str, Fit | str]:
    """K1*, K2* from the end state, and K2* with gamma from switching times; or why not.

    Raises `ValueError` if no cell is finished.
    """
    cells = fitted_cells(run)
    if not cells:
        raise ValueError(f"run {run.name!r} has no finished cell with finitely many chains")
    chains = np.array([cell.chains for cell in cells])
    seed = np.array([cell.seed for cell in cells])
    paths = [successive_phases(times.curves(cell))[0] for cell in cells]
    visited = np.array([BEYOND["K1*"](path) for path in paths])
    # With one chain, 1-Mem and 2-Mem are the same.
    ended = np.array([bool(path) for path in paths]) & (chains > 1)
    beyond = np.array([not path or BEYOND["K2*"](path) for path in paths])
    switch = np.array([times.time_to_switch(cell) for cell in cells], np.float64).reshape(-1, 2)
    attempts: dict[str, Callable[[], Fit]] = {
        "K1*": lambda: fit_threshold(chains, visited, seed),
        "K2* (end state)": lambda: fit_threshold(chains[ended], beyond[ended], seed[ended]),
        "switching": lambda: fit_switching(
            chains[visited], switch[visited, 0], switch[visited, 1], seed[visited]
        ),
    }
    found: dict[str, Fit | str] = {}
    for name, attempt in attempts.items():
        try:
            found[name] = attempt()
        except CannotFit as reason:
            found[name] = str(reason)
    return found


def fitted_cells(run: Run) -> list[Cell]:
    """The cells that `fit_run` reads: finished, with finitely many chains."""
    return [cell for cell in times.finished_cells(run) if cell.chains != "infinite"]


FIT_FILES = {"K1*": "K1", "K2* (end state)": "K2", "switching": "switching"}


def fit_dataset(fit: Fit) -> xr.Dataset:
    """A fit with its data, its curve, its intervals (an open end is infinite) and its goodness."""
    table = xr.Dataset({name: ("run", values) for name, values in fit.data.items()})
    for name, values in fit.curve.items():
        table[f"curve_{name}"] = ("point", values)
    rows = []
    for found in fit.parameters.values():
        low, high = found.profile
        ends = (-math.inf if low is None else low, math.inf if high is None else high)
        rows.append([found.value, *ends, *(found.bootstrap or (math.nan, math.nan))])
    table = table.assign_coords(
        parameter=list(fit.parameters),
        part=["value", "profile_low", "profile_high", "bootstrap_low", "bootstrap_high"],
    )
    table["fit"] = (("parameter", "part"), rows)
    return table.assign_attrs(fit.goodness)


def growth_dataset(context: np.ndarray, time: np.ndarray) -> xr.Dataset:
    """Times over contexts (a row for each run), and what each growth law makes of them.

    Variables that begin with `delayed_` are of the laws with a delay, where there are contexts
    enough.
    """
    found = fit_growth(context, time)
    table = xr.Dataset(
        {"tau": ("run", time, {"units": "steps x learning rate"}), "context": ("run", context)},
        coords={"law": list(found)},
    )
    for part in next(iter(found.values())):
        table[part] = ("law", [fit[part] for fit in found.values()])
    with contextlib.suppress(CannotFit):
        late = fit_growth(context, time, delay=True)
        for part in next(iter(late.values())):
            table[f"delayed_{part}"] = ("law", [fit[part] for fit in late.values()])
    return table

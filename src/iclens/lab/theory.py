"""Studies of the theory: trained runs, or reduced models, behind one result each.

A study of trained runs is a folder of runs (RUN/context=64, RUN/induction, ...), so that it goes
on where it stopped like any run.  Results are xarray datasets, saved as theory/NAME.nc.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr

from iclens.chains import ChainPrior
from iclens.lab.cell import Cell
from iclens.lab.files import write_dataset
from iclens.lab.recipe import Recipe
from iclens.lab.store import Run, create_run, open_run
from iclens.lab.sweep import run_sweep
from iclens.phases import evaluation_set, measure
from iclens.predictors import reference_predictors
from iclens.theory import induction, memory
from iclens.theory.fits import CannotFit, Fit, fit_growth, fit_switching, fit_threshold
from iclens.theory.race import CIRCUITS, circuit_edges, first_lasting, predicted_visits
from iclens.training import TrainingConfig, initial_state, train

COEFFICIENTS = ("c_beta", "c_delta", "J")


def save_result(folder: Path, name: str, result: xr.Dataset) -> Path:
    """Write `theory/NAME.nc` in a folder; returns its path."""
    path = folder / "theory" / f"{name}.nc"
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_dataset(path, result)


# --- the reduced induction head


@dataclass(frozen=True)
class InductionStudy:
    """What to compute of the reduced induction head."""

    states: int = 5
    """C."""
    concentration: float = 1.0
    """Dirichlet concentration alpha of the rows."""
    context: int = 512
    """N of the coefficients."""
    rho: float = 0.0
    """Share of layer 1 in the read-out, from 0 to 1."""
    sequences: int = 100_000
    """Sequences of the Monte Carlo."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.context < 2:
            raise ValueError(f"context: expected at least 2, got {self.context}")
        if self.sequences < 2:
            raise ValueError(f"sequences: expected at least 2, got {self.sequences}")
        induction.check_rho(self.rho)
        _ = self.prior

    @property
    def prior(self) -> ChainPrior:
        return ChainPrior(self.states, self.concentration)

    def key(self, purpose: int) -> Any:
        return jax.random.fold_in(jax.random.key(self.seed), purpose)


def coefficients(study: InductionStudy) -> dict[str, Any]:
    """A_beta, A_J and the coefficients as `value` and `error`; `formula` has the leading order."""
    amplitude = induction.amplitudes(study.prior, key=study.key(0))
    measured = induction.measured_coefficients(
        study.prior, study.context, study.sequences, rho=study.rho, key=study.key(1)
    )
    formula = induction.predicted_coefficients(study.prior, study.context, amplitude, rho=study.rho)
    estimates = {name: asdict(e) for name, e in (amplitude | measured).items()}
    return {**asdict(study), **estimates, "formula": formula}


def plane(study: InductionStudy, *, context: int = 128, size: int = 101) -> xr.Dataset:
    """The loss over (beta, delta), with gradient flow and stochastic descent from the origin."""
    sample = induction.draw_sample(study.prior, context, 1024, key=study.key(2))
    horizon = induction.HORIZON * context / math.log(context)
    flow = induction.gradient_flow(sample, horizon, rho=study.rho)
    descent = induction.stochastic_descent(
        study.prior, context, horizon, steps=400, batch=256, rho=study.rho, key=study.key(3)
    )
    far = 1.3 * flow.point.max(0)
    axes = [np.linspace(-0.15 * end, end, size, dtype=np.float32) for end in far]
    loss = induction.landscape(sample, jnp.asarray(axes[0]), jnp.asarray(axes[1]), study.rho)
    return xr.Dataset(
        {
            "loss": (("beta", "delta"), np.asarray(loss), {"units": "nats"}),
            "flow": (("time", "axis"), flow.point),
            "flow_loss": ("time", flow.loss, {"units": "nats"}),
            "descent": (("descent_time", "axis"), descent.point),
            "descent_loss": ("descent_time", descent.loss, {"units": "nats"}),
        },
        coords={
            "beta": axes[0],
            "delta": axes[1],
            "axis": ["beta", "delta"],
            "time": ("time", flow.time, {"units": "steps x learning rate"}),
            "descent_time": ("descent_time", descent.time, {"units": "steps x learning rate"}),
        },
        attrs={**asdict(study), "plane_context": context},
    )


def growth(study: InductionStudy, contexts: Sequence[int], *, sequences: int = 4096) -> xr.Dataset:
    """tau_2Gen of the reduced model, in flow time, over N, with the fits of `fit_growth`."""
    times = [
        induction.time_to_induction(
            study.prior, n, sequences=sequences, rho=study.rho, key=study.key(10 + n)
        )
        for n in contexts
    ]
    title = f"reduced model, C = {study.states}"
    table = growth_dataset(np.array(contexts), np.array(times))
    return table.assign_attrs(asdict(study), title=title)


def growth_dataset(context: np.ndarray, time: np.ndarray) -> xr.Dataset:
    """Times over contexts (a row for each run), and what each growth law makes of them."""
    found = fit_growth(context, time)
    table = xr.Dataset(
        {"tau": ("run", time, {"units": "steps x learning rate"}), "context": ("run", context)},
        coords={"law": list(found)},
    )
    for part in next(iter(found.values())):
        table[part] = ("law", [fit[part] for fit in found.values()])
    return table


# --- studies of trained runs


def run_study(
    folder: Path,
    recipes: dict[str, Recipe],
    on_run: Callable[[Run], dict[str, Any]] = lambda run: {},
) -> dict[str, str]:
    """Run each recipe into FOLDER/NAME; returns why cells failed that did.

    `on_run` gives the callbacks of `run_sweep` for each run.
    """
    failed: dict[str, str] = {}
    for name, recipe in recipes.items():
        run = create_run(folder / name, recipe)
        found = run_sweep(run, **on_run(run))
        failed |= {f"{name}/{cell}": reason for cell, reason in found.items()}
    return failed


def context_recipes(recipe: Recipe, contexts: Iterable[int]) -> dict[str, Recipe]:
    """The recipe at each context.  Raises `ValueError` unless chains are fresh and SGD trains."""
    if recipe.sweep.chains != ("infinite",) or recipe.train.optimizer != "sgd":
        raise ValueError(
            "the study of the context wants sweep.chains = ['infinite'] and train.optimizer = "
            f"'sgd', got {list(recipe.sweep.chains)} and {recipe.train.optimizer!r}"
        )
    return {f"context={n}": replace(recipe, task=replace(recipe.task, context=n)) for n in contexts}


def context_result(folder: Path) -> xr.Dataset:
    """tau_2Gen of the full transformer, in flow time, over N, with the fits.

    Raises `ValueError` where no run has reached 2-Gen, `CannotFit` for fewer than three contexts.
    """
    rows = []
    for path in sorted(folder.glob("context=*")):
        run = open_run(path)
        for cell in _finished(run):
            before, tau = _time_to_2_gen(cell)
            if math.isfinite(tau):  # the middle of the interval between evaluations
                rate = run.recipe.train.learning_rate
                rows.append((run.recipe.task.context, cell.seed, rate * (before + tau) / 2))
    if not rows:
        raise ValueError(f"no finished cell under {str(folder)!r} reached 2-Gen")
    context, seed, times = (np.array(column) for column in zip(*sorted(rows), strict=True))
    table = growth_dataset(context, times).assign(seed=("run", seed))
    return table.assign_attrs(title="full transformer, SGD")


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
    for whole in cells:
        parts = {
            circuit: run.cell("infinite" if circuit == "induction" else whole.chains, whole.seed)
            for circuit, run in runs.items()
        }
        for circuit, cell in parts.items():
            if cell.status != "done":
                raise ValueError(f"the race lacks {circuit}/{cell.name}: it is {cell.status}")
        curves = {circuit: _curves(cell) for circuit, cell in parts.items()}
        loss = curves["recognition"].loss.sel(set="id")
        tau = _time_to_2_gen(parts["induction"])[1]
        at_tau = float(loss.sel(step=int(tau))) if math.isfinite(tau) else math.nan
        rows.append(
            {
                "chains": whole.chains,
                "seed": whole.seed,
                "tau_induction": tau,
                "tau_recognition": _time_to_2_mem(parts["recognition"])[1],
                "tau_whole_2_gen": _time_to_2_gen(whole)[1],
                "tau_whole_2_mem": _time_to_2_mem(whole)[1],
                "recognition_loss": at_tau,
                "loss_of_2_gen": float(
                    curves["recognition"].reference_loss.sel(set="id", predictor="2-Gen")
                ),
                "visited": _visits_g2(whole),
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
    alone = [_curves(cell).loss.sel(set="id", drop=True) for cell in runs["recognition"].cells]
    return table.assign(recognition_curve=xr.concat(alone, "run"))


# --- the memory model


@dataclass(frozen=True)
class MemoryStudy:
    """The grid of the memory model, and how each is trained."""

    states: int = 5
    context: int = 64
    chains: tuple[int, ...] = (8, 32, 128, 512)
    width: tuple[int, ...] = (2, 4, 8, 16)
    """Widths d of the task vector."""
    hidden: tuple[int, ...] = (64,)
    """Hidden widths F of the decoder."""
    seed: int = 0
    steps: int = 16_000
    batch: int = 64
    learning_rate: float = 2e-3
    """Adam's, with a cosine down to 0 at the last step."""

    def __post_init__(self) -> None:
        for name in ("chains", "width", "hidden"):
            values = getattr(self, name)
            if not values or min(values) < 1:
                raise ValueError(f"{name}: expected values of at least 1, got {list(values)}")


def memory_result(
    study: MemoryStudy, on_model: Callable[[int, int, int], None] = lambda k, d, f: None
) -> xr.Dataset:
    """Loss, distances and the geometry of phi over the (K, d, F) grid; K2* for each (d, F)."""
    config = TrainingConfig(
        steps=study.steps,
        batch=study.batch,
        learning_rate=study.learning_rate,
        schedule="cosine",
        evaluations=1,
    )
    prior, key = ChainPrior(study.states), jax.random.key(study.seed)
    shape = (len(study.chains), len(study.width), len(study.hidden))
    names = ("loss", "to_2_gen", "to_2_mem", "separation", "dimension", "readout")
    found = {name: np.full(shape, np.nan) for name in names}
    for k, count in enumerate(study.chains):
        chains_key, set_key, model_key, batch_key = jax.random.split(
            jax.random.fold_in(key, count), 4
        )
        chains = prior.sample(chains_key, count)
        on = evaluation_set(
            chains, reference_predictors(chains, prior), 512, study.context, key=set_key
        )
        for place in np.ndindex(shape[1:]):
            d, f = study.width[place[0]], study.hidden[place[1]]
            model = memory.MemoryModel(
                memory.MemoryConfig(d, f), study.states, study.context, key=model_key
            )
            *_, last = train(initial_state(model, config), chains, config, key=batch_key)
            trained: Any = last.state.model
            measured = measure(jax.nn.log_softmax(trained(on.states)), on)
            phi = memory.geometry(trained, chains, 32, key=set_key)
            row = (
                measured.loss,
                measured.distance[1],
                measured.distance[3],
                phi.separation,
                phi.dimension,
                phi.readout,
            )
            for name, value in zip(names, row, strict=True):
                found[name][(k, *place)] = float(value)
            on_model(count, d, f)
    result = xr.Dataset(
        {name: (("chains", "width", "hidden"), values) for name, values in found.items()},
        coords={name: list(getattr(study, name)) for name in ("chains", "width", "hidden")},
        attrs={n: v for n, v in asdict(study).items() if not isinstance(v, tuple)},
    )
    brackets = np.full((2, *shape[1:]), np.nan)
    for d, f in np.ndindex(shape[1:]):
        ends = memory.capacity(study.chains, found["to_2_mem"][:, d, f], found["to_2_gen"][:, d, f])
        brackets[:, d, f] = [math.nan if end is None else end for end in ends]
    return result.assign(K2=(("end", "width", "hidden"), brackets))


# --- fits of a run


def fit_run(run: Run) -> dict[str, Fit | str]:
    """K1*, K2* from the end state, and K2* with gamma from switching times; or why not.

    Raises `ValueError` if no cell is finished.
    """
    cells = [cell for cell in _finished(run) if cell.chains != "infinite"]
    if not cells:
        raise ValueError(f"run {run.name!r} has no finished cell with finitely many chains")
    chains = np.array([cell.chains for cell in cells])
    seed = np.array([cell.seed for cell in cells])
    visited = np.array([_visits_g2(cell) for cell in cells])
    ends = np.array([str(_curves(cell).phase.values[-1]) for cell in cells])
    times = np.array([_switch(cell) for cell in cells], np.float64).reshape(-1, 2)
    attempts: dict[str, Callable[[], Fit]] = {
        "K1*": lambda: fit_threshold(chains, visited, seed),
        "K2* (end state)": lambda: fit_threshold(chains, ends != "M2", seed),
        "switching": lambda: fit_switching(
            chains[visited], times[visited, 0], times[visited, 1], seed[visited]
        ),
    }
    found: dict[str, Fit | str] = {}
    for name, attempt in attempts.items():
        try:
            found[name] = attempt()
        except CannotFit as reason:
            found[name] = str(reason)
    return found


def _curves(cell: Cell) -> xr.Dataset:
    """The curves of a cell that is done."""
    assert cell.curves is not None, cell.status
    return cell.curves


def _finished(run: Run) -> list[Cell]:
    return [
        c for c in run.cells if c.status == "done" and _curves(c).attrs["outcome"] == "finished"
    ]


def _distance(cell: Cell, predictor: str) -> np.ndarray:
    found: np.ndarray = _curves(cell).distance.sel(set="id", predictor=predictor).values
    return found


def _time_to_2_gen(cell: Cell) -> tuple[float, float]:
    """The last evaluation before, and the first from which on 2-Gen is nearer than 1-Gen."""
    return first_lasting(
        _curves(cell).step.values, _distance(cell, "2-Gen") < _distance(cell, "1-Gen")
    )


def _time_to_2_mem(cell: Cell) -> tuple[float, float]:
    """The same for the label M2."""
    return first_lasting(_curves(cell).step.values, _curves(cell).phase.values == "M2")


def _switch(cell: Cell) -> tuple[float, float]:
    """The evaluations before and at the first time that 2-Mem is nearer than 2-Gen."""
    return first_lasting(
        _curves(cell).step.values,
        _distance(cell, "2-Mem") < _distance(cell, "2-Gen"),
        at_end=False,
    )


def _visits_g2(cell: Cell) -> bool:
    return bool(((_curves(cell).phase == "G2") & _curves(cell).clear).any())


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

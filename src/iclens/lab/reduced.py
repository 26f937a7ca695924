"""Studies of the reduced models, each an xarray dataset."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr

from iclens.chains import ChainPrior
from iclens.circuits.roles import last_task_vectors
from iclens.lab import times
from iclens.lab.files import hold_lock, read_dataset, save_result
from iclens.lab.fits import growth_dataset
from iclens.lab.store import Run
from iclens.phases import evaluation_set, measure
from iclens.predictors import reference_predictors
from iclens.theory import induction, memory
from iclens.training import TrainingConfig, initial_state, train

COEFFICIENTS = ("c_beta", "c_delta", "J")
PLANE_SEQUENCES = 1024
SEQUENCES = 32
"""Sequences of each chain for the geometry of task vectors."""


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
    sample = induction.draw_sample(study.prior, context, PLANE_SEQUENCES, key=study.key(2))
    horizon = induction.HORIZON * context / math.log(context)
    flow = induction.gradient_flow(sample, horizon, rho=study.rho)
    descent = induction.stochastic_descent(
        study.prior, context, horizon, steps=400, batch=256, rho=study.rho, key=study.key(3)
    )
    far = np.maximum(1.3 * flow.point.max(0), 0.5)
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
        attrs={**asdict(study), "context": context, "sequences": PLANE_SEQUENCES},
    )


def growth(study: InductionStudy, contexts: Sequence[int], *, sequences: int = 4096) -> xr.Dataset:
    """tau_2Gen of the reduced model, in flow time, over N, with the fits of `fit_growth`."""
    table = growth_dataset(np.array(contexts), growth_times(study, contexts, sequences=sequences))
    attrs = {name: value for name, value in asdict(study).items() if name != "context"}
    title = f"reduced model, C = {study.states}"
    return table.assign_attrs(attrs | {"sequences": sequences}, title=title)


def growth_times(
    study: InductionStudy, contexts: Sequence[int], *, sequences: int = 4096
) -> np.ndarray:
    """tau_2Gen of the reduced model, in flow time, at each N."""
    return np.array(
        [
            induction.time_to_induction(
                study.prior, n, sequences=sequences, rho=study.rho, key=study.key(10 + n)
            )
            for n in contexts
        ]
    )


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
        for name in ("states", "context"):
            if getattr(self, name) < 2:
                raise ValueError(f"{name}: expected at least 2, got {getattr(self, name)}")
        _ = self.training
        for name in ("chains", "width", "hidden"):
            values = getattr(self, name)
            least = 2 if name == "chains" else 1
            if not values or min(values) < least or len(set(values)) < len(values):
                raise ValueError(
                    f"{name}: expected distinct values of at least {least}, got {list(values)}"
                )

    @property
    def training(self) -> TrainingConfig:
        """How each model is trained."""
        return TrainingConfig(
            steps=self.steps,
            batch=self.batch,
            learning_rate=self.learning_rate,
            schedule="cosine",
            evaluations=1,
        )


GRID = ("chains", "width", "hidden")
MEASURES = ("loss", "to_2_gen", "to_2_mem", "separation", "dimension", "readout")


def memory_result(
    study: MemoryStudy,
    known: xr.Dataset | None = None,
    on_model: Callable[[xr.Dataset, str], None] = lambda result, name: None,
) -> xr.Dataset:
    """Loss, distances and the geometry of phi over the (K, d, F) grid; K2* for each (d, F).

    What an earlier result, `known`, holds is not computed again, and its part of the grid is kept.
    `on_model` gets the result so far after each model, with the model's name.

    Raises `ValueError` if `known` is of another study.
    """
    attrs = {name: value for name, value in asdict(study).items() if name not in GRID}
    table = xr.Dataset(
        {
            name: (GRID, np.full([len(getattr(study, n)) for n in GRID], np.nan))
            for name in MEASURES
        },
        coords={name: list(getattr(study, name)) for name in GRID},
    )
    if known is not None:
        other = {name: known.attrs.get(name) for name in attrs}
        if other != attrs:
            raise ValueError(
                "the result that is there is of another study: "
                + ", ".join(
                    f"{n} {other[n]} there, {attrs[n]} here" for n in attrs if other[n] != attrs[n]
                )
            )
        table = known[list(MEASURES)].combine_first(table)
    table = table.sortby(list(GRID)).assign_attrs(attrs)
    for count in study.chains:
        cells = [{"width": d, "hidden": f} for d in study.width for f in study.hidden]
        here = table.loss.sel(chains=count)
        wanted = [cell for cell in cells if not np.isfinite(here.sel(cell))]
        for cell, row in zip(wanted, _memory_models(study, count, wanted), strict=True):
            for name, value in zip(MEASURES, row, strict=True):
                table[name].loc[{"chains": count, **cell}] = value
            table = _with_capacity(table)
            on_model(table, f"K = {count}, d = {cell['width']}, F = {cell['hidden']}")
    return _with_capacity(table)


def run_memory_study(
    study: MemoryStudy, folder: Path, on_model: Callable[[str], None] = lambda name: None
) -> xr.Dataset:
    """`memory_result`, going on with FOLDER/memory.nc, which is written after each model.

    Raises `ValueError` if another process is at it, or if the file is of another study.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "memory.nc"

    def keep(result: xr.Dataset, name: str) -> None:
        save_result(folder, "memory", result)
        on_model(name)

    with hold_lock(folder / ".memory.lock") as held:
        if not held:
            raise ValueError(f"another process is working on {str(path)!r}: wait for it")
        return memory_result(study, read_dataset(path) if path.is_file() else None, keep)


def _memory_models(
    study: MemoryStudy, count: int, cells: list[dict[str, int]]
) -> Iterator[tuple[float, ...]]:
    """Train the models of one chain set and measure each."""
    config, prior = study.training, ChainPrior(study.states)
    key = jax.random.fold_in(jax.random.key(study.seed), count)
    chains_key, set_key, model_key, batch_key = jax.random.split(key, 4)
    chains = prior.sample(chains_key, count)
    on = evaluation_set(
        chains, reference_predictors(chains, prior), 512, study.context, key=set_key
    )
    for cell in cells:
        model = memory.MemoryModel(
            memory.MemoryConfig(**cell), study.states, study.context, key=model_key
        )
        *_, last = train(initial_state(model, config), chains, config, key=batch_key)
        trained: Any = last.state.model
        measured = measure(jax.nn.log_softmax(trained(on.states)), on)
        phi = memory.geometry(
            memory.last_task_vectors, trained, chains, SEQUENCES, study.context, key=set_key
        )
        yield (
            float(measured.loss),
            float(measured.distance[1]),
            float(measured.distance[3]),
            phi.separation,
            phi.dimension,
            phi.readout,
        )


def _with_capacity(table: xr.Dataset) -> xr.Dataset:
    """Add the bracket of K2* for each (d, F), as (end, width, hidden)."""
    brackets = np.full((2, table.sizes["width"], table.sizes["hidden"]), np.nan)
    for d, f in np.ndindex(brackets.shape[1:]):
        here = table.isel(width=d, hidden=f)
        seen = np.isfinite(here.to_2_mem.values)
        ends = memory.capacity(
            table.chains.values[seen], here.to_2_mem.values[seen], here.to_2_gen.values[seen]
        )
        brackets[:, d, f] = [math.nan if end is None else end for end in ends]
    return table.assign(K2=(("end", "width", "hidden"), brackets))


def transformer_geometry(run: Run) -> xr.Dataset:
    """The geometry of the task vectors of a run's models at their last checkpoint, a row each.

    Cells that are not finished, or have fewer than two or infinitely many chains, are left out.
    Raises `ValueError` if none is left.
    """
    rows = []
    for cell in times.finished_cells(run):
        chains = cell.chain_set
        if chains is None or chains.count < 2:
            continue
        steps = times.curves(cell).step.values
        found = memory.geometry(
            last_task_vectors,
            cell.model(int(steps[-1])),
            chains,
            SEQUENCES,
            run.recipe.task.context,
            key=jax.random.key(cell.seed),
        )
        phase = str(times.curves(cell).phase.values[-1])
        rows.append({"chains": chains.count, "seed": cell.seed, "phase": phase, **asdict(found)})
    if not rows:
        raise ValueError(f"run {run.name!r} has no finished cell with two chains or more")
    return xr.Dataset({name: ("cell", [row[name] for row in rows]) for name in rows[0]})

"""A cell: one (chains K, seed) point of a sweep, trained, measured and saved.

The folder of a cell holds `pieces/` while it trains (one file for each evaluation point) and
`state.safetensors`, from which it resumes; at the end the pieces are joined into `curves.nc` and
`checkpoints.safetensors`, and `done.json`, with the checksums, is written last.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jaxtyping import Array, PRNGKeyArray

from iclens.chains import ChainPrior, ChainSet
from iclens.lab.files import (
    arrays_to_tree,
    checksum,
    read_arrays,
    tree_to_arrays,
    write_arrays,
    write_file,
)
from iclens.lab.recipe import Diversity, Recipe
from iclens.phases import (
    EvaluationSet,
    compose,
    cross_entropy,
    evaluation_set,
    measure,
    phase_name,
    position_bins,
)
from iclens.predictors import PREDICTORS, reference_predictors
from iclens.training import TrainingState, initial_state, train
from iclens.transformer import Transformer

PURPOSES = ("chains", "model", "batches", "id", "ood")
"""What a cell needs randomness for; each has a stream of its own."""
RESULTS = ("curves.nc", "checkpoints.safetensors", "state.safetensors")


@dataclass(frozen=True)
class Cell:
    """One cell of a run, on disk or still to come."""

    path: Path
    recipe: Recipe
    chains: Diversity
    seed: int

    @property
    def name(self) -> str:
        return f"chains={self.chains},seed={self.seed}"

    def key(self, purpose: str) -> PRNGKeyArray:
        """The random key of one purpose; no two cells, seeds or purposes share a stream."""
        diversity = 0 if self.chains == "infinite" else self.chains
        cell = jax.random.fold_in(jax.random.key(self.seed), diversity)
        return jax.random.fold_in(cell, PURPOSES.index(purpose))

    @cached_property
    def prior(self) -> ChainPrior:
        """The chain prior of the recipe."""
        return ChainPrior(self.recipe.task.states, self.recipe.task.concentration)

    @cached_property
    def chain_set(self) -> ChainSet | None:
        """The training set of chains; None where K is infinite."""
        if self.chains == "infinite":
            return None
        return self.prior.sample(self.key("chains"), self.chains)

    @cached_property
    def evaluation_sets(self) -> dict[str, EvaluationSet]:
        """The ID and the OOD evaluation set."""
        predictors = reference_predictors(self.chain_set, self.prior)
        sizes = (self.recipe.evaluation.sequences, self.recipe.task.context)
        sources = {"id": self.chain_set or self.prior, "ood": self.prior}
        return {
            name: evaluation_set(source, predictors, *sizes, key=self.key(name))
            for name, source in sources.items()
        }

    def new_model(self) -> Transformer:
        """The model before training."""
        task = self.recipe.task
        return Transformer(self.recipe.model, task.states, task.context, key=self.key("model"))

    @cached_property
    def status(self) -> str:
        """`done`, `damaged` (a checksum is wrong), `failed`, `unfinished` or `missing`."""
        if self._done.exists():
            return "damaged" if self.damage else "done"
        if (self.path / "error.txt").exists():
            return "failed"
        return "unfinished" if self._pieces.exists() else "missing"

    @cached_property
    def damage(self) -> str | None:
        """What is wrong with the files of a finished cell, if anything."""
        try:
            expected = json.loads(self._done.read_text())["checksums"]
        except (OSError, ValueError, KeyError) as error:
            return f"done.json: {error}"
        for name in RESULTS:
            if not (self.path / name).exists():
                return f"{name} is missing"
            if checksum(self.path / name) != expected.get(name):
                return f"{name} does not match its checksum"
        return None

    @property
    def error(self) -> str | None:
        """Why a cell failed or is damaged."""
        if self.status == "failed":
            return (self.path / "error.txt").read_text(encoding="utf-8")
        return self.damage if self.status == "damaged" else None

    @cached_property
    def curves(self) -> xr.Dataset | None:
        """All that was measured along training; of an unfinished cell, so far.

        None where there is nothing to read.
        """
        if self.status == "done":
            with xr.open_dataset(self.path / "curves.nc", engine="h5netcdf") as saved:
                return saved.load()
        pieces = self._read_pieces()
        return None if self.status == "damaged" or not pieces else self._join_curves(pieces)

    @cached_property
    def steps(self) -> list[int]:
        """Steps with a checkpoint."""
        return self._checkpoints["step"].tolist() if self._checkpoints else []

    def model(self, step: int | None = None) -> Transformer:
        """The model at a checkpoint, the last one by default.

        Raises `ValueError` if there is no checkpoint at that step.
        """
        if not self.steps or (step is not None and step not in self.steps):
            raise ValueError(f"cell {self.name}: no checkpoint at step {step}; got {self.steps}")
        index = -1 if step is None else self.steps.index(step)
        arrays = {name: array[index] for name, array in self._checkpoints.items()}
        return arrays_to_tree(self.new_model(), arrays)

    @cached_property
    def _checkpoints(self) -> dict[str, np.ndarray]:
        if self.status == "done":
            return read_arrays(self.path / "checkpoints.safetensors")
        pieces = {} if self.status == "damaged" else self._read_pieces()
        return _stack(pieces, "model.") if pieces else {}

    @property
    def _done(self) -> Path:
        return self.path / "done.json"

    @property
    def _pieces(self) -> Path:
        return self.path / "pieces"

    def _read_pieces(self) -> dict[int, dict[str, np.ndarray]]:
        """Saved evaluation points by step, without a gap."""
        pieces = {}
        for step in self.recipe.train.evaluation_steps:
            path = self._pieces / f"{step}.safetensors"
            if not path.exists():
                break
            pieces[step] = read_arrays(path)
        return pieces

    def _join_curves(self, pieces: dict[int, dict[str, np.ndarray]]) -> xr.Dataset:
        curves = curves_dataset(
            _stack(pieces, "curves."),
            list(reference_predictors(self.chain_set, self.prior)),
            self.recipe.task.context,
        )
        last = max(pieces)
        diverged = int(pieces[last]["diverged"])
        outcome = "finished" if last == self.recipe.train.steps else "unfinished"
        return curves.assign_attrs(
            chains=self.chains,
            seed=self.seed,
            outcome=outcome if diverged < 0 else f"diverged at step {diverged}",
        )


def run_cell(cell: Cell, on_steps: Callable[[int], None] | None = None) -> None:
    """Train a cell, from where it stands, and save it.

    A cell that was interrupted ends bit-identical to one that was not.  `on_steps` is called with
    the number of steps done.
    """
    cell._pieces.mkdir(parents=True, exist_ok=True)
    (cell.path / "error.txt").unlink(missing_ok=True)
    state = initial_state(cell.new_model(), cell.recipe.train)
    state_path = cell.path / "state.safetensors"
    if state_path.exists():
        saved: TrainingState = arrays_to_tree(state, read_arrays(state_path))
        if int(saved.step) <= max(cell._read_pieces(), default=-1):
            state = saved
    sets = cell.evaluation_sets
    for snapshot in train(
        state,
        cell.chain_set or cell.prior,
        cell.recipe.train,
        key=cell.key("batches"),
        evaluate={"curves": lambda model: evaluate(model, sets["id"], sets["ood"])},
        on_steps=on_steps,
    ):
        state = snapshot.state
        measured = {**snapshot.evaluations["curves"], "train_loss": np.float32(snapshot.train_loss)}
        piece = {
            **{f"curves.{name}": np.asarray(array) for name, array in measured.items()},
            **{f"model.{name}": array for name, array in tree_to_arrays(state.model).items()},
            "diverged": np.asarray(state.diverged),
        }
        write_arrays(cell._pieces / f"{snapshot.step}.safetensors", piece)
        write_arrays(state_path, tree_to_arrays(state))

    pieces = {step: arrays for step, arrays in cell._read_pieces().items() if step <= state.step}
    write_arrays(cell.path / "checkpoints.safetensors", _stack(pieces, "model."))
    beside = cell.path / ".curves.nc"
    cell._join_curves(pieces).to_netcdf(beside, engine="h5netcdf")
    beside.replace(cell.path / "curves.nc")
    checksums = {name: checksum(cell.path / name) for name in RESULTS}
    write_file(cell._done, json.dumps({"checksums": checksums}, indent=1).encode())
    shutil.rmtree(cell._pieces)


@jax.jit
def evaluate(model: Transformer, id: EvaluationSet, ood: EvaluationSet) -> dict[str, Array]:
    """A model against the references on both sets, which are the first axis of what both have."""
    log_probs = [jax.nn.log_softmax(model(on.states)) for on in (id, ood)]
    measured = [measure(log_prob, on) for log_prob, on in zip(log_probs, (id, ood), strict=True)]
    composition, residual = compose(log_probs[0], id)
    both: Any = jax.tree.map(lambda *arrays: jnp.stack(arrays), *measured)
    here = measured[0]
    return {
        "loss": both.loss,
        "distance": both.distance,
        "distance_binned": both.distance_binned,
        "undefined": both.undefined,
        "composition": composition,
        "residual": residual,
        "nearest": here.nearest,
        "nearest_ood": measured[1].nearest,
        "margin": here.margin,
        "margin_error": here.margin_error,
        "separation": here.separation,
        "clear": here.clear,
        "reference_loss": jnp.stack(
            [
                jnp.stack([cross_entropy(on.target, reference) for reference in on.references])
                for on in (id, ood)
                if on.target is not None
            ]
        ),
    }


def _stack(pieces: dict[int, dict[str, np.ndarray]], prefix: str) -> dict[str, np.ndarray]:
    """The arrays under a prefix, stacked over steps, and the steps."""
    names = [name for name in next(iter(pieces.values())) if name.startswith(prefix)]
    stacked = {
        name.removeprefix(prefix): np.stack([piece[name] for piece in pieces.values()])
        for name in names
    }
    return {**stacked, "step": np.array(list(pieces), np.int64)}


def curves_dataset(measured: dict[str, np.ndarray], names: list[str], context: int) -> xr.Dataset:
    """The curves of a cell, with units, from the arrays of `evaluate` stacked over steps.

    The predictor axis always has all four references; those that do not exist are NaN.
    """

    def by_predictor(name: str, *axes: str) -> xr.DataArray:
        array = xr.DataArray(measured[name], dims=axes, coords={"predictor": names})
        return array.reindex(predictor=list(PREDICTORS))

    bins = np.array(position_bins(context))
    curves = xr.Dataset(
        {
            "loss": (("step", "set"), measured["loss"]),
            "train_loss": ("step", measured["train_loss"]),
            "distance": by_predictor("distance", "step", "set", "predictor"),
            "distance_binned": by_predictor("distance_binned", "step", "set", "predictor", "bin"),
            "undefined": by_predictor("undefined", "step", "set", "predictor"),
            "composition": by_predictor("composition", "step", "predictor"),
            "residual": ("step", measured["residual"]),
            "margin": ("step", measured["margin"]),
            "margin_error": ("step", measured["margin_error"]),
            "separation": ("step", measured["separation"]),
            "reference_loss": by_predictor("reference_loss", "step", "set", "predictor")[-1],
        },
    )
    for variable in curves.data_vars.values():
        variable.attrs["units"] = "nats"
    for name in ("composition", "undefined"):
        curves[name].attrs["units"] = "1"
    for name, source in {"phase": "nearest", "phase_ood": "nearest_ood"}.items():
        curves[name] = ("step", [phase_name(int(index)) for index in measured[source]])
    curves["clear"] = ("step", measured["clear"].astype(bool))
    return curves.assign_coords(
        step=("step", measured["step"], {"units": "optimizer steps"}),
        set=["id", "ood"],
        bin_start=("bin", bins[:, 0], {"units": "positions"}),
        bin_end=("bin", bins[:, 1], {"units": "positions"}),
    )

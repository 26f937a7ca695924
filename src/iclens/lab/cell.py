"""A cell: one (chains K, seed) point of a sweep, trained, measured and saved.

The folder of a cell holds `pieces/` while it trains (one file for each evaluation point) and
`state.safetensors`, from which it resumes; at the end the pieces are joined into `curves.nc` and
`checkpoints.safetensors`, and `done.json`, with the checksums, is written last.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jaxtyping import Array, PRNGKeyArray

from iclens.chains import ChainSet, Prior
from iclens.circuits.roles import head_scores
from iclens.lab.files import (
    arrays_to_tree,
    checksum,
    is_locked,
    read_arrays,
    read_dataset,
    tree_to_arrays,
    write_arrays,
    write_dataset,
    write_file,
)
from iclens.lab.recipe import Diversity, Recipe
from iclens.lab.source import chains_of, prior_of
from iclens.phases import (
    EvaluationSet,
    compose,
    evaluation_set,
    is_clear,
    measure,
    phase_name,
    position_bins,
)
from iclens.predictors import PREDICTORS, reference_predictors
from iclens.training import Snapshot, TrainingState, initial_state, train
from iclens.transformer import Transformer, forward

PURPOSES = ("chains", "model", "batches", "id", "ood", "trace", "weights")
"""What a cell needs randomness for; each has a stream of its own."""
HEAD_SCORES = ("previous", "previous_chance", "induction", "induction_chance", "uniformity")
RESULTS = ("curves.nc", "checkpoints.safetensors", "state.safetensors")


@dataclass(frozen=True)
class Cell:
    """One cell of a run, as it stood on disk when first looked at, or still to come."""

    folder: Path
    """Where the folders of cells are."""
    recipe: Recipe
    chains: Diversity
    seed: int

    @property
    def name(self) -> str:
        return f"chains={self.chains},seed={self.seed}"

    @property
    def path(self) -> Path:
        return self.folder / self.name

    @property
    def lock_path(self) -> Path:
        """What the process that works on the cell holds; it outlives the cell's own folder."""
        return self.folder / f".{self.name}.lock"

    def key(self, purpose: str) -> PRNGKeyArray:
        """The random key of one purpose; no two cells, seeds or purposes share a stream."""
        diversity = 0 if self.chains == "infinite" else self.chains
        cell = jax.random.fold_in(jax.random.key(self.seed), diversity)
        return jax.random.fold_in(cell, PURPOSES.index(purpose))

    @cached_property
    def prior(self) -> Prior:
        """The chain prior of the recipe."""
        return prior_of(self.recipe)

    @cached_property
    def chain_set(self) -> ChainSet | None:
        """The training set of chains, with their weights; None where K is infinite.

        Of a file of M chains it is K that are drawn, in the order of the file.
        """
        if self.chains == "infinite":
            return None
        found = chains_of(self.recipe)
        if found is None:
            found = self.prior.sample(self.key("chains"), self.chains)
        elif self.chains < found.count:
            taken = np.sort(jax.random.permutation(self.key("chains"), found.count)[: self.chains])
            found = found.take(taken)
        elif self.chains > found.count:
            raise ValueError(f"expected at most {found.count} chains, as many as the file has")
        if self.recipe.task.weights == "equal":
            return found
        with jax.enable_x64(True):  # exponential variates over their sum follow the flat law
            mass = jax.random.exponential(self.key("weights"), (self.chains,), "float64")
        return ChainSet(found.transition, np.asarray(mass), found.labels)

    @property
    def source(self) -> ChainSet | Prior:
        """Where training sequences come from."""
        return self.chain_set or self.prior

    @cached_property
    def evaluation_sets(self) -> dict[str, EvaluationSet]:
        """The ID and the OOD evaluation set."""
        predictors = reference_predictors(self.chain_set, self.prior)
        sizes = (self.recipe.evaluation.sequences, self.recipe.task.context)
        sources = {"id": self.source, "ood": self.prior}
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
        """`done`, `damaged` (a file is not as written), `failed`, `unfinished` or `missing`."""
        if self.damage:
            return "damaged"
        if self._done.exists():
            return "done"
        if (self.path / "error.txt").exists():
            return "failed"
        return "unfinished" if self._pieces_path.exists() else "missing"

    @cached_property
    def damage(self) -> str | None:
        """What is wrong with the files of a cell, if anything."""
        if not self._done.exists():
            try:
                _ = self.pieces, self._state
            except ValueError as error:
                return str(error)
            return None
        try:
            expected = json.loads(self._done.read_text())["checksums"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            return f"done.json: {error!r}"
        for name in RESULTS:
            if not (self.path / name).exists():
                return f"{name} is missing"
            if checksum(self.path / name) != expected.get(name):
                return f"{name} does not match its checksum"
        return None

    @property
    def saved(self) -> int:
        """Evaluation points saved so far, as they are now."""
        return len(list(self._pieces_path.glob("[0-9]*.safetensors")))

    @property
    def is_held(self) -> bool:
        """Whether a process works on the cell now."""
        return is_locked(self.lock_path)

    @property
    def rate(self) -> float:
        """Steps a second of an unfinished cell, from when its pieces were written; else 0."""
        steps = list(self.pieces)
        if len(steps) < 3:
            return 0.0
        # The first piece is written before the training is compiled.
        paths = [self._pieces_path / f"{step}.safetensors" for step in (steps[1], steps[-1])]
        try:
            first, last = (path.stat().st_mtime for path in paths)
        except FileNotFoundError:  # it has been finished meanwhile
            return 0.0
        return (steps[-1] - steps[1]) / max(last - first, 1e-9)

    @property
    def error(self) -> str | None:
        """Why a cell failed or is damaged."""
        if self.status == "failed":
            try:
                return (self.path / "error.txt").read_text(encoding="utf-8")
            except FileNotFoundError:  # it goes on meanwhile
                return None
        return self.damage if self.status == "damaged" else None

    @cached_property
    def curves(self) -> xr.Dataset | None:
        """All that was measured along training; of an unfinished cell, so far.

        None where there is nothing to read.
        """
        if self.status == "done":
            return read_dataset(self.path / "curves.nc")
        return (
            None if self.status == "damaged" or not self.pieces else self._join_curves(self.pieces)
        )

    def curves_after(self, step: int) -> xr.Dataset | None:
        """What was measured after a step, so far, without reading what was before it.

        None where that is nothing.  Raises `ValueError` if a file is damaged.
        """
        if self._done.exists():
            curves = read_dataset(self.path / "curves.nc")
            found = curves.sel(step=curves.step > step)
            return found if found.sizes["step"] else None
        pieces = self._read_pieces(after=step)
        return self._join_curves(pieces) if pieces else None

    @cached_property
    def steps(self) -> list[int]:
        """Steps with a checkpoint."""
        return self.checkpoints["step"].tolist() if self.checkpoints else []

    def model(self, step: int | None = None) -> Transformer:
        """The model at a checkpoint, the last one by default.

        Raises `ValueError` if there is no checkpoint at that step.
        """
        if not self.steps:
            raise ValueError(f"cell {self.name} is {self.status}: it has no checkpoints")
        if step is not None and step not in self.steps:
            raise ValueError(
                f"cell {self.name}: expected a step with a checkpoint, one of "
                f"{', '.join(map(str, self.steps))}; got {step}"
            )
        index = -1 if step is None else self.steps.index(step)
        arrays = {name: np.asarray(array[index]) for name, array in self.checkpoints.items()}
        return arrays_to_tree(self.new_model(), arrays)

    @cached_property
    def checkpoints(self) -> dict[str, np.ndarray]:
        """The parameters by name, and `step`, stacked over checkpoints; empty without any."""
        if self.status == "done":
            return read_arrays(self.path / "checkpoints.safetensors")
        if self.status == "damaged" or not self.pieces:
            return {}
        return _stack(self.pieces, "model.")

    @property
    def _done(self) -> Path:
        return self.path / "done.json"

    @property
    def _pieces_path(self) -> Path:
        return self.path / "pieces"

    @cached_property
    def pieces(self) -> dict[int, dict[str, np.ndarray]]:
        """Evaluation points of an unfinished cell by step, without a gap.

        Raises `ValueError` if one is damaged.
        """
        return self._read_pieces()

    def _read_pieces(self, after: int = -1) -> dict[int, dict[str, np.ndarray]]:
        pieces = {}
        for step in self.recipe.train.evaluation_steps:
            if step <= after:
                continue
            try:
                pieces[step] = read_arrays(self._pieces_path / f"{step}.safetensors")
            except FileNotFoundError:
                break
        return pieces

    @cached_property
    def _state(self) -> TrainingState | None:
        """The state that training goes on from, if it was saved with its evaluation point.

        Raises `ValueError` if it is damaged.
        """
        path = self.path / "state.safetensors"
        if not path.exists():
            return None
        fresh = initial_state(self.new_model(), self.recipe.train)
        saved: TrainingState = arrays_to_tree(fresh, read_arrays(path))
        return saved if int(saved.step) in self.pieces else None

    def _join_curves(self, pieces: Mapping[int, Mapping[str, np.ndarray]]) -> xr.Dataset:
        curves = curves_dataset(_stack(pieces, "curves."), self.recipe.task.context)
        last = max(pieces)
        diverged = int(pieces[last]["diverged"])
        outcome = "finished" if last == self.recipe.train.steps else "unfinished"
        return curves.assign_attrs(
            chains=self.chains,
            seed=self.seed,
            outcome=outcome if diverged < 0 else f"diverged at step {diverged}",
        )


def _stack(pieces: Mapping[int, Mapping[str, np.ndarray]], prefix: str) -> dict[str, np.ndarray]:
    """The arrays of pieces under a prefix, stacked over steps, and the steps."""
    names = [name for name in next(iter(pieces.values())) if name.startswith(prefix)]
    stacked = {
        name.removeprefix(prefix): np.stack([piece[name] for piece in pieces.values()])
        for name in names
    }
    return {**stacked, "step": np.array(list(pieces), np.int64)}


def tidy(cell: Cell) -> None:
    """Remove what a killed process left in the folder of a cell; nobody may be working on it."""
    for leftover in (*cell.path.glob(".*"), *cell._pieces_path.glob(".*")):
        leftover.unlink(missing_ok=True)
    if cell._done.exists() and cell._pieces_path.exists():
        shutil.rmtree(cell._pieces_path, ignore_errors=True)


def run_cell(
    cell: Cell,
    on_steps: Callable[[int], None] | None = None,
    on_phase: Callable[[int, str], None] = lambda steps, phase: None,
) -> None:
    """Train a cell, from where it stands, and save it.

    A cell that was interrupted ends bit-identical to one that was not.  `on_steps` is called with
    the number of steps done, `on_phase` also with the label, after each evaluation.
    """
    for snapshot in train(
        begin(cell), cell.source, cell.recipe.train, key=cell.key("batches"), on_steps=on_steps
    ):
        on_phase(snapshot.step, save_snapshot(cell, snapshot))
    finish(cell)


def begin(cell: Cell) -> TrainingState:
    """The state that the training of a cell starts or goes on from; makes the cell's folder."""
    cell._pieces_path.mkdir(parents=True, exist_ok=True)
    (cell.path / "error.txt").unlink(missing_ok=True)
    return cell._state or initial_state(cell.new_model(), cell.recipe.train)


def save_snapshot(cell: Cell, snapshot: Snapshot) -> str:
    """Measure and save a cell at an evaluation point; returns its label there."""
    state, sets = snapshot.state, cell.evaluation_sets
    measured = {
        **evaluate(state.model, sets["id"], sets["ood"]),
        "train_loss": np.float32(snapshot.train_loss),
        "reference_loss": np.stack([sets["id"].reference_loss, sets["ood"].reference_loss]),
    }
    piece = {
        **{f"curves.{name}": np.asarray(array) for name, array in measured.items()},
        **{f"model.{name}": array for name, array in tree_to_arrays(state.model).items()},
        "diverged": np.asarray(state.diverged),
    }
    write_arrays(cell._pieces_path / f"{snapshot.step}.safetensors", piece)
    write_arrays(cell.path / "state.safetensors", tree_to_arrays(state))
    return phase_name(int(measured["nearest"]))


def finish(cell: Cell, **about: str) -> None:
    """Join the pieces of a trained cell, and mark it as done; `about` is added to its curves."""
    trained = replace(cell)
    write_arrays(cell.path / "checkpoints.safetensors", _stack(trained.pieces, "model."))
    curves = trained._join_curves(trained.pieces).assign_attrs(about)
    write_dataset(cell.path / "curves.nc", curves)
    checksums = {name: checksum(cell.path / name) for name in RESULTS}
    write_file(cell._done, json.dumps({"checksums": checksums}, indent=1).encode())
    shutil.rmtree(cell._pieces_path, ignore_errors=True)  # it is done, whatever is left


@jax.jit
def evaluate(model: Transformer, id: EvaluationSet, ood: EvaluationSet) -> dict[str, Array]:
    """A model against the references on both sets, which are the first axis of what both have."""
    ran = [forward(model, on.states) for on in (id, ood)]
    log_probs = [jax.nn.log_softmax(activations.logits) for activations in ran]
    heads = head_scores(ran[0].attention, id.states)
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
        "clear": is_clear(here, composition),
        **{score: getattr(heads, score) for score in HEAD_SCORES},
    }


def curves_dataset(measured: dict[str, np.ndarray], context: int) -> xr.Dataset:
    """The curves of a cell, with units, from the arrays of `evaluate` stacked over steps.

    The predictor axis always has all four references; the memorising ones, if they do not exist,
    are NaN.
    """
    names = list(PREDICTORS[: measured["composition"].shape[-1]])

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
    for score in HEAD_SCORES:
        axes = ("step",) if score.endswith("chance") else ("step", "layer", "head")
        curves[score] = (axes, measured[score])
    for variable in curves.data_vars.values():
        variable.attrs["units"] = "nats"
    for name in ("composition", "undefined", *HEAD_SCORES):
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

"""What the page and the figures show of a saved run, read once."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import xarray as xr
from jaxtyping import Float

from iclens.chains import ChainSet
from iclens.lab.cell import Cell
from iclens.lab.files import read_dataset
from iclens.lab.recipe import Diversity
from iclens.lab.source import chains_of
from iclens.lab.store import Run
from iclens.phases import NO_PHASE, PHASES, float_diversity
from iclens.predictors import PREDICTORS

REFERENCES = dict(zip(PREDICTORS, PHASES, strict=True))
"""The phase, hence the colour, of each reference."""
TRACED = (
    "edge_kl",
    "circuit",
    "faithfulness",
    "random_faithfulness",
    "criterion_holds",
    "criterion_value",
    "criterion_limit",
    "phase",
    "clear",
)
"""What is shown of a trace, all over its steps."""


@dataclass(frozen=True)
class Reading:
    """A run and what the page and the figures both derive from it."""

    run: Run

    @cached_property
    def axis(self) -> StepAxis:
        """The axis of steps that all cells share."""
        return StepAxis(self.run.recipe.train.evaluation_steps)

    @cached_property
    def labels(self) -> list[str] | None:
        """What the states are called, where they are not called by their numbers."""
        chains = chains_of(self.run.recipe)
        return None if chains is None or chains.labels is None else list(chains.labels)

    @property
    def traces(self) -> dict[str, xr.Dataset]:
        """What was traced of each cell, by the cell's name, over its traced checkpoints."""
        return self._traces[0]

    @property
    def damaged_traces(self) -> list[str]:
        """Why traces that are there cannot be shown."""
        return self._traces[1]

    @cached_property
    def _traces(self) -> tuple[dict[str, xr.Dataset], list[str]]:
        found: dict[str, xr.Dataset] = {}
        faults = []
        cells = {cell.name for cell in self.run.cells}
        paths = (self.run.path / "circuits").glob("chains=*,seed=*,step=*.nc")
        # A whole history comes before single steps, which are left out where it has them.
        for path in sorted(paths, key=lambda path: (not path.stem.endswith("all"), path)):
            name = path.name.split(",step=")[0]
            if name not in cells:
                continue
            try:
                trace = _shown_of(path)
                if name in found:
                    both = xr.concat([found[name], trace], "step", data_vars="all", join="exact")
                    trace = both.drop_duplicates("step").sortby("step")
                found[name] = trace
            except ValueError as error:
                faults.append(f"{path.name}: {error}")
        return found, faults

    @cached_property
    def brackets(self) -> list[Bracket]:
        """The thresholds that are known, each in the first lane where it touches no other."""
        found: list[Bracket] = []
        for name, threshold in self.run.phase_map.thresholds.items():
            if threshold["bracket"] is not None:
                low, high = threshold["bracket"]
                bracket = Bracket(name, low, high)
                taken = {other.lane for other in found if bracket.touches(other)}
                lane = next(lane for lane in range(len(found) + 1) if lane not in taken)
                found.append(replace(bracket, lane=lane))
        return found

    @cached_property
    def fits(self) -> dict[str, list[float]]:
        """The thresholds that were fitted: value and both ends of the interval; NaN is open."""
        found = {}
        for name in self.run.phase_map.thresholds:
            path = self.run.path / "theory" / f"{name.rstrip('*')}.nc"
            # A damaged one is told where the theory is shown.
            with contextlib.suppress(FileNotFoundError, ValueError):
                found[name] = read_dataset(path).fit.values[0, :3].tolist()
        return found

    def begins(self, cell: Cell) -> list[tuple[str, int]]:
        """The successive phases of a cell and the step at which each begins."""
        for row in self.run.phase_map.cells:
            if (row["chains"], row["seed"]) == (cell.chains, cell.seed):
                return list(zip(row["phases"], row["steps"], strict=True))
        return []

    def outcome(self, cell: Cell) -> str:
        """How a cell ended or where it stands: `finished`, `stopped at step 640`, `missing`, ..."""
        if cell.curves is None:
            return cell.status
        if cell.curves.attrs["outcome"] == "unfinished":
            return f"{'failed' if cell.error else 'stopped'} at step {cell.curves.step[-1]:,}"
        return str(cell.curves.attrs["outcome"])


def _shown_of(path: Path) -> xr.Dataset:
    """What is shown of a saved trace.  Raises `ValueError` if it is damaged or lacks some of it."""
    trace = read_dataset(path)
    if "phase" not in trace:  # nothing was measured of the cell
        trace = trace.assign(
            phase=("step", [NO_PHASE] * trace.sizes["step"]),
            clear=("step", [False] * trace.sizes["step"]),
        )
    if missing := [name for name in TRACED if name not in trace]:
        raise ValueError(f"it has no {missing[0]}: trace the cell again")
    shown = trace[list(TRACED)]
    # The best of the random sets, of which there may be any number.
    best = shown.random_faithfulness.max([d for d in shown.random_faithfulness.dims if d != "step"])
    return shown.assign(random_faithfulness=best)


@dataclass(frozen=True)
class Bracket:
    """The K between which a threshold lies, drawn beside the map; None is an open end."""

    name: str
    low: Diversity | None
    high: Diversity | None
    lane: int = 0
    """Place from the map outwards."""

    def touches(self, other: Bracket) -> bool:
        """Whether both have a K in common."""
        low = max(float_diversity(end or 0) for end in (self.low, other.low))
        high = min(float_diversity(end or "infinite") for end in (self.high, other.high))
        return low <= high


def between(name: str, low: Diversity | None, high: Diversity | None) -> str:
    """The K between which a threshold lies, in words; None is an end that no cell shows."""
    if low is None:
        return f"no K brackets {name}" if high is None else f"{name} ≤ {diversity_text(high)}"
    if high is None:
        return f"{name} > {diversity_text(low)}"
    return f"{diversity_text(low)} < {name} ≤ {diversity_text(high)}"


def walk(rng: np.random.Generator, chains: ChainSet, index: np.ndarray, length: int) -> np.ndarray:
    """Sequences (index, length) of the chains at `index`, from their stationary laws."""
    cumulative = np.cumsum(chains.transition, axis=-1)

    def draw(rows: np.ndarray) -> np.ndarray:
        numbers = rng.random((len(rows), 1)) * rows[:, -1:]
        return (rows < numbers).sum(1)

    states = [draw(np.cumsum(chains.stationary[index], axis=-1))]
    while len(states) < length:
        states.append(draw(cumulative[index, states[-1]]))
    return np.stack(states, axis=1).astype(np.int32)


def diversity_text(chains: Diversity) -> str:
    """K as it is written on axes."""
    return "∞" if chains == "infinite" else f"{chains:,}"


@dataclass(frozen=True)
class StepAxis:
    """A logarithmic axis of optimizer steps with a place for step 0, in units of log10(step)."""

    steps: tuple[int, ...]
    """Evaluation steps, increasing: 0 and at least one more."""
    scale: StepAxis | None = None
    """The axis of all runs that this one stands beside."""

    @cached_property
    def _logarithms(self) -> Float[np.ndarray, " step"]:
        return np.log10(np.array(self.steps[1:], float))

    @cached_property
    def edges(self) -> dict[int, tuple[float, float]]:
        """Where the cell of each step begins and ends: half-way to its neighbours."""
        at = self._logarithms
        middle = (at[1:] + at[:-1]) / 2
        first, last = (middle[0], middle[-1]) if len(at) > 1 else (at[0] + 0.1, at[0] - 0.1)
        bounds = np.concatenate([[2 * at[0] - first], middle, [2 * at[-1] - last]])
        if self.scale is None:
            # Step 0 has no logarithm; it stands apart, to the left of the first step.
            width, gap = 0.045 * (bounds[-1] - bounds[0]), 0.012 * (bounds[-1] - bounds[0])
            zero = (float(bounds[0] - gap - width), float(bounds[0] - gap))
        else:
            zero = self.scale.edges[0]
            bounds = np.clip(bounds, self.scale.edges[self.scale.steps[1]][0], self.scale.range[1])
        spans = zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
        return dict(zip(self.steps, [zero, *spans], strict=True))

    def position(self, step: int) -> float:
        """Where a step lies on the axis."""
        return sum(self.edges[0]) / 2 if step == 0 else float(np.log10(step))

    @property
    def range(self) -> tuple[float, float]:
        """Both ends of the axis."""
        if self.scale is not None:
            return self.scale.range
        return self.edges[0][0], self.edges[self.steps[-1]][1]

    @property
    def ticks(self) -> tuple[list[int], list[int]]:
        """Steps with a label and steps with a small tick only; the first label is step 0."""
        if self.scale is not None:
            return self.scale.ticks
        low, high = self.steps[1], self.steps[-1]
        marks = [
            digit * 10**power
            for power in range(len(str(high)))
            for digit in range(1, 10)
            if low <= digit * 10**power <= high
        ]
        leading = {1, 2, 5} if high < 20 * low else {1, 3} if high < 2000 * low else {1}
        labels = [mark for mark in marks if int(str(mark)[0]) in leading]
        return [0, *labels], [mark for mark in marks if mark not in labels]

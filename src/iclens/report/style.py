"""One look for the page and the figures: a colour for each phase, their blends, the step axis."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Float

from iclens.lab.cell import Cell
from iclens.lab.recipe import Diversity
from iclens.lab.store import Run
from iclens.phases import PHASES

PHASE_COLOURS = {"G1": "#3a9cd4", "G2": "#4356d6", "M1": "#c68413", "M2": "#c02a46"}
"""Hue tells generalising (blue) from memorising (red), depth one-point (light) from two-point.

Told apart in protanopia and deuteranopia, and at a contrast of at least 3 on the light and on the
dark background, so that a curve has the same colour everywhere.
"""
LIGHT = {"surface": "#ffffff", "ink": "#1b1f24", "muted": "#5b636d", "none": "#d5d9de"}
DARK = {"surface": "#111418", "ink": "#e8eaed", "muted": "#a2abb5", "none": "#3d434b"}
"""Background, text, secondary text, and the cells of a model that has no phase."""

# Ottosson's OKLab: linear-light sRGB -> cone responses -> (cube root) -> lightness and two hues.
_RGB_TO_LMS = np.array(
    [
        [0.4122214708, 0.5363325363, 0.0514459929],
        [0.2119034982, 0.6806995451, 0.1073969566],
        [0.0883024619, 0.2817188376, 0.6299787005],
    ]
)
_LMS_TO_LAB = np.array(
    [
        [0.2104542553, 0.7936177850, -0.0040720468],
        [1.9779984951, -2.4285922050, 0.4505937099],
        [0.0259040371, 0.7827717662, -0.8086757660],
    ]
)


def srgb(colour: str) -> Float[np.ndarray, "rgb=3"]:
    """Red, green and blue in [0, 1] of a colour written `#rrggbb`."""
    return np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255


def linear_light(rgb: Float[np.ndarray, "*axes rgb=3"]) -> Float[np.ndarray, "*axes rgb=3"]:
    """Undo the transfer curve of sRGB (IEC 61966-2-1)."""
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def oklab(linear: Float[np.ndarray, "*axes rgb=3"]) -> Float[np.ndarray, "*axes lab=3"]:
    """Linear-light sRGB in OKLab, where equal distances look about equally far apart."""
    return np.cbrt(linear @ _RGB_TO_LMS.T) @ _LMS_TO_LAB.T


def blend(composition: Float[np.ndarray, "step predictor=4"]) -> list[str]:
    """The phase colours mixed by composition, linearly in OKLab, as `#rrggbb`.

    A reference that does not exist (NaN) has no weight.
    """
    corners = oklab(linear_light(np.stack([srgb(PHASE_COLOURS[phase]) for phase in PHASES])))
    lms = (np.nan_to_num(composition) @ corners) @ np.linalg.inv(_LMS_TO_LAB).T
    linear = np.clip(lms**3 @ np.linalg.inv(_RGB_TO_LMS).T, 0, 1)
    rgb = np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)
    return ["#{:02x}{:02x}{:02x}".format(*row) for row in np.rint(255 * rgb).astype(int).tolist()]


@dataclass(frozen=True)
class StepAxis:
    """A logarithmic axis of optimizer steps with a place for step 0, in units of log10(step)."""

    steps: tuple[int, ...]
    """Evaluation steps, increasing: 0 and at least one more."""

    @classmethod
    def of(cls, steps: Iterable[int]) -> StepAxis:
        """The axis for evaluations at `steps`, in any order and with repeats."""
        return cls(tuple(sorted({0, *map(int, steps)})))

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
        # Step 0 has no logarithm; it stands apart, to the left of the first step.
        width, gap = 0.045 * (bounds[-1] - bounds[0]), 0.012 * (bounds[-1] - bounds[0])
        zero = (bounds[0] - gap - width, bounds[0] - gap)
        spans = zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
        return dict(zip(self.steps, [(float(zero[0]), float(zero[1])), *spans], strict=True))

    def position(self, step: int) -> float:
        """Where a step lies on the axis."""
        return sum(self.edges[0]) / 2 if step == 0 else float(np.log10(step))

    @property
    def range(self) -> tuple[float, float]:
        """Both ends of the axis."""
        return self.edges[0][0], self.edges[self.steps[-1]][1]

    @property
    def ticks(self) -> tuple[list[int], list[int]]:
        """Steps with a label and steps with a small tick only; the first label is step 0."""
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


def by_diversity(run: Run) -> list[Cell]:
    """The cells of a run by K, then seed; K = "infinite" comes last."""
    return sorted(
        run.cells,
        key=lambda cell: (np.inf if cell.chains == "infinite" else cell.chains, cell.seed),
    )


def diversity_text(chains: Diversity | float) -> str:
    """K as it is written on axes."""
    return "∞" if chains in ("infinite", np.inf) else f"{int(chains):,}"


def steps_of(run: Run) -> StepAxis:
    """The axis that all cells of a run share."""
    return StepAxis.of(run.recipe.train.evaluation_steps)

"""Which reference predictor a model is: distances, composition, phase labels, the phase map.

Distances and losses are in nats.  Positions n run over the context, [0, N); what counts for a
distance are the late ones, [N / 2, N), where the references have had evidence to differ on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from iclens.chains import ChainSet, Prior
from iclens.predictors import Predictor

PHASES = ("G1", "G2", "M1", "M2")
"""The phases, in the order of `PREDICTORS`."""
NO_PHASE = "none"
"""The label of a model that is no nearer to its nearest reference than uniform is."""

BOOTSTRAP_RESAMPLES = 200
CLEAR_ERRORS = 2.0
"""Standard errors by which a clear label must be ahead (see `is_clear`)."""
ROUNDING = 1e-5
"""Relative error of a mean distance in float32: the uniform model itself must have no phase."""
COMPOSITION_TOLERANCE = 1e-6
COMPOSITION_ITERATIONS = 2000


class EvaluationSet(eqx.Module):
    """Fixed sequences with the predictions of the references on them."""

    states: Int[Array, "batch position"]
    target: Float[Array, "batch position state"] | None
    """True distribution of the next state, where it is known."""
    references: Float[Array, "predictor batch position state"]
    """Log-probabilities of the references."""

    @property
    def reference_loss(self) -> Float[Array, " predictor"]:
        """Expected cross-entropy of each reference; NaN if the target is unknown."""
        if self.target is None:
            return jnp.full(len(self.references), jnp.nan)
        return jnp.stack([cross_entropy(self.target, log_probs) for log_probs in self.references])


class Measurement(eqx.Module):
    """A model against the references on one evaluation set."""

    loss: Float[Array, ""]
    """Expected cross-entropy of the next state over all positions; NaN if the target is unknown."""
    distance: Float[Array, " predictor"]
    """Mean KL(reference || model) over sequences and late positions."""
    distance_error: Float[Array, " predictor"]
    """Its standard error over sequences; NaN for an infinite distance and for a single sequence."""
    distance_binned: Float[Array, "predictor bin"]
    """The same in the bins of `position_bins`."""
    undefined: Float[Array, " predictor"]
    """Share of late positions at which the reference is undefined; they are left out."""
    nearest: Int[Array, ""]
    """Index of the nearest reference; -1 for no phase."""
    margin: Float[Array, ""]
    """By how much the second nearest reference is farther than the nearest."""
    margin_error: Float[Array, ""]
    """Bootstrap standard error of the margin over sequences; NaN for an infinite margin (some
    reference is impossible to reconcile with the model) and for a single sequence."""
    separation: Float[Array, ""]
    """The smaller KL, of both directions, between these two references."""


def evaluation_set(
    source: ChainSet | Prior,
    predictors: Mapping[str, Predictor],
    sequences: int,
    context: int,
    *,
    key: PRNGKeyArray,
) -> EvaluationSet:
    """Draw `sequences` sequences of `context` states from a chain set (ID) or the prior (OOD)."""
    states, transition = source.draw(key, sequences, context)
    return EvaluationSet(
        states=states,
        target=jnp.take_along_axis(jnp.asarray(transition), states[..., None], axis=1),
        references=jnp.stack([predictor(states) for predictor in predictors.values()]),
    )


def position_bins(context: int) -> list[tuple[int, int]]:
    """Half-open bins [0, 1), [1, 2), [2, 4), [4, 8), ... over the positions of a context."""
    edges = [0, *(2**power for power in range(context.bit_length()) if 2**power < context), context]
    return list(pairwise(edges))


def kl_divergence(
    log_p: Float[Array, "*#axes state"], log_q: Float[Array, "*#axes state"]
) -> Float[Array, "*axes"]:
    """KL(p || q) = sum_b p_b (log p_b - log q_b) in nats, with 0 log 0 = 0."""
    zero = log_p == -jnp.inf
    ratio = jnp.where(zero, 0, log_p) - jnp.where(zero, 0, log_q)
    return jnp.sum(jnp.where(zero, 0, jnp.exp(log_p) * ratio), axis=-1)


@jax.jit
def measure(log_probs: Float[Array, "batch position state"], on: EvaluationSet) -> Measurement:
    """Distances, label and margin of a model that predicts `log_probs` on an evaluation set."""
    loss = jnp.float32(jnp.nan) if on.target is None else cross_entropy(on.target, log_probs)
    return measure_divergence(kl_divergence(on.references, log_probs), loss, on)


def measure_divergence(
    kl: Float[Array, "predictor batch position"], loss: Float[Array, ""], on: EvaluationSet
) -> Measurement:
    """`measure` of a model of which KL(reference || model) is known at every position."""
    context, states = on.references.shape[2:]
    late = context // 2
    defined = ~jnp.isnan(on.references).any(axis=-1)

    def mean(values: Array, axis: int | tuple[int, ...], where: Array) -> Array:
        return jnp.sum(jnp.where(where, values, 0), axis) / jnp.sum(where, axis)

    per_sequence = mean(kl[:, :, late:], 2, defined[:, :, late:])
    distance = mean(kl[:, :, late:], (1, 2), defined[:, :, late:])

    order = jnp.argsort(jnp.where(jnp.isnan(distance), jnp.inf, distance))
    first, second = order[0], order[1]
    difference = per_sequence[second] - per_sequence[first]
    draws = jax.random.randint(
        jax.random.key(0), (BOOTSTRAP_RESAMPLES, difference.size), 0, difference.size
    )
    margin_error = jnp.std(jnp.nanmean(difference[draws], axis=1))
    margin_error = jnp.where(difference.size > 1, margin_error, jnp.nan)
    counted = jnp.sum(~jnp.isnan(per_sequence), axis=1)
    spread = jnp.nanstd(per_sequence, axis=1, ddof=1)
    margin = distance[second] - distance[first]
    nearest, runner_up = on.references[first, :, late:], on.references[second, :, late:]
    both = (defined[first] & defined[second])[:, late:]
    separation = jnp.minimum(
        mean(kl_divergence(nearest, runner_up), (0, 1), both),
        mean(kl_divergence(runner_up, nearest), (0, 1), both),
    )
    uniform = jnp.full_like(nearest, -np.log(states))
    to_uniform = mean(kl_divergence(nearest, uniform), (0, 1), defined[first, :, late:])

    return Measurement(
        loss=loss,
        distance=distance,
        distance_error=spread / jnp.sqrt(counted),
        distance_binned=jnp.stack(
            [
                mean(kl[:, :, start:end], (1, 2), defined[:, :, start:end])
                for start, end in position_bins(context)
            ],
            axis=-1,
        ),
        undefined=1 - jnp.mean(defined[:, :, late:], axis=(1, 2)),
        nearest=jnp.where(distance[first] < (1 - ROUNDING) * to_uniform, first, -1),
        margin=margin,
        margin_error=margin_error,
        separation=separation,
    )


def is_clear(measured: Measurement, composition: Float[Array, " predictor"]) -> Bool[Array, ""]:
    """Whether a label can be relied on.

    Margin and separation both exceed two standard errors of the margin, or the margin is infinite;
    and the composition, the other way to compare, has most of the same reference.  (Half-way from
    one reference to a second, a model may be nearest to a third.)
    """
    apart = jnp.minimum(measured.margin, measured.separation)
    certain = jnp.isposinf(measured.margin) | (apart > CLEAR_ERRORS * measured.margin_error)
    agrees = (measured.nearest < 0) | (jnp.argmax(composition) == measured.nearest)
    return certain & agrees


def cross_entropy(
    target: Float[Array, "*axes state"], log_probs: Float[Array, "*axes state"]
) -> Float[Array, ""]:
    """Mean of -sum_b target_b log q_b, in nats; a state of target 0 adds nothing."""
    terms = jnp.where(target > 0, target * jnp.where(target > 0, log_probs, 0), 0)
    return -jnp.mean(jnp.sum(terms, axis=-1))


@jax.jit
def compose(
    log_probs: Float[Array, "batch position state"], on: EvaluationSet
) -> tuple[Float[Array, " predictor"], Float[Array, ""]]:
    """Composition: convex weights w that minimise KL(model || sum_A w_A p_A), and what remains.

    Expectation-maximisation over late positions, w_A <- mean_x sum_b q(b|x) w_A p_A(b|x) / mix,
    from equal weights until no weight moves by more than 1e-6, or 2,000 times; towards a corner of
    the simplex EM is slow, and weights are then right to a few 1e-3.  Positions at which a
    reference is undefined are left out.
    """
    late = log_probs.shape[1] // 2
    model = jnp.exp(log_probs[:, late:])
    references = jnp.exp(on.references[:, :, late:])
    defined = ~jnp.isnan(references).any(axis=(0, 3))[..., None]
    references = jnp.where(defined, references, 0)
    model = jnp.where(defined, model, 0)
    positions = jnp.maximum(jnp.sum(defined), 1)

    def mix(weights: Array) -> Array:
        return jnp.tensordot(weights, references, 1)

    def update(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        weights, _, iteration = carry
        mixture = mix(weights)
        ratio = jnp.where(mixture > 0, model / jnp.where(mixture > 0, mixture, 1), 0)
        new = weights * jnp.tensordot(references, ratio, 3) / positions
        new = new / jnp.sum(new)
        return new, jnp.max(jnp.abs(new - weights)), iteration + 1

    def unfinished(carry: tuple[Array, Array, Array]) -> Array:
        return (carry[1] > COMPOSITION_TOLERANCE) & (carry[2] < COMPOSITION_ITERATIONS)

    count = references.shape[0]
    start = (jnp.full(count, 1 / count), jnp.float32(jnp.inf), jnp.int32(0))
    weights = jax.lax.while_loop(unfinished, update, start)[0]
    remaining = jnp.where(
        defined[..., 0], kl_divergence(log_probs[:, late:], jnp.log(mix(weights))), 0
    )
    return weights, jnp.sum(remaining) / positions


def phase_name(nearest: int) -> str:
    """Phase of the nearest reference's index among `PREDICTORS`; -1 is no phase."""
    return NO_PHASE if nearest < 0 else PHASES[nearest]


def successive_phases(curves: xr.Dataset) -> tuple[list[str], list[int]]:
    """The phases that a cell goes through, without repeats, and the step at which each begins.

    Only clear labels count, so that a label that flickers within its error starts no phase.
    """
    phases: list[str] = []
    steps: list[int] = []
    for step, phase, clear in zip(
        curves.step.values, curves.phase.values, curves.clear.values, strict=True
    ):
        if clear and phase != NO_PHASE and (not phases or phases[-1] != phase):
            phases.append(str(phase))
            steps.append(int(step))
    return phases, steps


BEYOND: dict[str, Callable[[list[str]], bool]] = {
    "K1*": lambda phases: "G2" in phases,
    "K2*": lambda phases: phases[-1] != "M2",
}
"""Whether successive phases, at least one, are those of a cell beyond a threshold."""


@dataclass(frozen=True)
class PhaseMap:
    """Phases over data diversity K and training, with the two thresholds."""

    cells: list[dict[str, Any]]
    """For each cell: `chains`, `seed`, `phases` (successive, no repeats), `steps` (where each
    begins), `final_step` and `outcome`; sorted by K, then seed."""

    @classmethod
    def from_curves(cls, curves: Iterable[xr.Dataset]) -> PhaseMap:
        """Build the map from the saved curves of cells."""
        cells = []
        for cell in curves:
            phases, steps = successive_phases(cell)
            cells.append(
                {
                    "chains": cell.attrs["chains"]
                    if cell.attrs["chains"] == "infinite"
                    else int(cell.attrs["chains"]),
                    "seed": int(cell.attrs["seed"]),
                    "phases": phases,
                    "steps": steps,
                    "final_step": int(cell.step.values[-1]),
                    "outcome": cell.attrs["outcome"],
                }
            )
        return cls(sorted(cells, key=lambda cell: (float_diversity(cell["chains"]), cell["seed"])))

    @property
    def thresholds(self) -> dict[str, dict[str, Any]]:
        """Brackets [low, high] of K1* and K2*, in number of chains.

        K1*: where G2 begins to be visited on the way.  K2*: where the run no longer ends in M2;
        since a cell may still switch after the last step, it is a lower bound at that many steps.
        Cells that are unfinished or diverged do not say where they would have ended and are left
        out.  A bracket's end is null where no cell of the sweep lies on that side.  Over seeds, the
        bracket spans those of all seeds.
        """
        return {
            "K1*": self._bracket(
                "K1*", "G2 is never visited at K = low and is visited at K = high"
            ),
            "K2*": self._bracket(
                "K2*",
                "training ends in M2 at K = low and not at K = high; "
                "longer training can only raise it",
            ),
        }

    def outcomes(self, threshold: str, seed: int) -> list[tuple[int | str, bool]]:
        """K, and whether the cell is beyond a threshold, of one seed's finished cells, by K."""
        return [
            (cell["chains"], BEYOND[threshold](cell["phases"]))
            for cell in self.cells
            if cell["seed"] == seed and cell["phases"] and cell["outcome"] == "finished"
        ]

    def _bracket(self, threshold: str, note: str) -> dict[str, Any]:
        per_seed = []
        for seed in sorted({cell["seed"] for cell in self.cells}):
            row = self.outcomes(threshold, seed)
            if not row:
                continue
            # Where the outcome is not monotone in K the bracket spans the whole mixed stretch.
            first_beyond = next((i for i, (_, past) in enumerate(row) if past), len(row))
            last_below = max((i for i, (_, past) in enumerate(row) if not past), default=-1)
            low = row[first_beyond - 1][0] if first_beyond else None
            high = row[last_below + 1][0] if last_below + 1 < len(row) else None
            per_seed.append({"seed": seed, "low": low, "high": high})
        lows = [entry["low"] for entry in per_seed]
        highs = [entry["high"] for entry in per_seed]
        known = per_seed and any(end is not None for end in lows + highs)
        low = None if None in lows else min(lows, key=float_diversity, default=None)
        high = None if None in highs else max(highs, key=float_diversity, default=None)
        return {"bracket": [low, high] if known else None, "per_seed": per_seed, "note": note}


def float_diversity(chains: int | str) -> float:
    """K as a number that sorts; "infinite" is the largest."""
    return float("inf") if chains == "infinite" else float(chains)

"""The reference predictors: what a context says about the next state, by four exact rules.

A predictor takes states (batch, position) and returns, for every position n, log-probabilities of
the next state given x_0..x_n.  Generalising predictors know only the chain prior, memorising ones
the chain set; each uses p-point statistics, the counts of words of p successive states:

    1-Gen   (c_b + a1_b) / (n + 1 + sum_b a1_b)
    2-Gen   (c_ab + alpha_ab) / (c_a. + sum_b alpha_ab),  a = x_n
    1-Mem   sum_k w_k T_k[x_n],   w_k ~ weight_k prod_a pi_k(a)^(c_a)
    2-Mem   sum_k w_k T_k[x_n],   w_k ~ weight_k pi_k(x_0) prod_ab T_k(a, b)^(c_ab)

with pseudo-counts a1 and alpha that are the same for all states under the usual prior.  2-Gen is
the Bayes-optimal predictor of fresh chains but for what x_0 says through pi (under some priors it
only approximates that, as `Prior.two_gen` says), and 2-Mem that of the chain set: on sequences of
the set no predictor's expected loss is below its own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Integer

from iclens.chains import ChainSet, Prior

PREDICTORS = ("1-Gen", "2-Gen", "1-Mem", "2-Mem")
"""Names of the references."""

States = Integer[Array, "batch position"] | Integer[np.ndarray, "batch position"]
Predictor = Callable[[States], Float[Array, "batch position state"]]
"""Log-probabilities, in nats, of the next state at every position."""

CHAIN_CHUNK = 512
POSITION_CHUNK = 2048
"""Chains and positions whose likelihoods are in memory at a time, 4 MiB for each array of them."""


def reference_predictors(chains: ChainSet | None, prior: Prior) -> dict[str, Predictor]:
    """The references by name, in the order of `PREDICTORS`; 1-Mem reads out the chain's row.

    `chains` is None for training on ever fresh chains, for which only the two generalising
    references exist.

    Raises `ValueError` if chains and prior differ in their number of states.
    """
    one_point = prior.one_point_pseudo_counts
    predictors = {
        "1-Gen": uniform(prior.states)
        if np.isinf(one_point).all()
        else generalising(prior.states, points=1, pseudo_count=one_point),
        "2-Gen": generalising(
            prior.states, points=2, pseudo_count=prior.pseudo_counts, successors=prior.successors
        ),
    }
    if chains is not None:
        if chains.states != prior.states:
            raise ValueError(
                f"reference predictors: expected chains of {prior.states} states, as the prior "
                f"has, got {chains.states}"
            )
        predictors["1-Mem"] = memorising(chains, points=1)
        predictors["2-Mem"] = memorising(chains, points=2)
    return predictors


def uniform(states: int) -> Predictor:
    """The uniform distribution over C = `states` states, whatever the context."""

    def predict(context: States) -> Float[Array, "batch position state"]:
        context = check_states(context, states)
        return jnp.full((*context.shape, states), -np.log(states), jnp.float32)

    return predict


def generalising(
    states: int,
    *,
    points: Literal[1, 2],
    pseudo_count: float | Float[np.ndarray, " state"] | Float[np.ndarray, "state state"],
    successors: int | None = None,
) -> Predictor:
    """Posterior mean of a distribution over C = `states` states under a Dirichlet prior.

    From one-point statistics the distribution is the stationary law, from two-point statistics the
    row of the current state.  `pseudo_count` is the concentration of the prior, one for each state
    (state,) if need be, or with two-point statistics one for each pair (state, state).

    Where only some states can follow a state, any `successors` of them with equal chance, those
    not seen yet have (s - o) / (C - o) of their pseudo-count, o being the number of those seen; a
    context with more has NaN, for the posterior does not exist.

    Raises `ValueError` for an unknown `points`, a `pseudo_count` of another shape or with what is
    not a positive number, or `successors` that are not 1 to C.  The predictor raises `ValueError`,
    naming the place, for a state outside [0, C).
    """
    _check_points(points)
    if wrong := [x for x in np.ravel(pseudo_count).tolist() if not 0 < x < float("inf")]:
        raise ValueError(f"pseudo-count: expected a positive number, got {wrong[0]}")
    if np.shape(pseudo_count) not in [(), (states,), (states, states)][: points + 1]:
        raise ValueError(
            f"pseudo-count: expected one, or one for each of {states} states, got shape "
            f"{np.shape(pseudo_count)}"
        )
    if not 1 <= (few := successors or states) <= states:
        raise ValueError(f"successors: expected 1 to {states}, got {successors}")
    table = jnp.asarray(np.broadcast_to(pseudo_count, (states ** (points - 1), states)), "float32")

    def predict(context: States) -> Float[Array, "batch position state"]:
        context = check_states(context, states)
        log_probs: Array = _generalise(context, table, states, points, few)
        return log_probs

    return predict


def memorising(
    chains: ChainSet, *, points: Literal[1, 2], readout: Literal["row", "stationary"] = "row"
) -> Predictor:
    """Posterior over a chain set from p-point statistics, and the mean prediction of its chains.

    A chain predicts by its row of the current state, or by its stationary law if `readout` says
    so.  A chain that cannot produce the context has weight 0, exactly.  Where no chain of the set
    can, the log-probabilities are NaN: the posterior does not exist, and uniform would be wrong.
    Computed in float32: predicted probabilities below 1e-38 are 0, and their logarithm -inf.
    Memory is bounded whatever the number of chains.

    Raises `ValueError` for an unknown `points` or `readout`.  The predictor raises `ValueError`,
    naming the place, for a state outside [0, C).
    """
    _check_points(points)
    if readout not in ("row", "stationary"):
        raise ValueError(f"readout: expected 'row' or 'stationary', got {readout!r}")
    tables = _tables(chains, points, readout)

    def predict(context: States) -> Float[Array, "batch position state"]:
        context = check_states(context, chains.states)
        log_probs: Array = _memorise(
            context, tables, chains.states, points, readout, POSITION_CHUNK
        )
        return log_probs

    return predict


def _check_points(points: int) -> None:
    if points not in (1, 2):
        raise ValueError(f"points: expected 1 or 2, got {points}")


def check_states(states: Any, count: int) -> Int[Array, "batch position"]:
    """States (batch, position) as int32, whatever integers they come as.

    Raises `ValueError` if they are no integers of that shape or, naming the place, if one is
    outside [0, count); of traced states there are no values to look at.
    """
    array = states if isinstance(states, jax.Array) else np.asarray(states)
    if array.ndim != 2 or 0 in array.shape or not jnp.issubdtype(array.dtype, jnp.integer):
        raise ValueError(
            "states: expected integers (batch, position), at least one of each, "
            f"got {array.dtype} of shape {array.shape}"
        )
    if not isinstance(array, jax.core.Tracer):
        values = np.asarray(array)
        if (wrong := (values < 0) | (values >= count)).any():
            sequence, position = np.argwhere(wrong)[0].tolist()
            raise ValueError(
                f"state at position {position} of sequence {sequence}: expected 0 to {count - 1}, "
                f"got {values[sequence, position]}"
            )
    return jnp.asarray(array, jnp.int32)


def _words(context: Array, states: int, length: int) -> Array:
    """The word of `length` successive states that ends at each position, as a number in base C.

    At the first positions, where it would begin before x_0, it is -1.
    """
    batch, positions = context.shape
    word = jnp.zeros((batch, positions), context.dtype)
    for back in reversed(range(length)):
        earlier = jnp.pad(context, ((0, 0), (back, 0)), constant_values=-1)[:, :positions]
        word = jnp.where((word < 0) | (earlier < 0), -1, word * states + earlier)
    return word


def _counts(context: Array, states: int, length: int) -> Array:
    """How often each word of `length` states occurs in x_0..x_n: (batch, position, word)."""
    words = _words(context, states, length)
    return jnp.cumsum(jax.nn.one_hot(words, states**length, dtype=jnp.float32), axis=1)


@partial(jax.jit, static_argnames=("states", "points", "successors"))
def _generalise(
    context: Array, pseudo_counts: Array, states: int, points: int, successors: int
) -> Array:
    counts = _counts(context, states, points).reshape(*context.shape, -1, states)
    preceding = _words(context, states, points - 1)
    counts = jnp.take_along_axis(counts, preceding[..., None, None], axis=2)[:, :, 0]
    pseudo = pseudo_counts[preceding]
    if successors < states:
        seen = jnp.sum(counts > 0, axis=-1, keepdims=True)
        share = jnp.where(seen > successors, jnp.nan, (successors - seen) / (states - seen))
        pseudo = jnp.where((counts > 0) & (seen <= successors), pseudo, share * pseudo)
    counts = counts + pseudo
    return jnp.log(counts) - jnp.log(jnp.sum(counts, axis=-1, keepdims=True))


class _Tables(eqx.Module):
    """A chain set as a predictor needs it, in groups of chains."""

    log_start: Float[Array, "group chain start"]
    """Logarithm of weight times probability of the first p - 1 states."""
    log_step: Float[Array, "group word chain"]
    """Logarithm of the probability of the last state of a word of p given the others; 0 for -inf"""
    impossible: Float[Array, "group word chain"] | None
    """1 where the probability is 0, unless it is so nowhere."""
    prediction: Float[Array, "group chain outcome"]
    """Probabilities of the next state given each word that is read out."""


def _tables(chains: ChainSet, points: int, readout: str) -> _Tables:
    count = chains.count
    size = min(CHAIN_CHUNK, count)
    padding = -count % size

    def grouped(values: np.ndarray, fill: float = 0.0) -> np.ndarray:
        flat = values.reshape(count, -1).astype(np.float32)
        flat = np.pad(flat, ((0, padding), (0, 0)), constant_values=fill)
        return flat.reshape(-1, size, flat.shape[1])

    with np.errstate(divide="ignore"):  # log 0 = -inf is meant
        log_start = np.log(chains.weights)[:, None]
        if points == 1:
            log_step = np.log(chains.stationary)
        else:
            log_start = log_start + np.log(chains.stationary)
            log_step = np.log(chains.transition)
    impossible = np.isneginf(log_step)
    log_step = np.where(impossible, 0, log_step)

    def by_word(values: np.ndarray) -> Array:
        return jnp.asarray(np.ascontiguousarray(grouped(values).swapaxes(1, 2)))

    return _Tables(
        log_start=jnp.asarray(grouped(log_start, -np.inf)),
        log_step=by_word(log_step),
        impossible=by_word(impossible) if impossible.any() else None,
        prediction=jnp.asarray(
            grouped(chains.transition if readout == "row" else chains.stationary)
        ),
    )


@partial(jax.jit, static_argnames=("states", "points", "readout", "chunk"))
def _memorise(
    context: Array, tables: _Tables, states: int, points: int, readout: str, chunk: int
) -> Array:
    batch, positions = context.shape
    size = min(batch, max(1, chunk // positions))
    padded = jnp.pad(context, ((0, -batch % size), (0, 0)))
    predict = partial(_memorise_chunk, tables=tables, states=states, points=points, readout=readout)
    log_probs: Array = jax.lax.map(predict, padded.reshape(-1, size, positions))
    return log_probs.reshape(-1, positions, states)[:batch]


def _memorise_chunk(
    context: Array, tables: _Tables, states: int, points: int, readout: str
) -> Array:
    """A few sequences against all groups of chains, by a running log-sum-exp over the groups."""
    batch, positions = context.shape
    counts = _counts(context, states, points).reshape(batch * positions, -1)
    first = _words(context[:, : max(1, points - 1)], states, points - 1)[:, -1]
    product = partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)

    def add(carry: tuple[Array, Array], group: _Tables) -> tuple[tuple[Array, Array], None]:
        largest, outcomes = carry
        # log w_k = log weight_k + log P(start) + sum over words of count * log P(last | others)
        log_weight = product(counts, group.log_step).reshape(batch, positions, -1)
        log_weight = log_weight + group.log_start[:, first].T[:, None]
        log_weight = log_weight.reshape(batch * positions, -1)
        if group.impossible is not None:
            log_weight = jnp.where(product(counts, group.impossible) > 0, -jnp.inf, log_weight)
        new = jnp.maximum(largest, jnp.max(log_weight, axis=1))
        # As long as no chain is possible, everything stays 0 and nothing is subtracted from -inf.
        reference = jnp.where(new == -jnp.inf, 0, new)
        weight = jnp.exp(log_weight - reference[:, None])
        outcomes = outcomes * jnp.exp(largest - reference)[:, None]
        return (new, outcomes + product(weight, group.prediction)), None

    start = (
        jnp.full(batch * positions, -jnp.inf),
        jnp.zeros((batch * positions, tables.prediction.shape[-1])),
    )
    outcomes = jax.lax.scan(add, start, tables)[0][1]
    outcomes = outcomes.reshape(batch, positions, -1, states)
    given = _words(context, states, 1 if readout == "row" else 0)[..., None, None]
    probability = jnp.take_along_axis(outcomes, given, axis=2)[:, :, 0]
    total = jnp.sum(probability, axis=-1, keepdims=True)
    return jnp.where(total > 0, jnp.log(probability) - jnp.log(total), jnp.nan)

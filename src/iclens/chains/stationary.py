"""Transition matrices that are valid, and their stationary laws."""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Float
from numpy.typing import ArrayLike

ROW_TOLERANCE = 1e-6
"""By how much a row may miss 1 (it is then divided by its sum, in float64)."""


def stationary_distribution(transition: ArrayLike) -> Float[np.ndarray, "*chain state"]:
    """Stationary law of one chain (state, state) or of several (chain, state, state), in float64.

    By state reduction without subtractions (Grassmann, Taksar and Heyman, 1985), so that every
    probability is accurate relative to itself, however small.

    Raises `ValueError` as `ChainSet` does.
    """
    matrices = np.asarray(transition)
    laws = stationary_laws(validated(matrices[None] if matrices.ndim == 2 else matrices))
    return laws.reshape(matrices.shape[:-1])


def validated(transition: ArrayLike) -> np.ndarray:
    """Transition matrices in float64 with rows that sum to 1, or an error that names the place."""
    matrices: np.ndarray = np.asarray(transition, dtype=np.float64)
    if matrices.ndim != 3 or matrices.shape[1] != matrices.shape[2]:
        raise ValueError(
            f"transition matrices: expected shape (chain, state, state), got {matrices.shape}"
        )
    if matrices.shape[0] < 1 or matrices.shape[1] < 2:
        raise ValueError(
            "transition matrices: expected at least 1 chain and 2 states, "
            f"got shape {matrices.shape}"
        )
    if (wrong := ~np.isfinite(matrices) | (matrices < 0)).any():
        chain, row, column = np.argwhere(wrong)[0].tolist()
        raise ValueError(
            f"row {row} of chain {chain}: expected a probability at column {column}, "
            f"got {matrices[chain, row, column]}"
        )
    sums = matrices.sum(axis=-1)
    if (wrong := np.abs(sums - 1) > ROW_TOLERANCE).any():
        chain, row = np.argwhere(wrong)[0].tolist()
        raise ValueError(
            f"row {row} of chain {chain} sums to {sums[chain, row]:.8g}, expected 1 within "
            f"{ROW_TOLERANCE:g}"
        )
    return matrices / sums[..., None]


def stationary_laws(transition: np.ndarray) -> np.ndarray:
    """Stationary laws of valid chains, each of which must have only one."""
    count, states, _ = transition.shape
    order = np.broadcast_to(np.arange(states), (count, states)).copy()
    some = np.flatnonzero((transition == 0).any(axis=(1, 2)))
    reach: np.ndarray = reachable(transition[some] > 0, np)
    # A stationary law is unique if and only if some state is reachable from all.
    everywhere = np.asarray(reach.all(axis=1))
    if (several := ~everywhere.any(axis=1)).any():
        graph = reach[several.argmax()]
        recurrent = np.flatnonzero((~graph | graph.T).all(axis=1))
        first = recurrent[0]
        second = recurrent[~graph[first, recurrent]][0]
        raise ValueError(
            f"chain {some[several.argmax()]}: states {first} and {second} lie in different closed "
            "classes, expected one closed class (a unique stationary law)"
        )
    # The reduction below ends in its first state, which therefore must not be transient.
    root = everywhere.argmax(axis=1)
    order[some, root], order[some, 0] = 0, root
    chain = np.arange(count)[:, None]
    with np.errstate(divide="ignore"):
        log_transition = np.log(transition[chain[..., None], order[..., None], order[:, None]])
    stationary = np.empty((count, states))
    stationary[chain, order] = np.exp(log_stationary(log_transition, np))
    return stationary


def reachable(possible: Any, xp: Any) -> Any:
    """Which states lead to which, in any number of steps, for arrays of `xp`."""
    states = possible.shape[-1]
    reach = possible | xp.eye(states, dtype=bool)
    for _ in range((states - 1).bit_length()):  # paths of up to 1, 2, 4, ... steps
        reach = xp.matmul(reach, reach)
    return reach


def log_stationary(log_transition: Any, xp: Any) -> Any:
    """Logarithm of the stationary law, for arrays of `xp`, numpy or jax.numpy.

    Removes the last state n again and again, T_ab <- T_ab + T_an T_nb / sum_(c<n) T_nc, which
    leaves the chain watched only while it is in the others; then pi_n = sum_a pi_a T_an / sum.
    In logarithms, since the rows of small concentrations span more than a float's range.
    """

    def log_sum(terms: Any) -> Any:
        largest = xp.maximum(xp.max(terms, axis=-1, keepdims=True), xp.finfo(terms.dtype).min)
        return largest + xp.log(xp.sum(xp.exp(terms - largest), axis=-1, keepdims=True))

    with np.errstate(divide="ignore"):  # log 0 = -inf is meant
        inflows = []
        while log_transition.shape[-1] > 1:
            outflow = log_transition[..., -1, :-1]
            inflow = log_transition[..., :-1, -1] - log_sum(outflow)
            inflows.append(inflow)
            log_transition = xp.logaddexp(
                log_transition[..., :-1, :-1], inflow[..., :, None] + outflow[..., None, :]
            )
        log_law = xp.zeros_like(log_transition[..., 0])
        for inflow in reversed(inflows):
            log_law = xp.concatenate([log_law, log_sum(log_law + inflow)], axis=-1)
        return log_law - log_sum(log_law)

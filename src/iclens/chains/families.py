"""Single chains with closed forms."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from iclens.chains.sets import ChainSet
from iclens.chains.stationary import ROW_TOLERANCE


def two_state(p: float, q: float) -> ChainSet:
    """The chain that leaves state 0 with probability p and state 1 with q; pi = (q, p) / (p + q).

    Raises `ValueError` if p or q is outside [0, 1], or both are 0.
    """
    return birth_death([p], [q])


def birth_death(up: ArrayLike, down: ArrayLike) -> ChainSet:
    """The chain on 0..C-1 that moves by one step or stays.

    `up[a]` = P(a -> a+1) and `down[a]` = P(a+1 -> a), C - 1 of each.  By detailed balance
    pi_(a+1) / pi_a = up[a] / down[a].

    Raises `ValueError`, naming the state, if the lengths differ or are 0, or if the moves out of a
    state are not probabilities.
    """
    rise, fall = np.asarray(up, dtype=np.float64), np.asarray(down, dtype=np.float64)
    if rise.ndim != 1 or rise.shape != fall.shape or not len(rise):
        raise ValueError(
            "birth-death chain: expected up and down of one length of at least 1, "
            f"got shapes {rise.shape} and {fall.shape}"
        )
    transition = np.diag(rise, 1) + np.diag(fall, -1)
    for state, leave in enumerate(transition.sum(axis=1)):
        if not 0 <= leave <= 1 + ROW_TOLERANCE:
            raise ValueError(
                f"birth-death chain: state {state} is left with probability {leave}, "
                "expected 0 to 1"
            )
        transition[state, state] = max(0.0, 1 - leave)
    return ChainSet(transition[None])


def doubly_stochastic(permutations: ArrayLike, weights: ArrayLike) -> ChainSet:
    """The chain that applies permutation i with probability weights[i]; pi is uniform.

    `permutations[i, a]` is the state that follows a, shape (permutation, state).  Every doubly
    stochastic matrix is of this form (Birkhoff's theorem).

    Raises `ValueError` if a row is no permutation, or if the weights are not its probabilities.
    """
    following, weight = np.asarray(permutations), np.asarray(weights, dtype=np.float64)
    if following.ndim != 2 or weight.shape != following.shape[:1]:
        raise ValueError(
            "doubly stochastic chain: expected permutations (permutation, state) and one weight "
            f"each, got shapes {following.shape} and {weight.shape}"
        )
    states = np.arange(following.shape[1])
    for number, row in enumerate(following):
        if not np.array_equal(np.sort(row), states):
            raise ValueError(
                f"doubly stochastic chain: expected row {number} to be a permutation of "
                f"0 to {len(states) - 1}, got {row.tolist()}"
            )
    return ChainSet(np.tensordot(weight, following[..., None] == states, 1)[None])


def cyclic(states: int) -> ChainSet:
    """The chain 0 -> 1 -> ... -> C-1 -> 0, of period C; pi is uniform.

    Raises `ValueError` for fewer than two states.
    """
    return doubly_stochastic([np.roll(np.arange(states), -1)], [1.0])

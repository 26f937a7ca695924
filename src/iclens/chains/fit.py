"""Fits of Dirichlet laws to rows of transition matrices."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float
from scipy.special import digamma, polygamma

TOLERANCE = 1e-10
"""Relative change of pseudo-counts at which the fixed point is reached."""
ITERATIONS = 20_000
LARGEST = 1e6
"""Total of pseudo-counts of a row above which the chains count as the same in it."""


def fit_dirichlet(
    transition: Float[np.ndarray, "chain state state"],
) -> Float[np.ndarray, "state state"]:
    """Pseudo-counts of the Dirichlet law of each row that make the rows of chains most likely.

    The fixed point psi(alpha_b) = psi(sum_c alpha_c) + mean log T[a, b] of Minka, *Estimating a
    Dirichlet distribution* (2000).

    Raises `ValueError`, naming the place, for fewer than two chains, a probability of 0, and a row
    that is nearly the same in all chains.
    """
    if len(transition) < 2:
        raise ValueError(f"to fit a prior: expected at least 2 chains, got {len(transition)}")
    if (transition == 0).any():
        chain, row, column = np.argwhere(transition == 0)[0].tolist()
        raise ValueError(
            f"to fit a prior: expected positive probabilities, got 0 at row {row}, column {column} "
            f"of chain {chain}"
        )
    log_mean = np.log(transition).mean(0)
    mean = transition.mean(0)
    # The start: the total whose variances are, in sum, those of the rows.
    spread = np.maximum(transition.var(0).sum(-1), 1e-300)
    total = np.maximum((mean * (1 - mean)).sum(-1) / spread - 1, 1e-2)
    alpha = mean * total[:, None]
    for _ in range(ITERATIONS):
        before = alpha
        alpha = _inverse_digamma(digamma(alpha.sum(-1, keepdims=True)) + log_mean)
        if (wrong := alpha.sum(-1) > LARGEST).any():
            raise ValueError(
                f"to fit a prior: row {int(wrong.argmax())} is nearly the same in all "
                f"{len(transition)} chains, expected rows that differ"
            )
        if np.abs(alpha - before).max() < TOLERANCE * alpha.max():
            return alpha
    raise ValueError(
        f"to fit a prior: the pseudo-counts are not found in {ITERATIONS} rounds; row "
        f"{int(alpha.sum(-1).argmax())} is nearly the same in all {len(transition)} chains"
    )


def _inverse_digamma(value: np.ndarray) -> np.ndarray:
    """x with psi(x) = value, by Newton's method from Minka's start (his appendix C)."""
    found = np.where(value >= -2.22, np.exp(value) + 0.5, -1 / (value - digamma(1.0)))
    for _ in range(6):
        found = found - (digamma(found) - value) / polygamma(1, found)
    return found

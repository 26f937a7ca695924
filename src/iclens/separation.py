"""How well groups of vectors are told apart; for task vectors by chain, wherever they come from."""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float, Int


def effective_dimension(vectors: Float[np.ndarray, "sample width"]) -> float:
    """(sum l)^2 / sum l^2 over the eigenvalues l of the covariance: from 1 to the width."""
    eigenvalues = np.clip(np.linalg.eigvalsh(np.atleast_2d(np.cov(vectors.T))), 0, None)
    return float(eigenvalues.sum() ** 2 / max((eigenvalues**2).sum(), 1e-300))


def linear_readout(
    vectors: Float[np.ndarray, "sample width"],
    group: Int[np.ndarray, " sample"],
    fit: Bool[np.ndarray, " sample"],
    held: Bool[np.ndarray, " sample"],
) -> float:
    """Accuracy on `held` of linear discriminant analysis on `fit`, the groups of one covariance.

    Groups are numbered from 0, and each has samples in `fit`.
    """
    classes = np.unique(group)
    means = np.stack([vectors[fit & (group == index)].mean(0) for index in classes])
    within = vectors[fit] - means[group[fit]]
    covariance = within.T @ within / fit.sum()
    covariance += 1e-6 * np.trace(covariance) / len(covariance) * np.eye(len(covariance))
    weights = np.linalg.solve(covariance, means.T)
    scores = vectors[held] @ weights - 0.5 * (means.T * weights).sum(0)
    return float((scores.argmax(1) == group[held]).mean())

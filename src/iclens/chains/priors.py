"""The distributions that chains are drawn from."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from iclens.chains.sampling import check_size, walk
from iclens.chains.sets import ChainSet
from iclens.chains.stationary import log_stationary

CONCENTRATION_ENTRIES = 2**20
"""Matrix entries in the chains drawn to estimate `ChainPrior.one_point_concentration`."""


class ChainPrior(eqx.Module):
    """The distribution that chains are drawn from: rows i.i.d. Dirichlet(alpha, ..., alpha).

    Raises `ValueError` for fewer than two states or a concentration that is not a positive number.
    """

    states: int = eqx.field(static=True)
    """Number C of states."""
    concentration: float = eqx.field(static=True, default=1.0)
    """Concentration alpha; at 1 a row is uniform on the simplex."""

    def __check_init__(self) -> None:
        if self.states < 2:
            raise ValueError(f"chain prior: expected at least 2 states, got {self.states}")
        if not 0 < self.concentration < float("inf"):
            raise ValueError(
                "chain prior: expected a positive number as the concentration, "
                f"got {self.concentration}"
            )

    def sample(self, key: PRNGKeyArray, count: int) -> ChainSet:
        """Draw a set of `count` chains of equal weight, in float64.

        An entry below 2.2e-308, as tiny concentrations give, is raised to that: it is positive
        under the prior, and the stationary law stays unique.

        Raises `ValueError` if `count` is below 1.
        """
        if count < 1:
            raise ValueError(f"chain prior: expected at least 1 chain to draw, got {count}")
        return ChainSet(np.maximum(np.exp(self._log_rows(key, count)), np.finfo(float).tiny))

    def draw(
        self, key: PRNGKeyArray, sequences: int, length: int
    ) -> tuple[Int[Array, "sequence position"], Float[Array, "sequence state state"]]:
        """Draw a fresh chain for each sequence: the sequences, and the transition matrix of each.

        In float32, also inside compiled functions.  Raises `ValueError` if `sequences` or `length`
        is below 1.
        """
        check_size(sequences, length)
        rows_key, walk_key = jax.random.split(key)
        shape = (sequences, self.states, self.states)
        log_rows = _log_dirichlet(rows_key, self.concentration, shape, "float32")
        initial = jnp.exp(log_stationary(log_rows, jnp))
        transition = jnp.exp(log_rows)
        return walk(walk_key, initial, transition, length), transition

    @property
    def one_point_concentration(self) -> float:
        """The pseudo-count a1 of 1-Gen.

        It is the concentration of the Dirichlet law whose variance is that of stationary
        probabilities under this prior, a1 = ((1/C)(1 - 1/C) / Var(pi_a) - 1) / C, from one large
        draw of a fixed key (standard error below 1 %).
        """
        return _one_point_concentration(self)

    def _log_rows(self, key: PRNGKeyArray, count: int) -> np.ndarray:
        with jax.enable_x64(True):
            shape = (count, self.states, self.states)
            return np.asarray(_log_dirichlet(key, self.concentration, shape, "float64"))


@cache
def _one_point_concentration(prior: ChainPrior) -> float:
    count = CONCENTRATION_ENTRIES // prior.states**2 + 2**10
    log_rows = prior._log_rows(jax.random.key(0), count)
    mean = 1 / prior.states
    variance = np.mean((np.exp(log_stationary(log_rows, np)) - mean) ** 2)
    return float((mean * (1 - mean) / variance - 1) / prior.states)


@partial(jax.jit, static_argnums=(1, 2, 3))
def _log_dirichlet(key: Any, concentration: float, shape: tuple[int, ...], dtype: str) -> Array:
    """Logarithm of symmetric Dirichlet rows: gamma variates divided by their sum."""
    if concentration == 1:  # exponential variates, ten times faster
        log_gamma = -jax.random.gumbel(key, shape, dtype)
    else:
        log_gamma = jax.random.loggamma(key, concentration, shape, dtype)
    return jax.nn.log_softmax(log_gamma)

"""Priors of chains with structure: few successors, or a uniform stationary law."""

from __future__ import annotations

from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from iclens.chains.priors import (
    Prior,
    check_prior,
    log_dirichlet,
    log_gamma,
    symmetric_concentration,
)
from iclens.chains.stationary import log_stationary, reachable


class SparsePrior(Prior):
    """Each state has s successors, any of C (itself too) with equal chance; Dirichlet on them.

    Rows are independent, but for this: a chain with several closed classes of states is drawn again
    (3 in 1000 at most, at C = 4 and 5 with s = 2).  Then, of a row of which the states O were seen
    with counts c, n in all, its successors are any s states that have O among them, with equal
    chance, for the likelihood of the counts is the same for all of them, and the mean row is

        (c_b + alpha) / (n + s alpha)                        for b in O
        (s - |O|) / (C - |O|) alpha / (n + s alpha)          for others

    Raises `ValueError` for fewer than 2 successors or more than states, and as `ChainPrior` does.
    """

    states: int = eqx.field(static=True)
    """Number C of states."""
    successors: int = eqx.field(static=True, default=2)
    """Number s of successors of a state."""
    concentration: float = eqx.field(static=True, default=1.0)
    """Concentration alpha on the successors."""

    def __check_init__(self) -> None:
        check_prior(self.states, self.concentration)
        if not 2 <= self.successors <= self.states:
            raise ValueError(
                f"sparse prior: expected 2 to {self.states} successors, got {self.successors}"
            )

    @property
    def two_gen(self) -> str:
        return (
            f"states of fresh chains have {self.successors} of {self.states} successors, rows "
            f"Dirichlet({self.concentration:g}, ...) on them; 2-Gen is exact but for the few "
            "chains in 1000 that are drawn again for having two closed classes"
        )

    @property
    def pseudo_counts(self) -> Float[np.ndarray, "state state"]:
        return np.full((self.states, self.states), self.concentration)

    @property
    def one_point_pseudo_counts(self) -> Float[np.ndarray, " state"]:
        return np.full(self.states, symmetric_concentration(self))

    def _log_matrices(self, key: PRNGKeyArray, count: int, dtype: str) -> Array:
        shape = (count, self.states, self.states)
        return _log_sparse(key, self.concentration, self.successors, shape, dtype)

    def _log_law(self, log_transition: Any, xp: Any) -> Any:
        """As for others, from a state that can be reached from all: some may be transient."""
        states = self.states
        root = reachable(log_transition > -xp.inf, xp).all(axis=-2).argmax(axis=-1)[..., None]
        place = xp.arange(states)
        # The first state and the root change places.
        order = xp.where(place == 0, root, xp.where(place == root, 0, place))
        rows = xp.take_along_axis(log_transition, order[..., :, None], axis=-2)
        law = log_stationary(xp.take_along_axis(rows, order[..., None, :], axis=-1), xp)
        return xp.take_along_axis(law, order, axis=-1)


@partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _log_sparse(
    key: Any, concentration: float, successors: int, shape: tuple[int, int, int], dtype: str
) -> Array:
    def attempt(number: Array) -> Array:
        which, weights = jax.random.split(jax.random.fold_in(key, number))
        order = jnp.argsort(jax.random.uniform(which, shape, dtype), axis=-1)
        chosen = jnp.argsort(order, axis=-1) < successors
        drawn = log_gamma(weights, concentration, shape, dtype)
        return jax.nn.log_softmax(jnp.where(chosen, drawn, -jnp.inf))

    def wanting(rows: Array) -> Array:
        return ~reachable(rows > -jnp.inf, jnp).all(axis=-2).any(axis=-1)

    def again(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        number, rows = carry
        fresh = attempt(number)
        return number + 1, jnp.where(wanting(rows)[:, None, None], fresh, rows)

    start = jnp.uint32(1), attempt(jnp.uint32(0))
    return jax.lax.while_loop(lambda carry: wanting(carry[1]).any(), again, start)[1]


class DoublyStochasticPrior(Prior):
    """Mixtures of R random permutations with Dirichlet weights: pi is uniform for every chain.

    The first permutation is a cycle through all states, so that there is one closed class.  1-Gen
    is the uniform distribution.  The posterior mean of a row has no closed form: 2-Gen has the
    pseudo-counts A m_ab of the Dirichlet law with the mean m and, in sum, the variances of a row;
    at C = 4, R = 3 it is 0.10 nats (KL) from the mean, on average over contexts of 8 states.

    Raises `ValueError` for fewer than 2 permutations, and as `ChainPrior` does.
    """

    states: int = eqx.field(static=True)
    """Number C of states."""
    permutations: int = eqx.field(static=True, default=3)
    """Number R of permutations."""
    concentration: float = eqx.field(static=True, default=1.0)
    """Concentration alpha of their weights."""

    def __check_init__(self) -> None:
        check_prior(self.states, self.concentration)
        if self.permutations < 2:
            raise ValueError(
                "doubly stochastic prior: expected at least 2 permutations, "
                f"got {self.permutations}"
            )

    @property
    def two_gen(self) -> str:
        return (
            f"fresh chains are mixtures of {self.permutations} random permutations; 2-Gen only "
            "approximates: it has pseudo-counts of the mean and variance of a row. 1-Gen is exact, "
            "the uniform law"
        )

    @property
    def pseudo_counts(self) -> Float[np.ndarray, "state state"]:
        """A m_ab by moments: with weights w_i and Q_i = P(permutation i takes a to b),

        m = sum_i Q_i / R,  E[T^2] = E[w^2] sum_i Q_i + E[w w'] ((sum_i Q_i)^2 - sum_i Q_i^2),
        A + 1 = sum_b m_b (1 - m_b) / sum_b (E[T_ab^2] - m_b^2).
        """
        count, alpha, size = self.permutations, self.concentration, self.states
        cycle = (1 - np.eye(size)) / (size - 1)
        chances = cycle + (count - 1) / size
        squares = cycle**2 + (count - 1) / size**2
        mean = chances / count
        scale = count * (count * alpha + 1)
        second = (alpha + 1) / scale * chances + alpha / scale * (chances**2 - squares)
        total = (mean * (1 - mean)).sum(1) / (second - mean**2).sum(1) - 1
        return total[:, None] * np.maximum(mean, np.finfo(float).tiny)

    @property
    def one_point_pseudo_counts(self) -> Float[np.ndarray, " state"]:
        return np.full(self.states, np.inf)

    def _log_matrices(self, key: PRNGKeyArray, count: int, dtype: str) -> Array:
        shape = (count, self.permutations, self.states)
        return _log_mixture(key, self.concentration, shape, dtype)

    def _log_law(self, log_transition: Any, xp: Any) -> Any:
        return xp.full_like(log_transition[..., 0], -np.log(self.states))


@partial(jax.jit, static_argnums=(1, 2, 3))
def _log_mixture(key: Any, concentration: float, shape: tuple[int, int, int], dtype: str) -> Array:
    which, weigh = jax.random.split(key)
    weights = jnp.exp(log_dirichlet(weigh, concentration, shape[:2], dtype))
    orders = jnp.argsort(jax.random.uniform(which, shape, dtype), axis=-1)
    # The first order is gone through, from each state to the next one in it.
    at = jax.nn.one_hot(orders[:, 0], shape[2], dtype=dtype)
    cycle = jnp.einsum("nja,njb->nab", at, jnp.roll(at, -1, axis=1))
    others = jax.nn.one_hot(orders[:, 1:], shape[2], dtype=dtype)
    mixed = weights[:, :1, None] * cycle + jnp.einsum("ni,niab->nab", weights[:, 1:], others)
    return jnp.log(mixed)

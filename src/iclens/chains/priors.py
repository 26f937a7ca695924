"""The distributions that chains are drawn from: what all have, and those of Dirichlet rows."""

from __future__ import annotations

import abc
from functools import cache, partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray
from numpy.typing import ArrayLike

from iclens.chains.fit import fit_dirichlet
from iclens.chains.sampling import check_size, walk
from iclens.chains.sets import ChainSet
from iclens.chains.stationary import log_stationary

CONCENTRATION_ENTRIES = 2**20
"""Matrix entries in the chains drawn to estimate `ChainPrior.one_point_concentration`."""
MOMENT_ENTRIES = 2**18
"""The same under other priors, whose variates take ten times as long."""


class Prior(eqx.Module):
    """A distribution of chains over C states, and what the generalising references know of it."""

    states: eqx.AbstractVar[int]
    """Number C of states."""

    @property
    @abc.abstractmethod
    def two_gen(self) -> str:
        """A sentence: what fresh chains are, and whether 2-Gen is exact or approximates."""

    @property
    @abc.abstractmethod
    def pseudo_counts(self) -> Float[np.ndarray, "state state"]:
        """The pseudo-counts of 2-Gen, `pseudo_counts[a, b]` of the step from a to b."""

    @property
    def successors(self) -> int:
        """How many states can follow a state; C but for sparse chains."""
        return self.states

    @property
    def one_point_pseudo_counts(self) -> Float[np.ndarray, " state"]:
        """The pseudo-counts of 1-Gen; infinite where every chain has the uniform law.

        A m_b, with the mean m of the stationary law under this prior and the total A of the
        Dirichlet law whose variances are, in sum, those of stationary probabilities,
        A + 1 = sum_b m_b (1 - m_b) / sum_b Var(pi_b), from one large draw of a fixed key (standard
        error below 2 %).
        """
        return _one_point_pseudo_counts(self)

    @abc.abstractmethod
    def _log_matrices(self, key: PRNGKeyArray, count: int, dtype: str) -> Array:
        """Logarithms of transition matrices (chain, state, state), also in compiled functions."""

    def _log_law(self, log_transition: Any, xp: Any) -> Any:
        """Logarithm of the stationary laws, for arrays of `xp`."""
        return log_stationary(log_transition, xp)

    def sample(self, key: PRNGKeyArray, count: int) -> ChainSet:
        """Draw a set of `count` chains of equal weight, in float64.

        A possible entry below 2.2e-308, as tiny concentrations give, is raised to that: it is
        positive under the prior, and the stationary law stays unique.

        Raises `ValueError` if `count` is below 1.
        """
        if count < 1:
            raise ValueError(f"chain prior: expected at least 1 chain to draw, got {count}")
        log_rows = self._log_rows(key, count)
        rows = np.maximum(np.exp(log_rows), np.finfo(float).tiny)
        return ChainSet(np.where(log_rows == -np.inf, 0, rows))

    def draw(
        self, key: PRNGKeyArray, sequences: int, length: int
    ) -> tuple[Int[Array, "sequence position"], Float[Array, "sequence state state"]]:
        """Draw a fresh chain for each sequence: the sequences, and the transition matrix of each.

        In float32, also inside compiled functions.  Raises `ValueError` if `sequences` or `length`
        is below 1.
        """
        check_size(sequences, length)
        rows_key, walk_key = jax.random.split(key)
        log_rows = self._log_matrices(rows_key, sequences, "float32")
        initial = jnp.exp(self._log_law(log_rows, jnp))
        transition = jnp.exp(log_rows)
        return walk(walk_key, initial, transition, length), transition

    def _log_rows(self, key: PRNGKeyArray, count: int) -> np.ndarray:
        with jax.enable_x64(True):
            return np.asarray(self._log_matrices(key, count, "float64"))


class ChainPrior(Prior):
    """The distribution that chains are drawn from: rows i.i.d. Dirichlet(alpha, ..., alpha).

    Raises `ValueError` for fewer than two states or a concentration that is not a positive number.
    """

    states: int = eqx.field(static=True)
    """Number C of states."""
    concentration: float = eqx.field(static=True, default=1.0)
    """Concentration alpha; at 1 a row is uniform on the simplex."""

    def __check_init__(self) -> None:
        check_prior(self.states, self.concentration)

    @property
    def two_gen(self) -> str:
        return (
            f"rows of fresh chains are Dirichlet({self.concentration:g}, ...); 2-Gen is exact: "
            "the mean of the current row given all transitions"
        )

    @property
    def pseudo_counts(self) -> Float[np.ndarray, "state state"]:
        return np.full((self.states, self.states), self.concentration)

    @property
    def one_point_concentration(self) -> float:
        """The pseudo-count a1 of 1-Gen.

        It is the concentration of the Dirichlet law whose variance is that of stationary
        probabilities under this prior, a1 = ((1/C)(1 - 1/C) / Var(pi_a) - 1) / C, from one large
        draw of a fixed key (standard error below 1 %).
        """
        return symmetric_concentration(self, CONCENTRATION_ENTRIES)

    @property
    def one_point_pseudo_counts(self) -> Float[np.ndarray, " state"]:
        return np.full(self.states, self.one_point_concentration)

    def _log_matrices(self, key: PRNGKeyArray, count: int, dtype: str) -> Array:
        shape = (count, self.states, self.states)
        return log_dirichlet(key, self.concentration, shape, dtype)


class DirichletRows(Prior):
    """Independent rows, row a being Dirichlet(alpha_a0, alpha_a1, ...)."""

    states: int = eqx.field(static=True)
    """Number C of states."""
    alpha: tuple[tuple[float, ...], ...] = eqx.field(static=True)
    """Pseudo-counts alpha_ab."""
    kind: str = eqx.field(static=True)
    """What they say, for `two_gen`."""

    def __init__(self, pseudo_counts: ArrayLike, kind: str = "of given pseudo-counts"):
        """Take pseudo-counts (state, state).

        Raises `ValueError` for another shape, fewer than two states, or, naming the place, a
        pseudo-count that is not a positive number.
        """
        alpha = np.asarray(pseudo_counts, dtype=np.float64)
        if alpha.ndim != 2 or alpha.shape[0] != alpha.shape[1] or len(alpha) < 2:
            raise ValueError(
                "chain prior: expected pseudo-counts (state, state) of at least 2 states, "
                f"got shape {alpha.shape}"
            )
        if (wrong := ~np.isfinite(alpha) | (alpha <= 0)).any():
            row, column = np.argwhere(wrong)[0].tolist()
            raise ValueError(
                f"chain prior: expected a positive pseudo-count at row {row}, column {column}, "
                f"got {alpha[row, column]}"
            )
        self.states = len(alpha)
        self.alpha = tuple(map(tuple, alpha.tolist()))
        self.kind = kind

    @classmethod
    def blocks(
        cls, states: int, blocks: int, *, concentration: float = 1.0, outside: float = 0.1
    ) -> DirichletRows:
        """Chains that mostly stay in blocks: contiguous states, as equal in number as can be.

        Pseudo-counts are `concentration` in the own block and `outside` elsewhere.

        Raises `ValueError` for fewer than 2 blocks, more blocks than states, or pseudo-counts that
        are not positive numbers.
        """
        check_prior(states, concentration)
        check_prior(states, outside)
        if not 2 <= blocks <= states:
            raise ValueError(f"block prior: expected 2 to {states} blocks, got {blocks}")
        block = np.repeat(
            np.arange(blocks), [len(p) for p in np.array_split(range(states), blocks)]
        )
        same = block[:, None] == block
        return cls(np.where(same, concentration, outside), f"that prefer one of {blocks} blocks")

    @classmethod
    def cyclic(
        cls, states: int, *, concentration: float = 1.0, drift: float = 5.0
    ) -> DirichletRows:
        """Chains that drift round the ring 0 -> 1 -> ... -> C - 1 -> 0.

        The pseudo-count of the next state on the ring is `drift`, others are `concentration`.

        Raises `ValueError` for fewer than two states or numbers that are not positive.
        """
        check_prior(states, concentration)
        check_prior(states, drift)
        following = np.roll(np.eye(states, dtype=bool), 1, axis=1)
        return cls(np.where(following, drift, concentration), "that drift round a ring")

    @classmethod
    def fitted(cls, chains: ChainSet) -> DirichletRows:
        """The prior whose rows make those of a chain set most likely, each chain counting once.

        By the fixed point of Minka (2000), psi(alpha_b) = psi(sum_c alpha_c) + mean log T[a, b].

        Raises `ValueError` for fewer than two chains, for a probability of 0, and for rows that
        hardly differ between the chains, whose most likely pseudo-counts are infinite.
        """
        return cls(fit_dirichlet(chains.transition), f"fitted to {chains.count} chains")

    @property
    def two_gen(self) -> str:
        return (
            f"rows of fresh chains are independent Dirichlet rows {self.kind}; 2-Gen is exact for "
            "them: the mean of the current row given all transitions"
        )

    @property
    def pseudo_counts(self) -> Float[np.ndarray, "state state"]:
        return np.array(self.alpha)

    def _log_matrices(self, key: PRNGKeyArray, count: int, dtype: str) -> Array:
        return _log_dirichlet_rows(key, self.alpha, count, dtype)


def check_prior(states: int, concentration: float) -> None:
    """Raise `ValueError` for fewer than two states, or a concentration that is not positive."""
    if states < 2:
        raise ValueError(f"chain prior: expected at least 2 states, got {states}")
    if not 0 < concentration < float("inf"):
        raise ValueError(
            f"chain prior: expected a positive number as the concentration, got {concentration}"
        )


def _log_laws(prior: Prior, entries: int) -> np.ndarray:
    """Logarithms of the stationary laws of many chains of a prior."""
    log_rows = prior._log_rows(jax.random.key(0), entries // prior.states**2 + 2**10)
    return np.asarray(prior._log_law(log_rows, np))


@cache
def symmetric_concentration(prior: Prior, entries: int = MOMENT_ENTRIES) -> float:
    """The pseudo-count of 1-Gen under a prior that relabelling the states leaves as it is."""
    mean = 1 / prior.states
    variance = np.mean((np.exp(_log_laws(prior, entries)) - mean) ** 2)
    return float((mean * (1 - mean) / variance - 1) / prior.states)


@cache
def _one_point_pseudo_counts(prior: Prior) -> np.ndarray:
    laws = np.exp(_log_laws(prior, MOMENT_ENTRIES))
    mean = laws.mean(0)
    total = (mean * (1 - mean)).sum() / laws.var(0).sum() - 1
    return total * mean


@partial(jax.jit, static_argnums=(1, 2, 3))
def log_dirichlet(key: Any, concentration: float, shape: tuple[int, ...], dtype: str) -> Array:
    """Logarithm of symmetric Dirichlet rows: gamma variates divided by their sum."""
    return jax.nn.log_softmax(log_gamma(key, concentration, shape, dtype))


def log_gamma(key: Any, concentration: float, shape: tuple[int, ...], dtype: str) -> Array:
    """Logarithm of gamma variates."""
    if concentration == 1:  # exponential variates, ten times faster
        return -jax.random.gumbel(key, shape, dtype)
    return jax.random.loggamma(key, concentration, shape, dtype)


@partial(jax.jit, static_argnums=(1, 2, 3))
def _log_dirichlet_rows(
    key: Any, alpha: tuple[tuple[float, ...], ...], count: int, dtype: str
) -> Array:
    table = jnp.asarray(alpha, dtype)
    return jax.nn.log_softmax(jax.random.loggamma(key, table, (count, *table.shape), dtype))

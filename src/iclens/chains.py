"""Markov chains: finite sets of them, the prior that they are drawn from, and sequences.

`T[a, b]` is the probability that b follows a, so that rows sum to 1, and pi = pi T is the
stationary law.  Zero-probability transitions are legal everywhere, and are never drawn.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray, UInt32
from numpy.typing import ArrayLike

ROW_TOLERANCE = 1e-6
"""By how much a row may miss 1 (it is then divided by its sum, in float64)."""
CONCENTRATION_ENTRIES = 2**20
"""Matrix entries in the chains drawn to estimate `ChainPrior.one_point_concentration`."""


class ChainSet(eqx.Module):
    """A finite set of K Markov chains over C states.

    A pytree of float64 numpy arrays.  Passed to a compiled function they become float32 there, and
    `sample` and `draw` work on them all the same.
    """

    transition: Float[np.ndarray, "chain state state"]
    """Transition matrices, `transition[k, a, b]` = P(next = b given current = a)."""
    stationary: Float[np.ndarray, "chain state"]
    """Stationary laws, exactly 0 at transient states."""
    weights: Float[np.ndarray, " chain"]
    """Probability of each chain; they sum to 1."""
    cumulative: UInt32[np.ndarray, " chain"]
    """Running sums of `weights` in units of 2^-32, by which the chains of sequences are drawn."""

    def __init__(self, transition: ArrayLike, weights: ArrayLike | None = None):
        """Take transition matrices (chain, state, state) and weights (chain,), equal by default.

        Weights may have any positive sum.  Periodic chains and chains with transient states are
        legal.

        Raises `ValueError`, naming the place, for a wrong shape, fewer than one chain or two
        states, an entry that is negative or not finite, a row that does not sum to 1 within 1e-6,
        a chain with several stationary laws, and weights that are negative or all zero.
        """
        self.transition = _validated(transition)
        self.stationary = _stationary(self.transition)
        count = len(self.transition)
        mass = np.ones(count) if weights is None else np.asarray(weights, dtype=np.float64)
        if mass.shape != (count,):
            raise ValueError(
                f"weights: expected shape ({count},), one for each chain, got {mass.shape}"
            )
        if (wrong := ~np.isfinite(mass) | (mass < 0)).any():
            where = int(wrong.argmax())
            raise ValueError(
                f"weight of chain {where}: expected a finite number of at least 0, "
                f"got {mass[where]}"
            )
        if not mass.any():
            raise ValueError("weights: expected a positive sum, got 0 for every chain")
        mass = mass / mass.max()  # so that the sum cannot overflow
        self.weights = mass / mass.sum()
        running = np.cumsum(self.weights)
        # Adding a zero weight leaves the sum as it is, and the interval of its chain empty.
        self.cumulative = np.minimum(np.rint(running / running[-1] * 2**32), 2**32 - 1).astype(
            np.uint32
        )

    @property
    def count(self) -> int:
        """Number K of chains."""
        return len(self.transition)

    @property
    def states(self) -> int:
        """Number C of states."""
        return int(self.transition.shape[-1])

    def sample(
        self, key: PRNGKeyArray, sequences: int, length: int
    ) -> tuple[Int[Array, "sequence position"], Int[Array, " sequence"]]:
        """Draw sequences and the index of the chain of each; the first state follows pi.

        Random numbers have finite resolution: 2^-32 in the probability of a chain (one of smaller
        weight may never be drawn), 2^-23 in that of a transition.

        Raises `ValueError` if `sequences` or `length` is below 1.
        """
        _check_size(sequences, length)
        index_key, walk_key = jax.random.split(key)
        bits = jax.random.bits(index_key, (sequences,), jnp.uint32)
        # The largest draw is left out since 2^32, the end of the last interval, is no uint32.
        index = jnp.searchsorted(
            jnp.asarray(self.cumulative), jnp.minimum(bits, jnp.uint32(2**32 - 2)), side="right"
        ).astype(jnp.int32)
        initial, transition = jnp.asarray(self.stationary), jnp.asarray(self.transition)
        return walk(walk_key, initial[index], transition[index], length), index

    def draw(
        self, key: PRNGKeyArray, sequences: int, length: int
    ) -> tuple[Int[Array, "sequence position"], Float[Array, "sequence state state"]]:
        """The sequences of `sample`, and the transition matrix of each."""
        states, index = self.sample(key, sequences, length)
        return states, jnp.asarray(self.transition)[index]


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
        _check_size(sequences, length)
        rows_key, walk_key = jax.random.split(key)
        shape = (sequences, self.states, self.states)
        log_rows = _log_dirichlet(rows_key, self.concentration, shape, "float32")
        initial = jnp.exp(_log_stationary(log_rows, jnp))
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
    variance = np.mean((np.exp(_log_stationary(log_rows, np)) - mean) ** 2)
    return float((mean * (1 - mean) / variance - 1) / prior.states)


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


def stationary_distribution(transition: ArrayLike) -> Float[np.ndarray, "*chain state"]:
    """Stationary law of one chain (state, state) or of several (chain, state, state), in float64.

    By state reduction without subtractions (Grassmann, Taksar and Heyman, 1985), so that every
    probability is accurate relative to itself, however small.

    Raises `ValueError` as `ChainSet` does.
    """
    matrices = np.asarray(transition)
    laws = _stationary(_validated(matrices[None] if matrices.ndim == 2 else matrices))
    return laws.reshape(matrices.shape[:-1])


def _validated(transition: ArrayLike) -> np.ndarray:
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


def _stationary(transition: np.ndarray) -> np.ndarray:
    """Stationary laws of valid chains, each of which must have only one."""
    count, states, _ = transition.shape
    order = np.broadcast_to(np.arange(states), (count, states)).copy()
    some = np.flatnonzero((transition == 0).any(axis=(1, 2)))
    reach: np.ndarray = (transition[some] > 0) | np.eye(states, dtype=bool)
    for _ in range((states - 1).bit_length()):  # paths of up to 1, 2, 4, ... steps
        reach = np.matmul(reach, reach)
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
    stationary[chain, order] = np.exp(_log_stationary(log_transition, np))
    return stationary


def _log_stationary(log_transition: Any, xp: Any) -> Any:
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


@partial(jax.jit, static_argnums=(1, 2, 3))
def _log_dirichlet(key: Any, concentration: float, shape: tuple[int, ...], dtype: str) -> Array:
    """Logarithm of symmetric Dirichlet rows: gamma variates divided by their sum."""
    if concentration == 1:  # exponential variates, ten times faster
        log_gamma = -jax.random.gumbel(key, shape, dtype)
    else:
        log_gamma = jax.random.loggamma(key, concentration, shape, dtype)
    return jax.nn.log_softmax(log_gamma)


@partial(jax.jit, static_argnums=3)
def walk(
    key: PRNGKeyArray,
    initial: Float[Array, "sequence state"],
    transition: Float[Array, "sequence state state"],
    length: int,
) -> Int[Array, "sequence position"]:
    """Sequences, each from its own chain, by inverse cumulative distributions."""
    uniform = jax.random.uniform(key, (length, initial.shape[0]))
    cumulative = _cumulative(transition)

    def choose(rows: Array, numbers: Array) -> Array:
        return jnp.sum(rows <= numbers[:, None], axis=-1, dtype=jnp.int32)

    def step(state: Array, numbers: Array) -> tuple[Array, Array]:
        rows = jnp.take_along_axis(cumulative, state[:, None, None], axis=1)[:, 0]
        following = choose(rows, numbers)
        return following, following

    first = choose(_cumulative(initial), uniform[0])
    rest = jax.lax.scan(step, first, uniform[1:])[1]
    return jnp.concatenate([first[None], rest]).T


def _cumulative(probability: Float[Array, "*axes state"]) -> Float[Array, "*axes state"]:
    """Running sums, made such that a number in [0, 1) never falls on a state of probability 0.

    Floating-point sums may change over a zero or end below 1: a state of probability 0 takes the
    value of the one before, and everything from the last possible state on is 2.
    """
    possible = probability > 0
    sums = jnp.where(possible, jnp.cumsum(probability, axis=-1), 0)
    sums = jax.lax.cummax(sums, axis=probability.ndim - 1)
    after = jnp.flip(jnp.cumsum(jnp.flip(possible, -1), axis=-1), -1) - possible
    return jnp.where(after == 0, 2, sums)


def _check_size(sequences: int, length: int) -> None:
    if sequences < 1 or length < 1:
        raise ValueError(
            "expected at least 1 sequence and a length of at least 1, "
            f"got {sequences} sequences of length {length}"
        )

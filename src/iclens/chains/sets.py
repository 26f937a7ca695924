"""Finite sets of chains."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray, UInt32
from numpy.typing import ArrayLike

from iclens.chains.report import SequenceReport
from iclens.chains.sampling import check_size, walk
from iclens.chains.stationary import stationary_laws, validated


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
    labels: tuple[str, ...] | None = eqx.field(static=True)
    """What the states are called, where they are not called by their numbers."""

    def __init__(
        self,
        transition: ArrayLike,
        weights: ArrayLike | None = None,
        labels: Sequence[str] | None = None,
    ):
        """Take transition matrices (chain, state, state) and weights (chain,), equal by default.

        Weights may have any positive sum.  Periodic chains and chains with transient states are
        legal.  `labels` are names of the states, all different.

        Raises `ValueError`, naming the place, for a wrong shape, fewer than one chain or two
        states, an entry that is negative or not finite, a row that does not sum to 1 within 1e-6,
        a chain with several stationary laws, weights that are negative or all zero, and labels
        that are not one for each state, empty, no text to print, or twice the same.
        """
        self.transition = validated(transition)
        self.stationary = stationary_laws(self.transition)
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
        self.labels = None if labels is None else tuple(labels)
        if self.labels is not None:
            if len(self.labels) != self.states:
                raise ValueError(
                    f"labels: expected {self.states}, one for each state, got {len(self.labels)}"
                )
            for label in self.labels:
                if not label or any(unicodedata.category(sign) in ("Cc", "Cs") for sign in label):
                    raise ValueError(f"labels: expected a name for each state, got {label!r}")
            if len(set(self.labels)) < len(self.labels):
                twice = next(label for label in self.labels if self.labels.count(label) > 1)
                raise ValueError(f"labels: expected different names, got {twice!r} twice")

    @classmethod
    def from_file(cls, path: str | Path) -> ChainSet:
        """Read a chain set from a .npy, .npz, .csv or .json file, as `read_chains` says.

        Raises `OSError` if there is no such file, and `ValueError` naming file and place.
        """
        from iclens.chains.files import read_chains

        return read_chains(path)

    @classmethod
    def from_sequences(
        cls,
        source: Any,
        *,
        smoothing: float = 1.0,
    ) -> tuple[ChainSet, SequenceReport]:
        """One chain for each group of sequences of states, as `estimate_chains` says.

        `source` is a CSV file or a table with columns group, order and state, or a list of
        sequences.  Returns the chains and a report of what they were estimated from.

        Raises `OSError` if the file cannot be read, and `ValueError` naming file and place.
        """
        from iclens.chains.sequences import estimate_chains

        return estimate_chains(source, smoothing=smoothing)

    def to_npz(self) -> bytes:
        """The content of a .npz file that `from_file` reads; equal sets give equal bytes."""
        from iclens.chains.files import npz_bytes

        return npz_bytes(self)

    @property
    def count(self) -> int:
        """Number K of chains."""
        return len(self.transition)

    def take(self, index: Int[np.ndarray, " chosen"]) -> ChainSet:
        """The set of some of the chains, by their numbers, their weights scaled to sum to 1.

        Raises `ValueError` if all of these have weight 0.
        """
        return ChainSet(self.transition[index], self.weights[index], self.labels)

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
        check_size(sequences, length)
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

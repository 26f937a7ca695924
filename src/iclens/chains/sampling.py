"""Sequences of states, each from a chain of its own."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray


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


def check_size(sequences: int, length: int) -> None:
    if sequences < 1 or length < 1:
        raise ValueError(
            "expected at least 1 sequence and a length of at least 1, "
            f"got {sequences} sequences of length {length}"
        )

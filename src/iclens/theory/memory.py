"""The task recognition head, reduced: encode pairs, pool them, decode.

    e_m = E[x_(m-1), x_m]  in R^d;   phi_n = mean of e over the pairs of the context
    logits_n = W2 relu(W1 (phi_n, x_n) + b1) + b2,  hidden width F

Trained on a finite set of chains it memorises them, up to a number K2* that d, the width of the
task vector phi, and F, that of the decoder, limit.  Beyond it the same circuit counts pairs, which
is 2-Gen where d is large enough (d >= C^2 in principle).  That these two capacities set K2* is a
result of Gibson, Cui and Reddy (2026); this minimal model is ours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray
from scipy.spatial.distance import cdist

from iclens.chains import ChainSet
from iclens.separation import effective_dimension, linear_readout


@dataclass(frozen=True)
class MemoryConfig:
    """Shape of the model.  Raises `ValueError` for sizes below 1."""

    width: int = 8
    """Width d of the task vector."""
    hidden: int = 64
    """Hidden width F of the decoder."""

    def __post_init__(self) -> None:
        for name in ("width", "hidden"):
            if getattr(self, name) < 1:
                raise ValueError(f"memory.{name}: expected at least 1, got {getattr(self, name)}")


class MemoryModel(eqx.Module):
    """Encoder, pool, decoder over C states; trained like a transformer (see `training.train`)."""

    encoder: Float[Array, "pair width"]
    weight_in: Float[Array, "into hidden"]
    bias_in: Float[Array, " hidden"]
    weight_out: Float[Array, "hidden state"]
    bias_out: Float[Array, " state"]
    context: int = eqx.field(static=True)

    def __init__(
        self, config: MemoryConfig, states: int, context: int, *, key: PRNGKeyArray
    ) -> None:
        first, second, third = jax.random.split(key, 3)
        into = config.width + states
        self.encoder = jax.random.normal(first, (states**2, config.width))
        self.weight_in = into**-0.5 * jax.random.normal(second, (into, config.hidden))
        self.bias_in = jnp.zeros(config.hidden)
        self.weight_out = config.hidden**-0.5 * jax.random.normal(third, (config.hidden, states))
        self.bias_out = jnp.zeros(states)
        self.context = context

    def task_vectors(
        self, states: Int[Array, "batch position"]
    ) -> Float[Array, "batch position width"]:
        """phi at every position; 0 at the first, before any pair."""
        size = self.bias_out.shape[0]
        pairs = states[:, :-1] * size + states[:, 1:]
        one_hot = jax.nn.one_hot(pairs, size**2, dtype=self.encoder.dtype)
        total = jnp.cumsum(one_hot @ self.encoder, axis=1)
        mean = total / jnp.arange(1, states.shape[1])[:, None]
        return jnp.pad(mean, ((0, 0), (1, 0), (0, 0)))

    def __call__(
        self, states: Int[Array, "batch position"]
    ) -> Float[Array, "batch position state"]:
        """Logits of the next state at every position."""
        size = self.bias_out.shape[0]
        current = jax.nn.one_hot(states, size, dtype=self.encoder.dtype)
        read = jnp.concatenate([self.task_vectors(states), current], axis=-1)
        hidden = jax.nn.relu(read @ self.weight_in + self.bias_in)
        return hidden @ self.weight_out + self.bias_out


@dataclass(frozen=True)
class Geometry:
    """How the task vectors of a set's chains lie."""

    separation: float
    """Distance of a chain's mean to the nearest other, the median over chains, over the root mean
    square distance of a sequence's task vector from its chain's mean; they overlap below 2."""
    dimension: float
    """Effective dimension of the chains' means, (sum l)^2 / sum l^2 over their covariance's l; at
    most the number of chains less one."""
    readout: float
    """Share of held-out sequences whose chain is that of the nearest mean, in the metric of the
    spread within chains."""


def last_task_vectors(
    model: MemoryModel, states: Int[Array, "batch position"]
) -> Float[Array, "batch width"]:
    """phi at the last position."""
    return model.task_vectors(states)[:, -1]


def geometry(
    task_vectors: Callable[[Any, Any], Array],
    model: Any,
    chains: ChainSet,
    sequences: int,
    context: int,
    *,
    key: PRNGKeyArray,
) -> Geometry:
    """Measure task_vectors(model, states), from `sequences` of each chain.

    Raises `ValueError` for fewer than two chains, or fewer than four sequences of each.
    """
    if chains.count < 2 or sequences < 4:
        raise ValueError(
            "expected at least 2 chains and 4 sequences of each, "
            f"got {chains.count} and {sequences}"
        )

    @eqx.filter_jit
    def draw(model: Any, chain: ChainSet, key: PRNGKeyArray) -> Array:
        return task_vectors(model, chain.sample(key, sequences, context)[0])

    phi = np.stack(
        [
            np.asarray(draw(model, ChainSet(matrix[None]), jax.random.fold_in(key, k)))
            for k, matrix in enumerate(chains.transition)
        ]
    ).astype(np.float64)
    fit = phi[:, ::2]
    means = fit.mean(1)
    within = fit - means[:, None]
    spread = np.sqrt((within**2).sum(-1).mean())
    apart = cdist(means, means)
    nearest = np.where(np.eye(len(means), dtype=bool), np.inf, apart).min(1)
    chain = np.repeat(np.arange(chains.count), sequences)
    even = np.tile(np.arange(sequences) % 2 == 0, chains.count)
    return Geometry(
        separation=float(np.median(nearest) / max(spread, 1e-12)),
        dimension=effective_dimension(means),
        readout=linear_readout(phi.reshape(len(chain), -1), chain, even, ~even),
    )


def capacity(
    chains: Int[np.ndarray, " K"],
    to_2_mem: Float[np.ndarray, " K"],
    to_2_gen: Float[np.ndarray, " K"],
) -> tuple[float | None, float | None]:
    """Bracket of K2*: the largest K up to which the model ends nearer to 2-Mem, and the next.

    An end is None where no K of the grid lies on that side.
    """
    memorised = np.asarray(to_2_mem) < np.asarray(to_2_gen)
    order = np.argsort(chains)
    run = np.logical_and.accumulate(memorised[order])
    sizes = np.asarray(chains)[order]
    low = float(sizes[run][-1]) if run.any() else None
    high = float(sizes[~run][0]) if not run.all() else None
    return low, high

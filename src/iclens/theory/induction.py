"""The statistical induction head, reduced: attention only, symmetric under relabelling of states.

Relabelling the states leaves the task as it is, so every weight matrix on state space is a multiple
of the identity plus a multiple of the all-ones matrix, which the softmax cancels.  The residual
stream holds two copies of state space, x (the state) and z (what layer 1 wrote), and what remains
are scalars:

    layer 1     a_nm = softmax over m <= n of lag_bias[n - m];  z_n = sum_m a_nm x_m
    layer 2     A_nm = softmax over m <= n of sum_uv beta_uv u_n . v_m,  u and v in (x, z)
    read-out    p_n = (1 - rho) sum_m A_nm x_m + rho z_n, mixed with uniform by epsilon

At 0 this predicts the frequencies of the context (1-Gen); with beta = beta_xz, the match of the
current state with what was before m, and delta, the bias of lag 1, large, what followed the current
state (2-Gen).  Between them the loss at the last position of a context of N is

    L(beta, delta) = L_1 - c_beta beta - c_delta delta - J beta delta + ...

with c_beta = (1 - rho) A_beta ln(N)/N, J = (1 - rho) A_J ln(N)/N, both up to O(1/N), and
c_delta = (rho / N) (C - 1) / (C (C alpha + 1)).  Gradient flow leaves the origin at rate J, so that
the time to 2-Gen grows as N / ln N.

That a symmetric attention-only model explains the step, that its loss has these two small biases,
and N / log N are results of Gibson, Cui and Reddy (2026); this model, the formulas of the
coefficients and their proof are ours.
"""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from iclens.chains import ChainPrior, stationary_distribution

EPSILON = 0.02
"""Share of the uniform distribution in the read-out, which keeps the loss finite."""
CHUNK = 2**21
"""Positions that are worked on together."""
AMPLITUDE_CHAINS = 2**18


class Sample(eqx.Module):
    """Contexts of fresh chains, for losses and coefficients at the last position."""

    states: Int[Array, "batch position"]
    target: Float[Array, "batch state"]
    """True distribution of the next state."""
    stationary: Float[Array, "batch state"]
    """Stationary law of the chain."""


def draw_sample(prior: ChainPrior, context: int, sequences: int, *, key: PRNGKeyArray) -> Sample:
    """Draw a sample.  Raises `ValueError` for a context of less than 2 or no sequences."""
    if context < 2 or sequences < 1:
        raise ValueError(
            "expected a context of at least 2 and at least 1 sequence, "
            f"got {sequences} sequences of {context} states"
        )
    states, transition = prior.draw(key, sequences, context)
    rows = np.asarray(transition, np.float64)
    rows /= rows.sum(-1, keepdims=True)
    last = np.asarray(states[:, -1])
    return Sample(
        states,
        jnp.asarray(rows[np.arange(sequences), last], jnp.float32),
        jnp.asarray(stationary_distribution(rows), jnp.float32),
    )


class SATransformer(eqx.Module):
    """The general symmetric model: all matches, a free bias for each lag."""

    beta: Float[Array, "2 2"]
    """Match of u in the query with v in the key, u and v in (x, z); beta[0, 1] is beta_xz."""
    lag_bias: Float[Array, " lag"]
    """Layer 1's bias for each lag, from 0; as many as the context is long."""
    rho: Float[Array, ""]
    """Share of layer 1 in the read-out, in [0, 1]."""
    gain: float | None = eqx.field(static=True, default=None)
    """Where given, the read-out is a softmax of `gain` times the mixture of the two layers."""
    epsilon: float = eqx.field(static=True, default=EPSILON)

    def __call__(self, sample: Sample) -> Float[Array, "batch state"]:
        """The predicted distribution of the state after the last of each context."""
        size = sample.target.shape[-1]
        x = jax.nn.one_hot(sample.states, size, dtype=self.lag_bias.dtype)
        context = x.shape[1]
        lag = jnp.arange(context)[:, None] - jnp.arange(context)
        bias = jnp.where(lag >= 0, self.lag_bias[jnp.maximum(lag, 0)], -jnp.inf)
        z = jnp.einsum("nm,bma->bna", jax.nn.softmax(bias, axis=-1), x)
        streams = jnp.stack([x, z])
        logits = jnp.einsum("uv,uba,vbma->bm", self.beta, streams[:, :, -1], streams)
        found = jnp.einsum("bm,bma->ba", jax.nn.softmax(logits, axis=-1), x)
        return _read_out(found, z[:, -1], self.rho, self.epsilon, self.gain)


def _read_out(
    found: Array, written: Array, rho: Array | float, epsilon: float, gain: float | None = None
) -> Array:
    mixture = (1 - rho) * found + rho * written
    if gain is not None:
        return jax.nn.softmax(gain * mixture, axis=-1)
    return (1 - epsilon) * mixture + epsilon / mixture.shape[-1]


def expected_loss(predicted: Float[Array, "batch state"], sample: Sample) -> Float[Array, ""]:
    """Cross-entropy under the true distribution of the next state, in nats."""
    return -jnp.mean(jnp.sum(sample.target * jnp.log(predicted), axis=-1))


def plane_loss(
    point: Float[Array, " 2"], sample: Sample, rho: float = 0.0, epsilon: float = EPSILON
) -> Float[Array, ""]:
    """Loss at (beta, delta), in nats: the general model with beta_xz and the bias of lag 1 alone.

    Linear in the context: layer 1 is the running count with the state before weighed e^delta.
    """
    beta, extra = point[0], jnp.expm1(point[1])
    states, last = sample.states, sample.states[:, -1:]
    size = sample.target.shape[-1]
    match = (states == last).astype(beta.dtype)
    before = jnp.pad(match[:, :-1], ((0, 0), (1, 0)))
    seen = jnp.arange(1, states.shape[1] + 1)
    weight = seen + extra * (seen > 1)
    matched = (jnp.cumsum(match, axis=1) + extra * before) / weight
    attention = jax.nn.softmax(beta * matched, axis=-1)
    x = jax.nn.one_hot(states, size, dtype=beta.dtype)
    found = jnp.einsum("bm,bma->ba", attention, x)
    written = (jnp.sum(x, axis=1) + extra * x[:, -2]) / weight[-1]
    return expected_loss(_read_out(found, written, rho, epsilon), sample)

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

import math
from dataclasses import dataclass

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
HORIZON = 60.0
"""Flow time, over N / ln N, by which the loss has settled at concentrations near 1."""
DOUBLINGS = 5
"""Times at most that the flow is followed, each twice as long."""


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


# --- the expansion about the one-point solution


class Coefficients(eqx.Module):
    """Coefficients of the expansion: of a sequence, of a chain set or of the prior; nats."""

    c_beta: Float[Array, ...]
    c_delta: Float[Array, ...]
    J: Float[Array, ...]


@eqx.filter_jit
def sequence_coefficients(
    sample: Sample, one_point: Float[Array, "batch state"], rho: float = 0.0
) -> Coefficients:
    """Minus the derivatives of the loss at the origin, for each sequence.

    `one_point` is the prediction p that the model expands about: the frequencies of the context
    for the derivatives of the model's own loss (with epsilon = 0), `sample.stationary` for their
    limit of many states, which is the theory's.  With h_m(a) the frequency of a up to m, over m:

        c_beta  = (1 - rho) sum_c T_ac cov(h_m(a), [x_m = c]) / p_c,  a the last state
        c_delta = rho / N sum_c T_ac ([x_(n-1) = c] - h_n(c)) / p_c
        J       = (1 - rho) sum_c T_ac cov(([x_(m-1) = a] - h_m(a)) / m, [x_m = c]) / p_c
                  - sum_c T_ac (dp_c/dbeta) (dp_c/ddelta) / p_c^2
    """
    states, target = sample.states, sample.target
    x = jax.nn.one_hot(states, target.shape[-1], dtype=target.dtype)
    match = (states == states[:, -1:]).astype(target.dtype)
    seen = jnp.arange(1, states.shape[1] + 1)
    running = jnp.cumsum(match, axis=1) / seen
    before = jnp.pad(match[:, :-1], ((0, 0), (1, 0)))
    turned = jnp.where(seen > 1, (before - running) / seen, 0)
    frequency = jnp.mean(x, axis=1)

    def covariance(values: Array) -> Array:
        centred = values - jnp.mean(values, axis=1, keepdims=True)
        return jnp.einsum("bm,bmc->bc", centred, x) / states.shape[1]

    by_beta = (1 - rho) * covariance(running)
    by_delta = rho * (x[:, -2] - frequency) / states.shape[1]
    by_both = (1 - rho) * covariance(turned)
    weight = target / one_point
    return Coefficients(
        c_beta=jnp.sum(weight * by_beta, axis=-1),
        c_delta=jnp.sum(weight * by_delta, axis=-1),
        J=jnp.sum(weight * (by_both - by_beta * by_delta / one_point), axis=-1),
    )


@dataclass(frozen=True)
class Estimate:
    """A mean and its standard error."""

    value: float
    error: float

    @classmethod
    def of(cls, samples: np.ndarray) -> Estimate:
        samples = np.asarray(samples, np.float64)
        return cls(float(samples.mean()), float(samples.std(ddof=1) / math.sqrt(samples.size)))


def measured_coefficients(
    prior: ChainPrior, context: int, sequences: int, *, rho: float = 0.0, key: PRNGKeyArray
) -> dict[str, Estimate]:
    """c_beta, c_delta and J by Monte Carlo over fresh chains, in nats, with standard errors."""
    check_rho(rho)
    chunk = max(1, CHUNK // context)
    found: list[Coefficients] = []
    for number, first in enumerate(range(0, sequences, chunk)):
        count = min(chunk, sequences - first)
        sample = draw_sample(prior, context, count, key=jax.random.fold_in(key, number))
        found.append(sequence_coefficients(sample, sample.stationary, rho))
    return {
        name: Estimate.of(np.concatenate([np.asarray(getattr(part, name)) for part in found]))
        for name in ("c_beta", "c_delta", "J")
    }


def chain_amplitudes(
    transition: Float[np.ndarray, "chain state state"],
) -> tuple[Float[np.ndarray, " chain"], Float[np.ndarray, " chain"]]:
    """A_beta and A_J of single chains, in float64.

    A_beta = sum_ac pi_a^2 T_ac G_ac / pi_c with G = (I - T + 1 pi)^-1 - 1 pi, and
    A_J = sum_ac pi_a^2 T_ac (T_ac - pi_c) / pi_c.
    """
    pi = stationary_distribution(transition)
    law = np.broadcast_to(pi[:, None, :], transition.shape)
    excess = np.linalg.inv(np.eye(transition.shape[-1]) - transition + law) - law
    weight = pi[:, :, None] ** 2 * transition / law
    return (weight * excess).sum((1, 2)), (weight * (transition - law)).sum((1, 2))


def amplitudes(prior: ChainPrior, *, key: PRNGKeyArray) -> dict[str, Estimate]:
    """A_beta and A_J, the means of `chain_amplitudes` over the prior, with standard errors."""
    chains = prior.sample(key, max(1024, AMPLITUDE_CHAINS * 100 // max(10, prior.states) ** 2))
    by_beta, by_both = chain_amplitudes(chains.transition)
    return {"A_beta": Estimate.of(by_beta), "A_J": Estimate.of(by_both)}


def predicted_coefficients(
    prior: ChainPrior, context: int, amplitude: dict[str, Estimate], *, rho: float = 0.0
) -> dict[str, float]:
    """c_beta and J to leading order, and c_delta, by the formulas at the top of this file."""
    check_rho(rho)
    size = prior.states
    return {
        "c_beta": (1 - rho) * amplitude["A_beta"].value * math.log(context) / context,
        "c_delta": rho / context * (size - 1) / (size * (size * prior.concentration + 1)),
        "J": (1 - rho) * amplitude["A_J"].value * math.log(context) / context,
    }


def check_rho(rho: float) -> None:
    """Raise `ValueError` if rho is not a share."""
    if not 0 <= rho <= 1:
        raise ValueError(f"rho: expected a number from 0 to 1, got {rho}")


# --- the (beta, delta) plane


@eqx.filter_jit
def landscape(
    sample: Sample,
    beta: Float[Array, " beta"],
    delta: Float[Array, " delta"],
    rho: float = 0.0,
    epsilon: float = EPSILON,
) -> Float[Array, "beta delta"]:
    """The loss on a grid, in nats."""
    points = jnp.stack(jnp.meshgrid(beta, delta, indexing="ij"), axis=-1)
    loss = jax.lax.map(lambda point: plane_loss(point, sample, rho, epsilon), points.reshape(-1, 2))
    return loss.reshape(points.shape[:2])


@dataclass(frozen=True)
class Path:
    """A way through the plane, from the origin."""

    time: Float[np.ndarray, " point"]
    """Flow time: steps times learning rate."""
    point: Float[np.ndarray, "point 2"]
    """beta and delta."""
    loss: Float[np.ndarray, " point"]
    """In nats."""

    @property
    def half_time(self) -> float:
        """When the loss is first half-way from its start to its end, by linear interpolation."""
        half = (self.loss[0] + self.loss[-1]) / 2
        after = int((self.loss <= half).argmax())
        ends = slice(after - 1, after + 1)
        return float(np.interp(-half, -self.loss[ends], self.time[ends]))


def gradient_flow(
    sample: Sample, time: float, *, rho: float = 0.0, epsilon: float = EPSILON, points: int = 401
) -> Path:
    """Follow d(beta, delta)/dt = -grad L on a sample from the origin, in float64.

    Raises `ValueError` if `time` is not a positive number or rho not in [0, 1].
    """
    check_rho(rho)
    if not 0 < time < math.inf:
        raise ValueError(f"time: expected a positive number, got {time}")
    with jax.enable_x64(True):
        exact = jax.tree.map(
            lambda array: jnp.asarray(array, jnp.float64) if array.dtype != jnp.int32 else array,
            sample,
        )
        moments = jnp.linspace(0.0, time, points)
        path, loss = _flow(exact, moments, rho, epsilon)
        return Path(np.asarray(moments), np.asarray(path), np.asarray(loss))


@eqx.filter_jit
def _flow(
    sample: Sample, moments: Float[Array, " point"], rho: float, epsilon: float
) -> tuple[Array, Array]:
    import diffrax

    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(lambda time, point, on: -jax.grad(plane_loss)(point, on, rho, epsilon)),
        diffrax.Tsit5(),
        t0=moments[0],
        t1=moments[-1],
        dt0=None,
        y0=jnp.zeros(2),
        args=sample,
        saveat=diffrax.SaveAt(ts=moments),
        stepsize_controller=diffrax.PIDController(rtol=1e-6, atol=1e-8),
    )
    path = solution.ys
    return path, jax.lax.map(lambda point: plane_loss(point, sample, rho, epsilon), path)


def stochastic_descent(
    prior: ChainPrior,
    context: int,
    time: float,
    *,
    steps: int,
    batch: int = 1024,
    rho: float = 0.0,
    epsilon: float = EPSILON,
    key: PRNGKeyArray,
) -> Path:
    """Gradient descent from the origin with fresh chains at each of `steps` steps.

    The learning rate is time / steps; the loss of each point is that of the batch at it.
    """
    check_rho(rho)
    rate = time / steps

    @eqx.filter_jit
    def descend(key: PRNGKeyArray) -> tuple[Array, Array]:
        def step(point: Array, key: PRNGKeyArray) -> tuple[Array, tuple[Array, Array]]:
            states, transition = prior.draw(key, batch, context)
            target = jnp.take_along_axis(transition, states[:, -1, None, None], axis=1)[:, 0]
            on = Sample(states, target, target)
            loss, slope = jax.value_and_grad(plane_loss)(point, on, rho, epsilon)
            return point - rate * slope, (point, loss)

        return jax.lax.scan(step, jnp.zeros(2), jax.random.split(key, steps))[1]

    point, loss = descend(key)
    return Path(np.arange(steps) * rate, np.asarray(point), np.asarray(loss))


def time_to_induction(
    prior: ChainPrior, context: int, *, sequences: int, rho: float = 0.0, key: PRNGKeyArray
) -> float:
    """tau_2Gen of the reduced model: the half-time of gradient flow, in flow time.

    The flow is followed until the loss has settled: its last tenth of the time brings less than
    1 % of the fall.  Raises `ValueError` if it does not, as where no induction head forms.
    """
    check_rho(rho)
    if rho == 1:
        raise ValueError("rho: expected less than 1, for an induction head reads layer 2")
    sample = draw_sample(prior, context, sequences, key=key)
    time = HORIZON * context / math.log(context) / (1 - rho)
    for _ in range(DOUBLINGS):
        path = gradient_flow(sample, time, rho=rho)
        late = path.loss[path.time >= 0.9 * time]
        if late[0] - late[-1] < 0.01 * (path.loss[0] - path.loss[-1]):
            return path.half_time
        time *= 2
    raise ValueError(
        f"the loss has not settled by flow time {time / 2:.0f}: no induction head forms at "
        f"C = {prior.states}, concentration = {prior.concentration:g}, N = {context}, "
        f"rho = {rho:g}"
    )

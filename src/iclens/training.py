"""Training: compiled blocks of steps between evaluations, resumable bit for bit.

The batch of step s is a function of the key and s alone, and one block of steps is compiled once,
its bounds being traced numbers.  Where evaluations fall and where a run was interrupted therefore
change neither the arithmetic nor the number of compilations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, Key, PRNGKeyArray

PIECE_TOKENS = 1024
"""Positions whose activations a CPU keeps in its cache from the forward pass to the backward."""
BLOCK = 64
"""Steps whose batches are drawn together (one step at a time, sampling would cost more than it)."""


@runtime_checkable
class Source(Protocol):
    """Where training sequences come from: a `ChainSet`, or a `Prior` for ever fresh chains."""

    def draw(
        self, key: PRNGKeyArray, sequences: int, length: int
    ) -> tuple[Int[Array, "sequence length"], Float[Array, "sequence state state"]]:
        """Sequences and the transition matrix of each."""
        ...


@runtime_checkable
class SequenceModel(Protocol):
    """What is trained: a module of arrays that predicts the next state at every position."""

    @property
    def context(self) -> int:
        """Positions of a training sequence."""
        ...

    def __call__(
        self, states: Int[Array, "batch position"]
    ) -> Float[Array, "batch position state"]:
        """Logits of the next state."""
        ...


@dataclass(frozen=True)
class TrainingConfig:
    """How a model is trained.  Raises `ValueError` where a value is out of its range."""

    steps: int = 6000
    """Optimizer steps."""
    batch: int = 32
    """Sequences in each step."""
    optimizer: Literal["adam", "adamw", "sgd"] = "adam"
    """Optimizer; SGD is the one of the theory."""
    learning_rate: float = 3e-3
    """Peak learning rate."""
    schedule: Literal["constant", "cosine"] = "constant"
    """Learning rate after the warm-up: constant, or a cosine down to 0 at the last step."""
    warmup: int = 0
    """Steps over which the learning rate rises linearly from 0."""
    beta1: float = 0.9
    """Adam's and AdamW's decay of the first moment; the momentum of SGD is `momentum`."""
    beta2: float = 0.999
    """Adam's and AdamW's decay of the second moment."""
    epsilon: float = 1e-8
    """What Adam and AdamW add to the root of the second moment."""
    weight_decay: float = 0.0
    """AdamW's decoupled weight decay."""
    momentum: float = 0.0
    """SGD's momentum."""
    loss: Literal["sampled", "expected"] = "sampled"
    """Cross-entropy of the sampled next state, or under its true distribution (same mean gradient,
    less noise)."""
    evaluations: int = 40
    """Evaluation points after step 0, the last at the last step (fewer where they coincide)."""
    spacing: Literal["log", "linear"] = "log"
    """Spacing of the evaluation points."""

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "evaluations"):
            if not 1 <= getattr(self, name) < 2**31:
                raise ValueError(f"train.{name}: expected 1 to 2^31 - 1, got {getattr(self, name)}")
        for name in ("learning_rate", "epsilon"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(
                    f"train.{name}: expected a positive number, got {getattr(self, name)}"
                )
        if not 0 <= self.warmup <= self.steps:
            raise ValueError(
                f"train.warmup: expected 0 to train.steps = {self.steps}, got {self.warmup}"
            )
        for name in ("beta1", "beta2", "momentum"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(
                    f"train.{name}: expected a number in [0, 1), got {getattr(self, name)}"
                )
        if not 0 <= self.weight_decay < float("inf"):
            raise ValueError(
                f"train.weight_decay: expected a number of at least 0, got {self.weight_decay}"
            )

    @cached_property
    def evaluation_steps(self) -> tuple[int, ...]:
        """Steps of the evaluations: 0, then `evaluations` points up to `steps`."""
        if self.spacing == "linear":
            points = np.linspace(0, self.steps, self.evaluations + 1)[1:]
        else:
            points = np.geomspace(self.steps, max(1, self.steps / 500), self.evaluations)
        return (0, *sorted({max(1, round(point)) for point in points.tolist()}))

    @cached_property
    def transform(self) -> optax.GradientTransformation:
        """The optimizer with its schedule."""
        decay = self.steps - self.warmup
        rate = (
            optax.cosine_decay_schedule(self.learning_rate, decay)
            if self.schedule == "cosine" and decay
            else optax.constant_schedule(self.learning_rate)
        )
        if self.warmup:
            rise = optax.linear_schedule(0.0, self.learning_rate, self.warmup)
            rate = optax.join_schedules([rise, rate], [self.warmup])
        if self.optimizer == "adam":
            return optax.adam(rate, self.beta1, self.beta2, self.epsilon)
        if self.optimizer == "adamw":
            return optax.adamw(
                rate, self.beta1, self.beta2, self.epsilon, weight_decay=self.weight_decay
            )
        return optax.sgd(rate, self.momentum or None)


class TrainingState(eqx.Module):
    """Everything that the next step depends on, besides the recipe."""

    model: SequenceModel
    optimizer: optax.OptState
    step: Int[Array, ""]
    """Steps done."""
    diverged: Int[Array, ""]
    """The first step whose loss or parameters were not finite; -1 while there is none."""


@dataclass(frozen=True)
class Snapshot:
    """A training run at one evaluation point."""

    step: int
    state: TrainingState
    train_loss: float
    """Mean training loss, in nats, over the steps since the previous evaluation; NaN at step 0."""
    evaluations: dict[str, Any]
    """What each evaluation returned, by its name."""

    @property
    def diverged(self) -> int | None:
        """The step at which loss or parameters ceased to be finite, if they did."""
        step = int(self.state.diverged)
        return None if step < 0 else step


def initial_state(model: SequenceModel, config: TrainingConfig) -> TrainingState:
    """The state before the first step."""
    parameters = eqx.filter(model, eqx.is_inexact_array)
    return TrainingState(model, config.transform.init(parameters), jnp.int32(0), jnp.int32(-1))


def train(
    state: TrainingState,
    source: Source,
    config: TrainingConfig,
    *,
    key: PRNGKeyArray,
    evaluate: Mapping[str, Callable[[Any], Any]] | None = None,
    on_steps: Callable[[int], None] | None = None,
) -> Iterator[Snapshot]:
    """Train from `state`, yielding a snapshot at each evaluation point that is not yet past.

    A fresh state (see `initial_state`) yields step 0 first; a state taken from a snapshot goes on
    after it, to the same bits as without the interruption.  A run that diverges yields one last
    snapshot, which says so.

    `key` seeds the batches, `evaluate` maps names to functions of the model, and `on_steps` is
    called with the number of steps done after each block of at most 64 steps.
    """
    evaluate = evaluate or {}
    source = jax.tree.map(jnp.asarray, source)
    done = int(state.step)
    for stop in config.evaluation_steps:
        if stop < done or (stop == done and done > 0) or int(state.diverged) >= 0:
            continue
        total = jnp.float32(0)
        segment = stop - done
        while done < stop:
            state, total = _run_block(state, total, source, key, jnp.int32(stop), config)
            total.block_until_ready()  # a signal is heard between blocks
            done = min(stop, (done // BLOCK + 1) * BLOCK)
            if on_steps is not None:
                on_steps(done)
        yield Snapshot(
            step=stop,
            state=state,
            train_loss=float(total) / segment if segment else float("nan"),
            evaluations={name: function(state.model) for name, function in evaluate.items()},
        )


def train_ensemble(
    states: Sequence[TrainingState],
    sources: Sequence[Source],
    config: TrainingConfig,
    *,
    keys: Sequence[PRNGKeyArray],
    on_steps: Callable[[int], None] | None = None,
) -> Iterator[list[Snapshot | None]]:
    """Train members in one program, vectorized over them, yielding as `train` does.

    Members are models of one shape at one step, with sources of one shape.  Each has the batches
    and updates that it has alone, with matrix products whose rounding may differ.  A member that
    diverges has one last snapshot and then None, and the others go on.

    Raises `ValueError` if members are at different steps.
    """
    done = int(states[0].step)
    if different := {int(state.step) for state in states} - {done}:
        raise ValueError(f"expected members at one step, got {sorted({done, *different})}")
    arrays, static = eqx.partition([state.model for state in states], eqx.is_array)
    model = eqx.combine(_stack(arrays), static[0])
    optimizer = _stack([state.optimizer for state in states])
    diverged = jnp.stack([state.diverged for state in states])
    source = _stack([jax.tree.map(jnp.asarray, source) for source in sources])
    key = jnp.stack(list(keys))
    alive = [int(state.diverged) < 0 for state in states]
    for stop in config.evaluation_steps:
        if stop < done or (stop == done and done > 0) or not any(alive):
            continue
        total = jnp.zeros(len(states))
        segment = stop - done
        while done < stop:
            model, optimizer, diverged, total = _run_blocks(
                model,
                optimizer,
                diverged,
                total,
                source,
                key,
                jnp.int32(done),
                jnp.int32(stop),
                config,
            )
            total.block_until_ready()
            done = min(stop, (done // BLOCK + 1) * BLOCK)
            if on_steps is not None:
                on_steps(done)
        snapshots: list[Snapshot | None] = []
        for index, before in enumerate(alive):
            member = TrainingState(
                _member(model, index), _member(optimizer, index), jnp.int32(done), diverged[index]
            )
            loss = float(total[index]) / segment if segment else float("nan")
            snapshots.append(Snapshot(stop, member, loss, {}) if before else None)
            alive[index] = int(diverged[index]) < 0
        yield snapshots


def _stack(trees: Sequence[Any]) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def _member(stacked: Any, index: int) -> Any:
    return jax.tree.map(lambda leaf: leaf[index] if eqx.is_array(leaf) else leaf, stacked)


@eqx.filter_jit
def _run_blocks(
    model: Any,
    optimizer: Any,
    diverged: Int[Array, " member"],
    total: Float[Array, " member"],
    source: Any,
    key: Key[Array, " member"],
    step: Int[Array, ""],
    stop: Int[Array, ""],
    config: TrainingConfig,
) -> tuple[Any, Any, Array, Array]:
    """`_run_block` for each member; they share the step."""

    def one(model: Any, optimizer: Any, diverged: Any, total: Any, source: Any, key: Any) -> Any:
        state = TrainingState(model, optimizer, step, diverged)
        state, total = _run_block(state, total, source, key, stop, config)
        return state.model, state.optimizer, state.diverged, total

    mapped = eqx.filter_vmap(one)(model, optimizer, diverged, total, source, key)
    return mapped


def _pieces(batch: int, context: int) -> int:
    """Pieces of a batch whose gradients are summed: on a CPU, as many as keep one in its cache."""
    if jax.default_backend() != "cpu":
        return 1
    wanted = batch * context / PIECE_TOKENS
    divisors = [count for count in range(1, batch + 1) if batch % count == 0]
    return min(divisors, key=lambda count: abs(math.log(count / wanted)))


@eqx.filter_jit
def _run_block(
    state: TrainingState,
    total: Float[Array, ""],
    source: Source,
    key: PRNGKeyArray,
    stop: Int[Array, ""],
    config: TrainingConfig,
) -> tuple[TrainingState, Float[Array, ""]]:
    """Steps up to `stop`, or to the end of the current block; adds their losses to `total`."""
    block = state.step // BLOCK
    states, transition = source.draw(
        jax.random.fold_in(key, block), BLOCK * config.batch, state.model.context + 1
    )
    pieces = _pieces(config.batch, state.model.context)
    states = states.reshape(BLOCK, pieces, config.batch // pieces, -1)
    transition = transition.reshape(*states.shape[:3], *transition.shape[1:])

    def step(number: Int[Array, ""], carry: tuple[TrainingState, Array]) -> Any:
        state, total = carry
        index = number % BLOCK
        parameters = eqx.filter(state.model, eqx.is_inexact_array)

        def accumulate(total: Any, piece: tuple[Array, Array]) -> tuple[Any, None]:
            one = eqx.filter_value_and_grad(next_state_loss)(state.model, *piece, config.loss)
            return jax.tree.map(jnp.add, total, one), None

        total_of_pieces, _ = jax.lax.scan(
            accumulate,
            jax.tree.map(jnp.zeros_like, (jnp.float32(0), parameters)),
            (states[index], transition[index]),
        )
        value, gradient = jax.tree.map(lambda sums: sums / pieces, total_of_pieces)
        updates, optimizer = config.transform.update(gradient, state.optimizer, parameters)
        lost = (state.diverged < 0) & ~jnp.isfinite(value)
        state = TrainingState(
            model=eqx.apply_updates(state.model, updates),
            optimizer=optimizer,
            step=number + 1,
            diverged=jnp.where(lost, number, state.diverged),
        )
        return state, total + value

    state, total = jax.lax.fori_loop(
        state.step, jnp.minimum(stop, (block + 1) * BLOCK), step, (state, total)
    )
    # The last update may have been the one too many, without a loss of its own to show it.
    finite = [jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(state.model)]
    lost = (state.diverged < 0) & ~jnp.stack(finite).all()
    return eqx.tree_at(
        lambda state: state.diverged, state, jnp.where(lost, state.step, state.diverged)
    ), total


def next_state_loss(
    model: SequenceModel,
    states: Int[Array, "batch length"],
    transition: Float[Array, "batch state state"],
    loss: Literal["sampled", "expected"],
) -> Float[Array, ""]:
    """Mean cross-entropy, in nats, of the next state over all positions of a batch.

    `states` has one state more than the context, so that every position has a target; "expected"
    takes the true row `transition[x_n]` as the target instead of the sampled state.
    """
    log_probs = jax.nn.log_softmax(model(states[:, :-1]))
    if loss == "sampled":
        target = jax.nn.one_hot(states[:, 1:], log_probs.shape[-1], dtype=log_probs.dtype)
    else:
        target = jnp.take_along_axis(transition, states[:, :-1, None], axis=1)
    return -jnp.mean(jnp.sum(target * log_probs, axis=-1))

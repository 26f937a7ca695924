"""Training: one trace, exact resume, divergence as data, optimizers and schedules."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from iclens import training
from iclens.chains import ChainPrior, cyclic
from iclens.training import TrainingConfig, initial_state, next_state_loss, train
from iclens.transformer import Transformer, TransformerConfig

C, N = 3, 8
PRIOR = ChainPrior(C)
CONFIG = TrainingConfig(steps=150, batch=8, evaluations=6)


def fresh(config: TrainingConfig = CONFIG, seed: int = 0) -> training.TrainingState:
    shape = TransformerConfig(width=8)
    return initial_state(Transformer(shape, C, N, key=jax.random.key(seed)), config)


def history(config: TrainingConfig = CONFIG, state=None, source=PRIOR, **kwargs):
    state = fresh(config) if state is None else state
    return list(train(state, source, config, key=jax.random.key(1), **kwargs))


def assert_same_bits(one, two) -> None:
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_step_is_traced_once(monkeypatch) -> None:
    traces = []
    monkeypatch.setattr(
        training,
        "next_state_loss",
        lambda *args: (traces.append(1), next_state_loss(*args))[1],
    )
    config = dataclasses.replace(CONFIG, steps=300, evaluations=9, learning_rate=1.23e-3)
    assert len(history(config)) == 10
    assert len(traces) == 1


def test_evaluation_points() -> None:
    steps = TrainingConfig(steps=6000, evaluations=40).evaluation_steps
    assert steps[0] == 0
    assert steps[-1] == 6000
    assert len(steps) == 41
    ratios = np.array(steps[12:]) / np.array(steps[11:-1])
    assert np.ptp(ratios) < 0.05
    linear = TrainingConfig(steps=100, evaluations=4, spacing="linear")
    assert linear.evaluation_steps == (0, 25, 50, 75, 100)


@pytest.mark.parametrize(
    "optimizer", ["adam", *(pytest.param(o, marks=pytest.mark.slow) for o in ("adamw", "sgd"))]
)
def test_resuming_from_any_snapshot_gives_the_same_bits(optimizer) -> None:
    config = dataclasses.replace(
        CONFIG, optimizer=optimizer, schedule="cosine", warmup=20, momentum=0.5, weight_decay=0.01
    )
    whole = history(config)
    assert [snapshot.step for snapshot in whole] == list(config.evaluation_steps)
    for start in (0, 2, 5):
        rest = history(config, state=whole[start].state)
        skipped = 0 if start == 0 else start + 1
        assert [s.step for s in rest] == [s.step for s in whole[skipped:]]
        for a, b in zip(rest, whole[skipped:], strict=True):
            assert_same_bits(a.state, b.state)
            assert a.train_loss == b.train_loss or np.isnan(a.train_loss)
    assert history(config, state=whole[-1].state) == []


def test_where_evaluations_fall_does_not_change_the_arithmetic() -> None:
    few = history(dataclasses.replace(CONFIG, evaluations=1))
    many = history(dataclasses.replace(CONFIG, evaluations=50))
    assert_same_bits(few[-1].state, many[-1].state)


@pytest.mark.slow
@pytest.mark.parametrize("pieces", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_a_plain_loop_does_the_same_steps(pieces, monkeypatch) -> None:
    """The compiled loop against batches drawn and optax applied by hand."""
    config = dataclasses.replace(CONFIG, steps=70, learning_rate=2e-3 + 1e-4 * pieces)
    monkeypatch.setattr(training, "PIECE_TOKENS", CONFIG.batch * N // pieces)
    state = fresh(config)
    model, optimizer = state.model, optax.adam(config.learning_rate)
    moments = optimizer.init(model)
    gradient = jax.jit(jax.value_and_grad(next_state_loss), static_argnums=3)
    losses = []
    for step in range(config.steps):
        key = jax.random.fold_in(jax.random.key(1), step // 64)
        states, transition = PRIOR.draw(key, 64 * config.batch, N + 1)
        rows = slice(step % 64 * config.batch, (step % 64 + 1) * config.batch)
        loss, slope = gradient(model, states[rows], transition[rows], "sampled")
        updates, moments = optimizer.update(slope, moments)
        model = optax.apply_updates(model, updates)
        losses.append(float(loss))
    snapshots = history(config)
    for a, b in zip(
        jax.tree.leaves(model), jax.tree.leaves(snapshots[-1].state.model), strict=True
    ):
        np.testing.assert_allclose(a, b, atol=2e-4)
    start, stop = snapshots[-2].step, snapshots[-1].step
    assert snapshots[-1].train_loss == pytest.approx(np.mean(losses[start:stop]), abs=1e-3)


def test_divergence_is_an_outcome() -> None:
    config = dataclasses.replace(CONFIG, optimizer="sgd", learning_rate=1e30)
    snapshots = history(config)
    assert snapshots[-1].diverged is not None
    assert 0 < snapshots[-1].diverged <= snapshots[-1].step
    assert all(snapshot.diverged is None for snapshot in snapshots[:-1])
    assert history(config, state=snapshots[-1].state) == []


@pytest.mark.parametrize(
    ("batch", "context", "pieces"),
    [(32, 48, 2), (64, 128, 8), (8, 8, 1), (31, 100, 1), (30, 100, 3), (2, 10**6, 2)],
)
def test_pieces_divide_the_batch_and_fit_the_cache(batch, context, pieces) -> None:
    assert training._pieces(batch, context) == pieces


@pytest.mark.slow
def test_gradients_of_trained_models_are_finite_in_every_parameter(tiny_run) -> None:
    for cell in tiny_run.cells:
        states, transition = cell.prior.draw(jax.random.key(6), 64, cell.recipe.task.context + 1)
        slope = jax.jit(jax.grad(next_state_loss), static_argnums=3)(
            cell.model(), states, transition, "sampled"
        )
        for path, array in jax.tree.leaves_with_path(slope):
            assert np.isfinite(array).all(), path
            assert np.any(array != 0), path


@pytest.mark.slow
def test_a_last_update_that_overflows_is_divergence_too() -> None:
    change = {"optimizer": "adamw", "learning_rate": 1e38, "weight_decay": 10.0}
    config = dataclasses.replace(CONFIG, steps=1, evaluations=1, **change)
    last = history(config)[-1]
    assert np.isfinite(last.train_loss)
    assert last.diverged == 1


def test_a_cyclic_chain_is_learned_exactly() -> None:
    config = dataclasses.replace(CONFIG, steps=300, learning_rate=1e-2)
    last = history(config, source=cyclic(C))[-1]
    assert last.train_loss < 0.02


@pytest.mark.slow
def test_the_expected_loss_has_the_gradient_of_the_sampled_one_in_the_mean() -> None:
    model = fresh().model
    states, transition = PRIOR.draw(jax.random.key(5), 40_000, N + 1)
    slopes = [
        jax.jit(jax.grad(next_state_loss), static_argnums=3)(model, states, transition, loss)
        for loss in ("sampled", "expected")
    ]
    for a, b in zip(*map(jax.tree.leaves, slopes), strict=True):
        np.testing.assert_allclose(a, b, atol=6e-3)
    one = jnp.array([[0, 1, 2, 0]])
    row = jnp.array([[[0.2, 0.5, 0.3], [0.1, 0.1, 0.8], [0.6, 0.2, 0.2]]])
    log_probs = jax.nn.log_softmax(model(one[:, :-1]))[0]
    by_hand = -np.mean([np.dot(row[0, s], log_probs[n]) for n, s in enumerate([0, 1, 2])])
    assert next_state_loss(model, one, row, "expected") == pytest.approx(by_hand, rel=1e-5)


def test_the_schedule() -> None:
    config = TrainingConfig(
        steps=100, warmup=10, schedule="cosine", optimizer="sgd", learning_rate=1.0
    )
    state = config.transform.init(jnp.zeros(1))
    rates = []
    for _ in range(101):
        update, state = config.transform.update(jnp.ones(1), state)
        rates.append(-float(update[0]))
    assert rates[0] == 0
    assert rates[5] == pytest.approx(0.5)
    assert rates[10] == pytest.approx(1)
    assert rates[55] == pytest.approx(0.5, abs=1e-5)
    assert rates[100] == pytest.approx(0, abs=1e-6)


def test_evaluations_and_progress_are_called() -> None:
    steps: list[int] = []
    snapshots = history(evaluate={"zero": lambda model: 0 * model.embedding}, on_steps=steps.append)
    assert all(set(snapshot.evaluations) == {"zero"} for snapshot in snapshots)
    assert steps == sorted(steps)
    assert steps[-1] == CONFIG.steps
    assert {64, 128} <= set(steps)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, r"train.steps: expected 1 to 2\^31 - 1, got 0"),
        ({"steps": 2**31}, r"train.steps: expected 1 to 2\^31 - 1, got 2147483648"),
        ({"epsilon": 0.0}, "train.epsilon: expected a positive number, got 0.0"),
        ({"learning_rate": float("nan")}, "train.learning_rate: expected a positive number"),
        ({"warmup": 9999}, "expected 0 to train.steps = 6000, got 9999"),
        ({"beta2": 1.0}, r"train.beta2: expected a number in \[0, 1\), got 1.0"),
        ({"weight_decay": -1.0}, "train.weight_decay"),
    ],
)
def test_values_out_of_range_are_refused(change, message) -> None:
    with pytest.raises(ValueError, match=message):
        TrainingConfig(**change)

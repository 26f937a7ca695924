"""Roles: heads and task vectors built by hand, for which every measure is known."""

from __future__ import annotations

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from iclens.chains import ChainPrior, cyclic
from iclens.circuits import roles
from iclens.circuits.interventions import contrast
from iclens.circuits.roles import head_scores, hypotheses, measure_roles, probe
from iclens.transformer import Transformer, TransformerConfig, forward

C, N = 3, 16
PRIOR = ChainPrior(C)
CHAINS = PRIOR.sample(jax.random.key(0), 6)
STATES = CHAINS.sample(jax.random.key(1), 40, N)[0]


def as_pattern(weights: np.ndarray) -> jax.Array:
    weights = np.tril(np.broadcast_to(weights, (len(STATES), N, N)))
    weights = np.where(weights.any(-1, keepdims=True), weights, np.tril(np.ones((N, N))))
    return jnp.asarray(weights / weights.sum(-1, keepdims=True))


def test_heads_of_known_patterns() -> None:
    states = np.asarray(STATES)
    previous = np.eye(N, k=-1)
    before = np.concatenate([np.full((len(states), 1), -1), states[:, :-1]], axis=1)
    follows = (before[:, None, :] == states[:, :, None]).astype(float)
    patterns = [as_pattern(w) for w in (previous, follows, np.ones((N, N)))]
    scores = head_scores((jnp.stack(patterns, axis=1),), STATES)
    assert scores.previous[0, 0] == pytest.approx(1)
    assert scores.uniformity[0, 0] == pytest.approx(0, abs=1e-6)
    seen = np.tril(follows)[:, N // 2 :].any(-1).mean()  # a new state has no earlier visit
    assert scores.induction[0, 1] == pytest.approx(seen, rel=1e-5)
    assert scores.uniformity[0, 2] == pytest.approx(1, abs=1e-5)
    assert scores.previous[0, 2] == pytest.approx(float(scores.previous_chance), rel=1e-5)
    assert scores.induction[0, 2] == pytest.approx(float(scores.induction_chance), rel=1e-5)
    assert scores.previous_chance == pytest.approx(np.mean(1 / np.arange(9, 17)), rel=1e-5)
    np.testing.assert_allclose(scores.by_lag.sum(-1), 1, atol=1e-5)
    np.testing.assert_allclose(scores.by_lag[0, 0], np.eye(N)[1], atol=1e-6)
    by_hand = np.mean(
        [
            [(before[b, : n + 1] == states[b, n]).mean() for n in range(N // 2, N)]
            for b in range(len(states))
        ]
    )
    assert scores.induction_chance == pytest.approx(by_hand, rel=1e-5)


def test_variance_explained_by_groups() -> None:
    rng = np.random.default_rng(0)
    group = rng.integers(0, 9, 20_000)
    signal, noise = rng.normal(size=(9, 4)), rng.normal(size=(20_000, 4))
    between = signal[group]
    assert roles._explained(between, group) == pytest.approx(1)
    assert roles._explained(noise, group) == pytest.approx(8 / 19_999, rel=0.5)
    mixed = roles._explained(between + noise, group)
    share = between.var(0).sum() / (between.var(0).sum() + 4)
    assert mixed == pytest.approx(share, abs=0.01)
    assert roles._explained(between, group // 3) < mixed


def test_linear_fits_are_judged_on_samples_left_out() -> None:
    rng = np.random.default_rng(0)
    features, weights = rng.normal(size=(400, 5)), rng.normal(size=(5, 3))
    fit = np.arange(400) % 2 == 0
    assert roles._r_squared(features, features @ weights + 1, fit, ~fit) == pytest.approx(1)
    assert abs(roles._r_squared(features, rng.normal(size=(400, 3)), fit, ~fit)) < 0.1
    chain = np.arange(400) % 8
    apart = 10 * np.eye(8)[chain] + rng.normal(size=(400, 8))
    assert roles._readout(apart, chain, fit := np.arange(400) // 8 % 2 == 0, ~fit) == 1
    assert roles._readout(rng.normal(size=(400, 8)), chain, fit, ~fit) < 0.3


def test_a_probe_alternates_its_chains_and_pairs_different_ones() -> None:
    for source, count in ((CHAINS, 6), (PRIOR, 32), (PRIOR.sample(jax.random.key(3), 50), 32)):
        on = probe(source, N, key=jax.random.key(2))
        chain = np.asarray(on.chain)
        assert len(on.transition) == count
        assert np.all(np.bincount(chain) == roles.PROBE_SEQUENCES)
        assert np.all(chain[on.other] != chain)
        assert np.all(chain[on.third] != chain)
        assert np.all(chain[on.third] != chain[on.other])
    with pytest.raises(ValueError, match="at least two chains to tell apart, got 1"):
        probe(cyclic(3), N, key=jax.random.key(0))


@pytest.mark.slow
def test_swapping_task_vectors_moves_what_reads_only_them() -> None:
    """With a read-out that sees the last attention layer alone, the swap moves everything."""
    model = Transformer(TransformerConfig(width=8), C, N, key=jax.random.key(0))
    on = probe(CHAINS, N, key=jax.random.key(2))
    deaf = eqx.tree_at(lambda m: m.mlps[1].weight_out, model, replace_fn=lambda w: 0 * w)
    deaf = eqx.tree_at(lambda m: m.attentions[1].output, deaf, replace_fn=lambda w: 0 * w)
    assert roles._activations(deaf, on)["moved"] == pytest.approx(0, abs=1e-5)
    found = roles._activations(model, on)
    phi = forward(model, on.states).senders.values[3][:, -1]
    np.testing.assert_allclose(found["phi"], phi, atol=1e-5)
    measured = measure_roles(model, on, contrast("resample", PRIOR, 16, N, key=jax.random.key(4)))
    assert measured.readout_chance == pytest.approx(1 / 6)
    assert 1 <= measured.dimension <= measured.dimension_limit == 5
    assert measured.encoder_pair >= measured.encoder_state


@pytest.fixture(scope="module")
def plain() -> roles.Roles:
    model = Transformer(TransformerConfig(width=8), C, N, key=jax.random.key(0))
    ood = contrast("resample", PRIOR, 16, N, key=jax.random.key(4))
    return measure_roles(model, probe(CHAINS, N, key=jax.random.key(2)), ood)


def test_verdicts_need_every_criterion(plain) -> None:
    lag = jnp.stack([jnp.eye(N)[1], jnp.ones(N) / N])[:, None]
    induction = {"induction": jnp.array([[0.3], [0.95]]), "induction_chance": jnp.array(0.3)}
    perfect = dataclasses.replace(
        plain,
        heads=dataclasses.replace(plain.heads, by_lag=lag, **induction),
        induction_without_layer=0.3,
        ood_loss=0.2,
        ood_loss_error=0.01,
        decoder=0.0,
    )
    verdicts = hypotheses(perfect)
    assert verdicts["statistical induction head"].passes
    assert not verdicts["task recognition head"].passes
    for change in (
        {"induction_without_layer": 0.9},
        {"ood_loss": 0.01},
        {"heads": dataclasses.replace(perfect.heads, by_lag=lag[::-1])},
        {"heads": dataclasses.replace(perfect.heads, induction=jnp.array([[0.9], [0.5]]))},
    ):
        changed = hypotheses(dataclasses.replace(perfect, **change))
        assert not changed["statistical induction head"].passes
    tasks = dataclasses.replace(
        perfect,
        heads=dataclasses.replace(perfect.heads, induction=jnp.array([[0.3], [0.4]])),
        encoder_pair=0.9,
        encoder_state=0.4,
        pool=0.9,
        pool_chance=0.0,
        decoder=0.9,
        decoder_chance=0.2,
        readout=0.9,
    )
    assert hypotheses(tasks)["task recognition head"].passes
    assert not hypotheses(tasks)["statistical induction head"].passes


def test_models_without_the_parts_are_refused() -> None:
    on = probe(CHAINS, N, key=jax.random.key(2))
    ood = contrast("resample", PRIOR, 4, N, key=jax.random.key(4))
    for config in (TransformerConfig(width=8, layers=1), TransformerConfig(attention_only=True)):
        with pytest.raises(ValueError, match="at least two layers, with MLPs"):
            measure_roles(Transformer(config, C, N, key=jax.random.key(0)), on, ood)

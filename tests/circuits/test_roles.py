"""Roles: heads and task vectors built by hand, for which every measure is known."""

from __future__ import annotations

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from iclens.chains import ChainPrior, cyclic
from iclens.circuits import interventions, roles
from iclens.circuits.graph import Graph
from iclens.circuits.interventions import contrast, mask_effects
from iclens.circuits.roles import head_scores, hypotheses, measure_roles, probe
from iclens.separation import linear_readout
from iclens.transformer import Edges, Transformer, TransformerConfig, forward

C, N = 3, 16
PRIOR = ChainPrior(C)
CHAINS = PRIOR.sample(jax.random.key(0), 6)
STATES = CHAINS.sample(jax.random.key(1), 40, N)[0]


run = eqx.filter_jit(forward)


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
    assert linear_readout(apart, chain, fit := np.arange(400) // 8 % 2 == 0, ~fit) == 1
    assert linear_readout(rng.normal(size=(400, 8)), chain, fit, ~fit) < 0.3


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


def test_with_two_chains_the_null_of_the_swap_is_the_own_chain() -> None:
    on = probe(PRIOR.sample(jax.random.key(3), 2), N, key=jax.random.key(2))
    chain = np.asarray(on.chain)
    assert np.all(chain[on.other] != chain)
    assert np.all(chain[on.third] == chain)
    assert not np.any(on.third == np.arange(len(chain)))


def kl(target: np.ndarray, logits: np.ndarray) -> float:
    log_probs = np.asarray(jax.nn.log_softmax(jnp.asarray(logits)), np.float64)
    return float((target * (np.log(target) - log_probs)).sum())


@pytest.mark.slow
def test_measures_by_explicit_loops(monkeypatch) -> None:
    """Every measure again, from whole forward passes, one sequence after another."""
    monkeypatch.setattr(interventions, "CHUNK_POSITIONS", 4 * 6 * N)  # several chunks of rounds
    model = Transformer(TransformerConfig(width=8, heads=2), C, N, key=jax.random.key(0))
    leaves, tree = jax.tree.flatten(model)
    keys = jax.random.split(jax.random.key(9), len(leaves))
    moved = [x + 0.3 * jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)]
    model = jax.tree.unflatten(tree, moved)
    graph, on = Graph(model.config), probe(CHAINS, N, key=jax.random.key(2))
    ood = contrast("resample", PRIOR, 16, N, key=jax.random.key(4))
    got = measure_roles(model, on, ood)
    states, chain = np.asarray(on.states), np.asarray(on.chain)
    clean = forward(model, states)
    values = dict(zip(graph.senders, clean.senders.values, strict=True))
    phi = np.asarray(values["att2.0"] + values["att2.1"], np.float64)[:, -1]
    np.testing.assert_allclose(roles._activations(model, on)["phi"], phi, atol=1e-5)

    def swapped(i: int, j: int) -> np.ndarray:
        mask = graph.mask(cut=[*graph.from_sender("att2.0"), *graph.from_sender("att2.1")])
        other = run(model, states[j][None]).senders
        edges = Edges(jnp.asarray(mask), other)
        return np.asarray(run(model, states[i][None], edges).logits[0, -1])

    for measure, which in ((got.decoder, on.other), (got.decoder_chance, on.third)):
        own = after = 0.0
        for i in range(len(states)):
            row = np.asarray(on.transition[chain[on.other[i]], states[i, -1]], np.float64)
            own += kl(row, clean.logits[i, -1])
            after += kl(row, swapped(i, int(which[i])))
        assert measure == pytest.approx(1 - after / own, abs=1e-4)

    written = np.asarray(values["mlp1"], np.float64)[:, N // 2 :]
    for measure, span in ((got.encoder_pair, 2), (got.encoder_state, 1)):
        groups: dict[tuple, list] = {}
        for i, n in np.ndindex(len(states), N - N // 2):
            here = tuple(states[i, n + N // 2 + 1 - span : n + N // 2 + 1].tolist())
            groups.setdefault(here, []).append(written[i, n])
        centre = written.mean((0, 1))
        between = sum(len(g) * ((np.mean(g, 0) - centre) ** 2).sum() for g in groups.values())
        assert measure == pytest.approx(between / ((written - centre) ** 2).sum(), abs=1e-5)

    best = f"att2.{int(np.asarray(got.heads.induction)[1].argmax())}"
    earlier = [f"{sender}->{best}.k" for sender in ("att1.0", "att1.1", "mlp1")]
    others = forward(model, states[np.asarray(on.other)]).senders
    edges = Edges(jnp.asarray(graph.mask(cut=earlier)), others)
    blind = head_scores(forward(model, states, edges).attention, on.states)
    assert got.induction_without_layer == pytest.approx(
        float(blind.induction[1, int(best[-1])]), abs=1e-5
    )
    cut = mask_effects(model, ood, graph.mask(cut=graph.from_sender(best))[None]).loss
    assert got.ood_loss == pytest.approx(float(np.mean(cut)), abs=1e-6)

    means = np.stack([phi[chain == k].mean(0) for k in range(6)])
    spectrum = np.linalg.svd(means - means.mean(0), compute_uv=False) ** 2
    assert got.dimension == pytest.approx(spectrum.sum() ** 2 / (spectrum**2).sum(), rel=1e-6)
    assert got.dimension_limit == 5
    assert (got.readout_chance, got.encoder_chance) == pytest.approx((1 / 6, 8 / (192 * 8 - 1)))
    # What fits the even rounds is judged on the odd ones: against the former it looks better.
    rounds = np.arange(len(phi)) // 6 % 2 == 0
    assert got.readout == pytest.approx(linear_readout(phi, chain, rounds, ~rounds), abs=1e-9)
    assert got.readout < linear_readout(phi, chain, rounds, rounds)
    assert got.pool_chance < 0.2 < got.pool


@pytest.mark.slow
def test_a_model_that_is_deaf_to_task_vectors_is_not_moved() -> None:
    model = Transformer(TransformerConfig(width=8), C, N, key=jax.random.key(0))
    on = probe(CHAINS, N, key=jax.random.key(2))
    deaf = eqx.tree_at(lambda m: m.mlps[1].weight_out, model, replace_fn=lambda w: 0 * w)
    deaf = eqx.tree_at(lambda m: m.attentions[1].output, deaf, replace_fn=lambda w: 0 * w)
    assert roles._activations(deaf, on)["moved"] == pytest.approx(0, abs=1e-5)
    assert abs(roles._activations(model, on)["moved"]) > 1e-3


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


def test_a_model_of_one_layer_is_refused() -> None:
    on = probe(CHAINS, N, key=jax.random.key(2))
    ood = contrast("resample", PRIOR, 4, N, key=jax.random.key(4))
    model = Transformer(TransformerConfig(width=8, layers=1), C, N, key=jax.random.key(0))
    with pytest.raises(ValueError, match="at least two layers"):
        measure_roles(model, on, ood)


def test_a_model_of_attention_only_is_asked_for_an_induction_head_alone() -> None:
    """Its measures are those of the same model with MLPs that write nothing."""
    config = TransformerConfig(width=8, attention_only=True)
    model = Transformer(config, C, N, key=jax.random.key(0))
    on = probe(CHAINS, N, key=jax.random.key(2))
    ood = contrast("resample", PRIOR, 16, N, key=jax.random.key(4))
    got = measure_roles(model, on, ood)
    assert set(hypotheses(got)) == {"statistical induction head"}
    assert np.isnan([got.encoder_pair, got.encoder_state, got.encoder_chance]).all()
    whole = Transformer(TransformerConfig(width=8), C, N, key=jax.random.key(0))
    silent = eqx.tree_at(
        lambda m: (m.embedding, m.unembedding, m.attentions, *(p.weight_out for p in m.mlps)),
        whole,
        (
            model.embedding,
            model.unembedding,
            model.attentions,
            *(0 * mlp.weight_out for mlp in whole.mlps),
        ),
    )
    expected = measure_roles(silent, on, ood)
    for name in ("induction_without_layer", "pool", "decoder", "readout", "dimension", "ood_loss"):
        assert getattr(got, name) == pytest.approx(getattr(expected, name), abs=1e-4), name

"""Circuit search: what was planted is found, and what stands beside it means something."""

from __future__ import annotations

import equinox as eqx
import jax
import numpy as np
import pytest

from iclens.chains import ChainPrior
from iclens.circuits import search
from iclens.circuits.graph import Graph
from iclens.circuits.interventions import Contrast, contrast, mask_effects
from iclens.circuits.search import find_circuit
from iclens.transformer import Transformer, TransformerConfig

pytestmark = pytest.mark.slow
C, N = 3, 8
CHAINS = ChainPrior(C).sample(jax.random.key(0), 5)


@pytest.fixture(scope="module")
def on() -> Contrast:
    return contrast("resample", CHAINS, 32, N, key=jax.random.key(1))


@pytest.fixture(scope="module")
def model() -> Transformer:
    return Transformer(TransformerConfig(width=8, heads=2), C, N, key=jax.random.key(2))


def test_a_planted_circuit_is_found(on, model) -> None:
    # Of all components only the second MLP writes anything, and it reads the embedding alone.
    planted = eqx.tree_at(
        lambda m: [*(a.output for a in m.attentions), m.mlps[0].weight_out],
        model,
        replace_fn=lambda weight: 0 * weight,
    )
    circuit = find_circuit(planted, on, epsilon=1e-4, key=jax.random.key(3))
    assert set(circuit.edges) == {"embed->mlp2", "embed->out", "mlp2->out"}
    assert circuit.faithfulness == pytest.approx(1, abs=1e-4)
    assert circuit.completeness == pytest.approx(1, abs=0.2)
    assert circuit.minimality > 0


def test_the_trail_is_greedy_and_exact(on, model) -> None:
    graph = Graph(model.config)
    circuit = find_circuit(model, on, key=jax.random.key(3))
    assert sorted(circuit.trail) == sorted(graph.edges)
    left = list(graph.edges)
    for edge, kl in list(zip(circuit.trail, circuit.trail_kl, strict=True))[:4]:
        masks = np.stack([graph.mask(keep=[e for e in left if e != other]) for other in left])
        each = np.asarray(mask_effects(model, on, masks).kl).mean(0)
        assert kl == pytest.approx(each.min(), abs=1e-6)
        assert each[left.index(edge)] == pytest.approx(each.min(), abs=1e-6)
        left.remove(edge)
    masks = np.stack([graph.mask(keep=circuit.edges), graph.mask(cut=circuit.edges)])
    kept, rest = np.asarray(mask_effects(model, on, masks).kl).mean(0)
    assert circuit.faithfulness == pytest.approx(1 - kept / circuit.total, abs=1e-4)
    assert circuit.faithfulness >= 0.9
    assert circuit.completeness == pytest.approx(rest / circuit.total, abs=1e-4)
    fewer = circuit.trail_kl[len(circuit.trail) - len(circuit.edges) :]
    assert np.all(fewer > 0.1 * circuit.total)  # no smaller set on the trail would do
    assert circuit.faithfulness > circuit.random.max()
    # Minimality and the null, again, mask by mask.
    fewer_masks = np.stack(
        [graph.mask(keep=[e for e in circuit.edges if e != other]) for other in circuit.edges]
    )
    without = np.asarray(mask_effects(model, on, fewer_masks).kl).mean(0)
    assert circuit.minimality == pytest.approx((without.min() - kept) / circuit.total, abs=1e-5)
    draws = np.argsort(jax.random.uniform(jax.random.key(3), (32, len(graph.edges))), axis=1)
    sets = (np.asarray(draws) < len(circuit.edges)).astype(np.float32)
    assert np.all(sets.sum(1) == len(circuit.edges))
    shares = np.asarray(mask_effects(model, on, sets).kl).mean(0) / circuit.total
    np.testing.assert_allclose(circuit.random, 1 - shares, atol=1e-5)


def test_exchanging_edges_finds_a_smaller_circuit(on, model) -> None:
    """From a circuit within epsilon that elimination alone would not make smaller."""
    graph = Graph(model.config)
    circuit = find_circuit(model, on, key=jax.random.key(3))
    limit = 0.1 * circuit.total
    worst = list(reversed(circuit.trail[-len(graph.edges) + 1 :]))  # keeps what goes first
    kept = np.isin(graph.edges, worst)
    found = search._exchange(model, on, on, kept, limit)
    assert found is not None
    assert found.sum() == kept.sum() - 1
    kl = float(np.asarray(mask_effects(model, on, found[None].astype(np.float32)).kl).mean())
    assert kl <= limit
    assert search._exchange(model, on, on, np.isin(graph.edges, circuit.edges), limit) is None


def test_bad_searches_are_refused(on, model) -> None:
    with pytest.raises(ValueError, match="epsilon: expected a number between 0 and 1, got 2"):
        find_circuit(model, on, epsilon=2.0, key=jax.random.key(0))
    silent = eqx.tree_at(lambda m: m.unembedding, model, replace_fn=lambda weight: 0 * weight)
    with pytest.raises(ValueError, match="changes nothing"):
        find_circuit(silent, on, key=jax.random.key(0))

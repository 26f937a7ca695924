"""The memory model: what it computes, what it learns, the geometry of its task vectors."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from iclens.chains import ChainPrior, ChainSet
from iclens.theory.memory import MemoryConfig, MemoryModel, capacity, last_task_vectors
from iclens.theory.memory import geometry as measure_geometry

CHAINS = ChainPrior(3).sample(jax.random.key(0), 4)
MODEL = MemoryModel(MemoryConfig(4, 8), 3, 10, key=jax.random.key(1))


def geometry(model, chains, sequences, key):
    return measure_geometry(last_task_vectors, model, chains, sequences, model.context, key=key)


def test_the_model_by_explicit_loops() -> None:
    states = np.asarray(CHAINS.sample(jax.random.key(2), 3, 10)[0])
    logits = MODEL(jnp.asarray(states))
    table = np.asarray(MODEL.encoder, np.float64).reshape(3, 3, 4)
    for b in range(3):
        for n in range(10):
            pairs = [table[states[b, m - 1], states[b, m]] for m in range(1, n + 1)]
            phi = np.mean(pairs, axis=0) if pairs else np.zeros(4)
            read = np.concatenate([phi, np.eye(3)[states[b, n]]])
            hidden = np.maximum(read @ MODEL.weight_in + MODEL.bias_in, 0)
            np.testing.assert_allclose(
                logits[b, n], hidden @ MODEL.weight_out + MODEL.bias_out, atol=1e-5
            )


@pytest.mark.slow
def test_task_vectors_of_counted_pairs_tell_the_chain() -> None:
    """With the identity as the encoder, phi holds the pair frequencies: known means and spread."""
    counter = eqx.tree_at(lambda m: m.encoder, MODEL, jnp.eye(9))
    long = MemoryModel(MemoryConfig(9, 8), 3, 2000, key=jax.random.key(1))
    long = eqx.tree_at(lambda m: m.encoder, long, jnp.eye(9))
    apart = geometry(long, CHAINS, 16, key=jax.random.key(3))
    assert apart.readout == 1
    assert apart.separation > 3
    flow = CHAINS.stationary[:, :, None] * CHAINS.transition
    spectrum = np.linalg.eigvalsh(np.cov(flow.reshape(4, 9).T))
    exact = spectrum.sum() ** 2 / (spectrum**2).sum()
    assert apart.dimension == pytest.approx(exact, rel=0.05)
    near = geometry(counter, CHAINS, 16, key=jax.random.key(3))
    assert near.separation < apart.separation
    same = ChainSet(np.repeat(CHAINS.transition[:1], 4, axis=0))
    assert geometry(long, same, 64, key=jax.random.key(3)).readout < 0.5


def test_capacity_is_where_memory_stops_winning() -> None:
    chains = np.array([32, 8, 128, 512])
    gen, mem = np.array([0.1, 0.1, 0.1, 0.1]), np.array([0.05, 0.01, 0.2, 0.3])
    assert capacity(chains, mem, gen) == (32, 128)
    assert capacity(chains, gen, gen + 1) == (512, None)
    assert capacity(chains, gen + 1, gen) == (None, 8)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: MemoryConfig(0), "memory.width: expected at least 1, got 0"),
        (lambda: MemoryConfig(2, 0), "memory.hidden: expected at least 1, got 0"),
        (lambda: geometry(MODEL, CHAINS, 2, key=jax.random.key(0)), "4 sequences of each, got 4"),
    ],
)
def test_bad_input_is_one_clear_error(call, message) -> None:
    with pytest.raises(ValueError, match=message):
        call()

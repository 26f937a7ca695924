"""Models of every shape, trained a little, and sequences for them; in the environment of `make
interop` only."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from iclens import (
    ChainPrior,
    Edges,
    TrainingConfig,
    Transformer,
    TransformerConfig,
    forward,
    initial_state,
    train,
)
from iclens.transformer import Senders

SHAPES = {
    f"{config.positions}-{config.norm}-{config.activation}-{config.layers}x{config.heads}"
    + "-attention" * config.attention_only: config
    for config in (
        TransformerConfig(width=16),
        TransformerConfig(width=16, heads=2, norm="layer", attention_only=True),
        TransformerConfig(width=16, positions="absolute", norm="layer", activation="gelu"),
        TransformerConfig(width=16, positions="absolute", heads=4, norm="rms", layers=3),
        TransformerConfig(width=8, positions="absolute", norm="none", layers=1, hidden=5),
        TransformerConfig(width=16, positions="rotary", heads=2, norm="rms"),
        TransformerConfig(width=16, positions="rotary", norm="none", attention_only=True),
        TransformerConfig(width=16, positions="none", heads=2, norm="layer", activation="gelu"),
    )
}
TRAINED = ("relative-rms-relu-2x1", "absolute-layer-gelu-2x1")
STATES, CONTEXT = 3, 16


def pytest_itemcollected(item: pytest.Item) -> None:
    """Warnings of the other libraries are no errors; those of iclens are."""
    item.add_marker(pytest.mark.filterwarnings("default", "error:::iclens"))


@pytest.fixture(scope="session", params=SHAPES)
def model(request) -> Transformer:
    """Trained for some steps, or drawn; no parameter is 0, also those that start there."""
    drawn = Transformer(SHAPES[request.param], STATES, CONTEXT, key=jax.random.key(0))
    if request.param in TRAINED:
        chains = ChainPrior(STATES).sample(jax.random.key(1), 4)
        recipe = TrainingConfig(steps=200, evaluations=1)
        *_, last = train(initial_state(drawn, recipe), chains, recipe, key=jax.random.key(2))
        return last.state.model
    random = np.random.default_rng(0)
    return jax.tree.map(lambda array: array + random.normal(0, 0.1, array.shape), drawn)


@pytest.fixture(scope="session")
def states() -> np.ndarray:
    return np.asarray(jax.random.randint(jax.random.key(3), (5, CONTEXT), 0, STATES))


@pytest.fixture(scope="session")
def cut(states: np.ndarray) -> Callable[[Transformer, Callable[[str], bool]], np.ndarray]:
    """Our logits with some edges cut, which then carry 0."""

    def logits(model: Transformer, is_cut: Callable[[str], bool]) -> np.ndarray:
        clean = forward(model, jnp.asarray(states))
        zeros = tuple(jnp.zeros_like(value) for value in clean.senders.values)
        mask = jnp.asarray([not is_cut(edge) for edge in model.config.edges], jnp.float32)
        assert not mask.all()
        found = model(jnp.asarray(states), Edges(mask, Senders(zeros, clean.senders.lag)))
        assert jnp.abs(found - clean.logits).max() > 1e-4
        return np.asarray(found)

    return logits

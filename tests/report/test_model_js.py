"""The script that runs models in the page, against the library: any shape of model, any chains."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import resources
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from playwright.sync_api import Browser, Page

from iclens.chains import (
    ChainPrior,
    ChainSet,
    DirichletRows,
    DoublyStochasticPrior,
    Prior,
    SparsePrior,
)
from iclens.lab.files import arrays_to_tree, tree_to_arrays
from iclens.predictors import reference_predictors
from iclens.transformer import Transformer, TransformerConfig, forward

FUNCTIONS = ("readArrays", "forwardPass", "referencePredictions")
STATES, CONTEXT = 5, 12
CONFIGS = {
    "default": TransformerConfig(width=16),
    "heads": TransformerConfig(width=16, heads=2, hidden=24),
    "layer norm": TransformerConfig(width=16, norm="layer"),
    "no norm": TransformerConfig(width=16, norm="none"),
    "absolute": TransformerConfig(width=16, positions="absolute"),
    "rotary": TransformerConfig(width=16, heads=2, positions="rotary"),
    "no positions": TransformerConfig(width=16, positions="none"),
    "gelu": TransformerConfig(width=16, activation="gelu"),
    "attention only": TransformerConfig(width=16, attention_only=True),
    "one layer": TransformerConfig(width=16, layers=1),
    "three layers": TransformerConfig(width=16, layers=3, heads=2),
    "circuit": TransformerConfig(
        width=16,
        circuit=("embed->att1.0.v", "lag->att1.0", "att1.0->att2.0.k", "embed->att2.0.q",
                 "embed->att2.0.v", "att2.0->mlp2", "att2.0->out", "mlp2->out"),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def page(browser: Browser) -> Iterator[Page]:
    script = (resources.files("iclens.report") / "assets" / "model.js").read_text("utf-8")
    page = browser.new_page()
    exported = "; ".join(f"window.{name} = {name}" for name in FUNCTIONS)
    page.add_script_tag(content=f"(() => {{ 'use strict'; {script}; {exported} }})();")
    yield page
    page.close()


def random_model(config: TransformerConfig) -> Transformer:
    """A model whose every parameter, biases too, is drawn at random."""
    rng = np.random.default_rng(3)
    model = Transformer(config, STATES, CONTEXT, key=jax.random.key(0))
    drawn = {
        name: (array + 0.1 * rng.standard_normal(array.shape)).astype(np.float32)
        for name, array in tree_to_arrays(model).items()
    }
    return arrays_to_tree(model, drawn)


def run_in(page: Page, model: Transformer, states: list[int]) -> dict[str, Any]:
    weights = {
        name: {"shape": array.shape, "data": array.ravel().tolist()}
        for name, array in tree_to_arrays(model).items()
    }
    config = model.config
    found: dict[str, Any] = page.evaluate(
        """([weights, config, states]) => {
            for (const array of Object.values(weights)) array.data = Float32Array.from(array.data);
            const found = forwardPass(weights, config, states);
            const attention = found.attention.map((heads) => heads.map((head) => [...head]));
            return { ...found, phi: [...found.phi], attention };
        }""",
        [weights, {**vars(config), "hidden": config.mlp_width}, states],
    )
    return found


@pytest.mark.parametrize(("name", "length"), [("default", 1), *((n, CONTEXT) for n in CONFIGS)])
def test_a_forward_pass_is_that_of_the_library(page: Page, name: str, length: int) -> None:
    config = CONFIGS[name]
    model = random_model(config)
    states = np.random.default_rng(length).integers(0, STATES, length).tolist()
    expected = forward(model, jnp.array([states]))
    found = run_in(page, model, states)
    np.testing.assert_allclose(found["logits"], expected.logits[0], atol=2e-5)
    np.testing.assert_allclose(
        found["probabilities"], jax.nn.softmax(expected.logits[0]), atol=1e-5
    )
    for layer, patterns in enumerate(expected.attention):
        pattern = np.reshape(found["attention"][layer], patterns.shape[1:])
        np.testing.assert_allclose(pattern, patterns[0], atol=1e-5)
    last = [
        value
        for name, value in zip(config.senders, expected.senders.values, strict=True)
        if name.startswith(f"att{config.layers}.")
    ]
    phi = np.sum([value[0, -1] for value in last], axis=0)
    np.testing.assert_allclose(found["phi"], phi, atol=2e-5)


def predictions_in(page: Page, states: list[int], prior: Prior, chains: Any) -> dict[str, Any]:
    one_point = prior.one_point_pseudo_counts
    tables = {
        "C": prior.states,
        "onePoint": one_point.tolist() if np.isfinite(one_point).all() else None,
        "pseudoCounts": prior.pseudo_counts.ravel().tolist(),
        "successors": prior.successors,
        "chains": chains
        and {
            "count": chains.count,
            "transition": chains.transition.ravel().tolist(),
            "stationary": chains.stationary.ravel().tolist(),
            "prior": chains.weights.tolist(),
        },
    }
    found: dict[str, Any] = page.evaluate(
        "([states, tables]) => referencePredictions(states, tables)", [states, tables]
    )
    return found


@pytest.mark.parametrize(("count", "concentration"), [(1, 1.0), (40, 0.2)])
def test_references_are_those_of_the_library(page: Page, count: int, concentration: float) -> None:
    prior = ChainPrior(4, concentration)
    drawn = prior.sample(jax.random.key(1), count)
    chains = ChainSet(drawn.transition, np.random.default_rng(2).dirichlet(np.full(count, 0.3)))
    for length in (1, 30):
        states = np.random.default_rng(length).integers(0, 4, length).tolist()
        found = predictions_in(page, states, prior, chains)
        for name, predictor in reference_predictors(chains, prior).items():
            expected = np.exp(predictor(np.array([states])))[0, -1]
            np.testing.assert_allclose(found[name], expected, atol=1e-4, err_msg=name)
    assert set(predictions_in(page, states, prior, None)) == {"1-Gen", "2-Gen"}


@pytest.mark.parametrize(
    "prior",
    [
        pytest.param(DirichletRows.cyclic(4, drift=3.0), marks=pytest.mark.slow, id="cyclic"),
        pytest.param(SparsePrior(4, 2), id="sparse"),
        pytest.param(DoublyStochasticPrior(4), marks=pytest.mark.slow, id="doubly stochastic"),
    ],
)
def test_references_know_the_structure_of_chains(page: Page, prior: Prior) -> None:
    chains = prior.sample(jax.random.key(1), 5)
    own = [0, 1, 0, 1, 0, 2, 0, 3, 0]  # of which state 0 has three successors, one too many
    for states in ([0], own[:3], own[:5], own, [1, 1, 2, 1, 3, 2, 0, 0, 0, 1]):
        found = predictions_in(page, states, prior, None)
        for name, predictor in reference_predictors(None, prior).items():
            expected = np.exp(predictor(np.array([states])))[0, -1]
            if np.isnan(expected).any():
                assert found[name] is None
            else:
                np.testing.assert_allclose(found[name], expected, atol=1e-4, err_msg=name)
    assert set(predictions_in(page, [0, 1], prior, chains)) > {"1-Mem", "2-Mem"}


def test_there_may_be_very_many_chains(page: Page) -> None:
    found = page.evaluate(
        """() => {
            const count = 300000, fill = (size) => new Float32Array(size).fill(0.5);
            const chains = {
                count, transition: fill(4 * count), stationary: fill(2 * count), prior: fill(count),
            };
            const prior = { onePoint: [1, 1], pseudoCounts: [1, 1, 1, 1], successors: 2 };
            return referencePredictions([0, 1], { C: 2, ...prior, chains });
        }"""
    )
    assert found["2-Mem"] == found["1-Mem"] == [0.5, 0.5]


def test_impossible_chains_have_no_weight_and_none_is_told(page: Page) -> None:
    chains = ChainSet([[[0.5, 0.5, 0], [0, 0.5, 0.5], [1, 0, 0]], np.full((3, 3), 1 / 3)])
    prior = ChainPrior(3)
    states = [0, 2]  # which the first chain cannot do
    found = predictions_in(page, states, prior, chains)
    np.testing.assert_allclose(found["2-Mem"], [1 / 3] * 3)
    alone = ChainSet([[[0.5, 0.5, 0], [0, 0.5, 0.5], [1, 0, 0]]])
    found = predictions_in(page, states, prior, alone)
    assert found["2-Mem"] is None
    np.testing.assert_allclose(found["1-Mem"], [1, 0, 0])


def test_arrays_are_read_as_they_were_written(page: Page) -> None:
    rng = np.random.default_rng(0)
    halves = np.arange(65536, dtype=np.uint16).view(np.float16)
    arrays = {
        "halves": halves[np.isfinite(halves)],
        "infinite": np.array([np.inf, -np.inf], np.float16),
        "single": np.asarray(rng.standard_normal((3, 4)).astype(np.float32).T, order="C"),
        "whole": np.array([[-(2**31), 7]], np.int32),
        "bytes": np.arange(5, dtype=np.uint8),
        "flags": np.array([True, False]),
    }
    content = safetensors.numpy.save(arrays, {"words": '["a", "é"]'})
    found = page.evaluate(
        """(bytes) => {
            const { arrays, metadata } = readArrays(Uint8Array.from(bytes));
            for (const array of Object.values(arrays)) array.data = [...array.data];
            return { metadata, arrays };
        }""",
        list(content),
    )
    assert found["metadata"] == {"words": '["a", "é"]'}
    for name, array in arrays.items():
        assert found["arrays"][name]["shape"] == list(array.shape)
        read = np.reshape(np.array(found["arrays"][name]["data"], float), array.shape)
        np.testing.assert_array_equal(read, array.astype(float), err_msg=name)

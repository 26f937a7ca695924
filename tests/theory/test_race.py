"""The race: sub-circuits, and when something begins to hold."""

from __future__ import annotations

import numpy as np
import pytest

from iclens.theory.race import circuit_edges, first_lasting, predicted_visits
from iclens.transformer import TransformerConfig


def test_the_circuits_of_one_head() -> None:
    config = TransformerConfig()
    assert circuit_edges(config, "whole") == ()
    induction = set(circuit_edges(config, "induction"))
    assert induction == {
        *("embed->att1.0.v", "lag->att1.0", "att1.0->att2.0.k", "embed->att2.0.q"),
        *("embed->att2.0.v", "att2.0->out", "att2.0->mlp2", "mlp2->out"),
    }
    recognition = set(circuit_edges(config, "recognition"))
    assert recognition == {
        *("embed->att1.0.v", "lag->att1.0", "embed->mlp1", "att1.0->mlp1", "mlp1->att2.0.v"),
        *("att2.0->mlp2", "embed->mlp2", "mlp2->out"),
    }
    for circuit in ("induction", "recognition"):
        many = TransformerConfig(heads=2)
        assert set(circuit_edges(many, circuit)) <= set(many.edges)


@pytest.mark.parametrize(
    ("config", "circuit", "message"),
    [
        (TransformerConfig(), "memory", "one of whole, induction, recognition, got 'memory'"),
        (TransformerConfig(layers=3), "whole", "a model of two layers"),
        (TransformerConfig(attention_only=True), "whole", "with MLPs"),
    ],
)
def test_models_without_the_circuits_are_refused(config, circuit, message) -> None:
    with pytest.raises(ValueError, match=message):
        circuit_edges(config, circuit)


def test_when_something_begins_to_hold() -> None:
    steps = np.array([0, 10, 20, 30, 40])
    holds = np.array([0, 1, 0, 1, 1])
    assert first_lasting(steps, holds) == (20, 30)
    assert first_lasting(steps, holds, at_end=False) == (0, 10)
    assert first_lasting(steps, 0 * holds) == (40, np.inf)
    assert first_lasting(steps, 0 * holds + 1) == (0, 0)
    assert first_lasting(steps, np.array([0, 1, 1, 1, 0])) == (40, np.inf)


def test_both_criteria_of_the_race() -> None:
    found = predicted_visits(
        np.array([300.0, 300.0, 300.0, np.inf]),
        np.array([200.0, 500.0, np.inf, 100.0]),
        np.array([1.1, 1.1, 1.3, np.nan]),
        np.array([1.2, 1.2, 1.2, 1.2]),
    )
    assert found["equal times"].tolist() == [False, True, True, False]
    assert found["loss at tau"].tolist() == [False, False, True, False]

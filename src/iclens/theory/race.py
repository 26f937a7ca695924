"""The race behind K1*: each circuit trained alone, and what that predicts for both together.

K1* is kinetic: below it the memorising circuit is there before the induction head forms (Gibson,
Cui and Reddy 2026).  Trained alone, as a model that has no other edges, the induction circuit tells
when that is; the recognition circuit, how much it would have learned by then.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int

from iclens.transformer import TransformerConfig

CIRCUITS = ("whole", "induction", "recognition")


def circuit_edges(config: TransformerConfig, circuit: str) -> tuple[str, ...]:
    """The edges of a circuit in a two-layer model, all heads taking part.

    induction: the first layer copies the state before; the second finds the current state among
    those and reads what stands there, to the read-out and through the second MLP.
    recognition: the first MLP encodes pairs, the second layer averages, with nothing to choose
    positions by, and the second MLP decodes the average and the current state.

    Raises `ValueError` for an unknown circuit, or for a model without two layers, MLPs and
    relative positions.
    """
    if circuit not in CIRCUITS:
        raise ValueError(f"expected a circuit, one of {', '.join(CIRCUITS)}, got {circuit!r}")
    if config.layers != 2 or config.attention_only or config.positions != "relative":
        raise ValueError("the race needs a model of two layers, with MLPs and relative positions")
    heads = range(config.heads)
    if circuit == "whole":
        return ()
    before = [edge for h in heads for edge in (f"embed->att1.{h}.v", f"lag->att1.{h}")]
    if circuit == "induction":
        return (
            *before,
            *(f"att1.{g}->att2.{h}.k" for h in heads for g in heads),
            *(f"embed->att2.{h}.{port}" for h in heads for port in "qv"),
            *(f"att2.{h}->{receiver}" for h in heads for receiver in ("mlp2", "out")),
            "mlp2->out",
        )
    return (
        *before,
        "embed->mlp1",
        *(f"att1.{h}->mlp1" for h in heads),
        *(f"mlp1->att2.{h}.v" for h in heads),
        *(f"att2.{h}->mlp2" for h in heads),
        "embed->mlp2",
        "mlp2->out",
    )


def first_lasting(
    steps: Int[np.ndarray, " step"], holds: np.ndarray, at_end: bool = True
) -> tuple[float, float]:
    """When something begins to hold: the evaluation before, and the one from which on it holds.

    With `at_end` it must then hold to the end, else the first time counts.  The second is infinite,
    and the first the last step, where it does not.
    """
    holds = np.asarray(holds, bool)
    if at_end:
        holds = np.logical_and.accumulate(holds[::-1])[::-1]
    if not holds.any():
        return float(steps[-1]), float("inf")
    first = int(holds.argmax())
    return float(steps[max(first - 1, 0)]), float(steps[first])


def predicted_visits(
    induction: Float[np.ndarray, " run"],
    recognition: Float[np.ndarray, " run"],
    loss: Float[np.ndarray, " run"],
    loss_of_2_gen: Float[np.ndarray, " run"],
) -> dict[str, np.ndarray]:
    """Which runs the two circuits alone predict to visit G2, by two criteria.

    equal times: the induction circuit reaches 2-Gen (step `induction`) before the recognition
    circuit reaches 2-Mem (step `recognition`).
    loss at tau: at the step at which the induction circuit reaches 2-Gen, the recognition
    circuit's `loss` is still above that of 2-Gen.
    """
    reached = np.isfinite(induction)
    return {
        "equal times": reached & (induction < recognition),
        "loss at tau": reached & (loss > loss_of_2_gen),
    }

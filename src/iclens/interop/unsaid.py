"""What a user says of a checkpoint; apart from what reads it, so that help needs no jax."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Unsaid:
    """What the tensors of a checkpoint do not say; None where the configuration beside it does."""

    norm: Literal["rms", "layer", "none"] | None = None
    """Normalisation."""
    eps: float | None = None
    """Epsilon of the norms; TransformerLens' own default is 1e-5."""
    activation: Literal["relu", "gelu"] | None = None
    """Activation of the MLPs; GELU in its form with tanh."""
    positions: Literal["relative", "absolute", "rotary", "none"] | None = None
    """Positions; rotary ones turn adjacent pairs."""
    heads: int | None = None
    """Attention heads, where the tensors' names are those of TransformerLens 4."""
    context: int | None = None
    """Context length; with learned positions at most as long as those."""


UNSAID = Unsaid()

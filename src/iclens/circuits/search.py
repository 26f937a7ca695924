"""Circuit search: the smallest set of edges that does what the whole model does.

Backward elimination with exact effects.  In each round every edge that is left is cut on top of
those cut before, and the one whose loss costs least, in KL(full || circuit), goes.  The smallest
set on this trail with KL(full || circuit) <= epsilon KL(full || all edges cut) is then made smaller
still, if it can be: one edge goes, and edges inside are exchanged for edges outside as long as that
lowers the KL, until it is within epsilon again.
"""

from __future__ import annotations

from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from iclens.circuits.graph import Graph
from iclens.circuits.interventions import (
    ROUNDING,
    Contrast,
    effects_of_cuts,
    mask_effects,
    mean_values,
)
from iclens.transformer import Senders, Transformer

EXCHANGES = 4
"""Edges inside and outside a circuit that are tried in pairs."""
SEARCH_SEQUENCES = 64
"""Sequences by which edges are ranked; how good a circuit is, is measured on all."""


@dataclass(frozen=True)
class Circuit:
    """A circuit, the trail that led to it, and how good it is.  KL in nats, shares of 1."""

    edges: tuple[str, ...]
    """The edges that are kept, in the order of the graph."""
    trail: tuple[str, ...]
    """All edges in the order in which they went."""
    trail_kl: Float[np.ndarray, " edge"]
    """KL(full || what is left) after each went, before any exchange."""
    total: float
    """KL(full || all edges cut)."""
    faithfulness: float
    """1 - KL(full || circuit) / total: 1 is perfect."""
    completeness: float
    """KL(full || all but the circuit) / total: near 1, nothing of the behaviour is elsewhere."""
    minimality: float
    """The least that cutting one more of its edges adds to KL(full || circuit), over total."""
    random: Float[np.ndarray, " sample"]
    """Faithfulness of random sets of as many edges."""


def find_circuit(
    model: Transformer,
    on: Contrast,
    *,
    epsilon: float = 0.1,
    samples: int = 32,
    key: PRNGKeyArray,
) -> Circuit:
    """Search for the circuit behind a model's predictions; `samples` random sets stand beside it.

    Raises `ValueError` if epsilon is not in (0, 1), or if cutting every edge changes nothing.
    """
    check_epsilon(epsilon)
    graph = Graph(model.config)
    count = len(graph.edges)
    few = jax.tree.map(lambda array: array[:SEARCH_SEQUENCES], on)
    order = np.asarray(_eliminate(model, few, mean_values(model, few)))
    trail = np.stack([1 - np.isin(np.arange(count), order[: cuts + 1]) for cuts in range(count)])
    left = mask_effects(model, on, trail.astype(np.float32))
    kl = np.asarray(left.kl).mean(0)
    total = float(kl[-1])
    if not np.asarray(left.changed)[:, -1].max() > ROUNDING:
        raise ValueError(
            f"cutting every edge with the baseline {on.baseline!r} changes nothing: "
            "there is no behaviour to find a circuit of"
        )
    cuts = int(np.flatnonzero(np.append(0, kl) <= epsilon * total).max())
    kept = ~np.isin(np.arange(count), order[:cuts])
    while (smaller := _exchange(model, on, few, kept, epsilon * total)) is not None:
        kept = smaller
    draws = np.argsort(np.asarray(jax.random.uniform(key, (samples, count))), axis=1)
    less_one = (kept & ~np.eye(count, dtype=bool))[kept]
    sets = np.concatenate([[kept, ~kept], draws < kept.sum(), less_one])
    shares = np.asarray(mask_effects(model, on, sets.astype(np.float32)).kl).mean(0) / total
    return Circuit(
        edges=tuple(np.array(graph.edges)[kept].tolist()),
        trail=tuple(graph.edges[edge] for edge in order),
        trail_kl=kl,
        total=total,
        faithfulness=float(1 - shares[0]),
        completeness=float(shares[1]),
        minimality=float((shares[2 + samples :] - shares[0]).min(initial=np.inf)),
        random=1 - shares[2 : 2 + samples],
    )


def check_epsilon(epsilon: float) -> None:
    """Raise `ValueError` if epsilon is not in (0, 1)."""
    if not 0 < epsilon < 1:
        raise ValueError(f"epsilon: expected a number between 0 and 1, got {epsilon}")


@eqx.filter_jit
def _eliminate(model: Transformer, on: Contrast, mean: Senders | None) -> Int[Array, " edge"]:
    """Edges in the order in which they go."""

    def drop(mask: Array, _: None) -> tuple[Array, Array]:
        kl = jnp.mean(effects_of_cuts(model, on, mean, mask).kl, axis=0)
        edge = jnp.argmin(jnp.where(mask > 0, kl, jnp.inf))
        return mask.at[edge].set(0), edge

    count = len(model.config.edges)
    return jax.lax.scan(drop, jnp.ones(count), None, length=count)[1]


def _exchange(
    model: Transformer, on: Contrast, few: Contrast, kept: np.ndarray, limit: float
) -> np.ndarray | None:
    """A circuit of one edge less with KL <= limit, if exchanging edges leads to one."""

    def kl(sets: np.ndarray, where: Contrast = few) -> np.ndarray:
        return np.asarray(mask_effects(model, where, sets.astype(np.float32)).kl).mean(0)

    each = np.eye(len(kept), dtype=bool)
    alone = np.where(kept, kl(kept ^ each), np.inf)
    found, best = kept ^ each[alone.argmin()], float(alone.min())
    while found.any():
        if kl(found[None], on)[0] <= limit:
            return found
        toggled = kl(found ^ each)
        ranked = [np.argsort(np.where(side, toggled, np.inf)) for side in (found, ~found)]
        out, into = (each[order[:EXCHANGES]] for order in ranked)
        sets = (found ^ out[:, None] ^ into).reshape(-1, len(kept))
        exchanged = np.where(sets.sum(1) == found.sum(), kl(sets), np.inf)
        if not exchanged.min() < best:
            return None
        found, best = sets[exchanged.argmin()], float(exchanged.min())
    return None

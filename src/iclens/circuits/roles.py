"""Roles: what heads and MLPs do, each as a number beside what chance would give.

Two hypotheses are put together from them.  The *statistical induction head* (2-Gen): a head finds
the positions that follow earlier visits to the current state, by what the layer before it wrote
there.  The *task recognition head* (2-Mem): an MLP encodes pairs of states, attention pools them
into a task vector phi, and the next MLP decodes phi and the current state into the chain's row.
Models of attention only have no MLPs that could: of them the first alone is tested.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from iclens.chains import ChainSet, Prior
from iclens.circuits.graph import Graph
from iclens.circuits.interventions import Contrast, chunk_size, mask_effects, no_lag
from iclens.separation import effective_dimension, linear_readout
from iclens.transformer import (
    Activations,
    Edges,
    Senders,
    Transformer,
    TransformerConfig,
    forward,
)

PROBE_CHAINS = 32
PROBE_SEQUENCES = 32
"""Chains, at most, and sequences of each, from which the measures of the task vector come."""
HALF = 0.5
"""A criterion holds where a measure is more than half-way from chance to its largest value."""


class HeadScores(eqx.Module):
    """What each head attends to, averaged over sequences and late queries; shares in [0, 1]."""

    previous: Float[Array, "layer head"]
    """Attention mass at lag 1."""
    previous_chance: Float[Array, ""]
    """The same for a uniform pattern."""
    induction: Float[Array, "layer head"]
    """Mass on positions whose previous state equals the current state."""
    induction_chance: Float[Array, ""]
    """The same for a uniform pattern."""
    uniformity: Float[Array, "layer head"]
    """Entropy of the pattern over that of a uniform one."""
    by_lag: Float[Array, "layer head lag"]
    """Attention mass by lag."""


def head_scores(
    attention: tuple[Float[Array, "batch head position key"], ...],
    states: Int[Array, "batch position"],
) -> HeadScores:
    """Scores of all heads from their patterns (layer by layer) on some sequences.

    Late queries are those of the later half of positions.
    """
    context = states.shape[1]
    late = context // 2
    n, m = jnp.arange(late, context)[:, None], jnp.arange(context)
    before = jnp.pad(states[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    follows = (before[:, None, :] == states[:, late:, None]) & (m <= n)
    pattern = jnp.stack([layer[:, :, late - context :] for layer in attention])
    entropy = -jnp.sum(jnp.where(pattern > 0, pattern * jnp.log(pattern), 0), axis=-1)
    by_query = jnp.mean(pattern, axis=1)
    by_lag = jnp.stack(
        [
            jnp.mean(jnp.sum(jnp.where(n - m == distance, by_query, 0), axis=-1), axis=-1)
            for distance in range(context)
        ],
        axis=-1,
    )
    return HeadScores(
        previous=by_lag[..., 1],
        previous_chance=jnp.mean(1 / (n[:, 0] + 1)),
        induction=jnp.mean(jnp.sum(pattern * follows[:, None], axis=-1), axis=(1, 3)),
        induction_chance=jnp.mean(jnp.sum(follows, axis=-1) / (n[:, 0] + 1)),
        uniformity=jnp.mean(entropy / jnp.log(n[:, 0] + 1), axis=(1, 3)),
        by_lag=by_lag,
    )


class Probe(eqx.Module):
    """Labelled sequences from a few chains, as many from each, and one of another for each."""

    states: Int[Array, "*chunk batch position"]
    chain: Int[Array, "*chunk batch"]
    transition: Float[Array, ...]
    """Of each chain: (chain, state, state)."""
    other: Int[Array, "*chunk batch"]
    """A sequence of another chain."""
    third: Int[Array, "*chunk batch"]
    """A sequence of a third chain; where there are only two, another one of the own."""


def probe(source: ChainSet | Prior, context: int, *, key: PRNGKeyArray) -> Probe:
    """Draw a probe from the first chains of a set, at most 32, or from 32 fresh ones.

    Raises `ValueError` if there are fewer than two chains.
    """
    first, second = jax.random.split(key)
    chains = source.sample(first, PROBE_CHAINS) if isinstance(source, Prior) else source
    count = min(PROBE_CHAINS, chains.count)
    if count < 2:
        raise ValueError("roles need at least two chains to tell apart, got 1")
    transition = chains.transition[:count]
    # Sequence i is of chain i mod count: the chains alternate, in every part of the probe.
    rows = [
        ChainSet(matrix[None]).sample(jax.random.fold_in(second, index), PROBE_SEQUENCES, context)
        for index, matrix in enumerate(transition)
    ]
    states = jnp.stack([states for states, _ in rows], axis=1).reshape(-1, context)
    index = jnp.arange(len(states))
    group = index // count * count
    return Probe(
        states=states,
        chain=index % count,
        transition=jnp.asarray(transition),
        other=group + (index + 1) % count,
        third=group + (index + 2) % count if count > 2 else (index + 2) % len(states),
    )


@dataclass(frozen=True)
class Roles:
    """Every measure of a model's components, each with what chance gives; shares of 1.

    Those of the encoder are NaN without MLPs.
    """

    heads: HeadScores
    """On the probe's sequences."""
    induction_without_layer: float
    """Induction score of the best head where its keys do not see what the layers before wrote."""
    encoder_pair: float
    """Share of the variance of MLP1's output that the pair (x_(n-1), x_n) explains."""
    encoder_state: float
    """The same by x_n alone."""
    encoder_chance: float
    """The same by as many random groups as there are pairs."""
    pool: float
    """R^2 of phi as a linear function of pair frequencies, on sequences left out."""
    pool_state: float
    """The same from the frequencies of states."""
    pool_chance: float
    """The same from the pair frequencies of sequences drawn at random."""
    decoder: float
    """How far the output moves to the row of chain A when phi of a context from A replaces the own.

    1 - KL(A's row || swapped) / KL(A's row || own), rows taken at the own current state."""
    decoder_chance: float
    """The same for a phi of a third chain (of the own, where there are only two)."""
    readout: float
    """Accuracy of a linear read-out of the chain from phi, on sequences left out."""
    readout_chance: float
    """1 / number of chains."""
    dimension: float
    """Effective dimension of phi across chains, (sum l)^2 / sum l^2 over the eigenvalues l of the
    covariance of the chains' mean phi."""
    dimension_limit: int
    """The largest that it could be, min(width, number of chains - 1)."""
    ood_loss: float
    """Change of the loss on fresh chains, in nats, where the best induction head is cut out."""
    ood_loss_error: float
    """Its standard error."""


def check_roles(config: TransformerConfig) -> None:
    """Raise `ValueError` for a model of fewer than two layers: no head reads another's output."""
    if config.layers < 2:
        raise ValueError("roles need a model of at least two layers")


def measure_roles(model: Transformer, on: Probe, ood: Contrast) -> Roles:
    """All measures of a model.  `ood` has sequences of fresh chains, with any baseline.

    Raises `ValueError` for a model of fewer than two layers.
    """
    config = model.config
    check_roles(config)
    clean = _activations(model, on)
    scores: HeadScores = clean["scores"]
    later = np.asarray(scores.induction)[1:]
    layer, head = np.unravel_index(later.argmax(), later.shape)
    best = f"att{layer + 2}.{head}"
    names, graph = config.senders, Graph(config)
    earlier = [s for s in names[: names.index(f"att{layer + 2}.0")] if s not in ("embed", "pos")]
    mask = graph.mask(cut=[f"{sender}->{best}.k" for sender in earlier])
    blind = _induction_with(model, on, jnp.asarray(mask))[layer + 1, head]
    cut = mask_effects(model, ood, graph.mask(cut=graph.from_sender(best))[None])
    loss = np.asarray(cut.loss, np.float64)[:, 0]

    states, chain = np.asarray(on.states), np.asarray(on.chain)
    size = model.embedding.shape[0]
    late = states.shape[1] // 2
    pair = states[:, late - 1 : -1] * size + states[:, late:]
    encoder = dict.fromkeys(("encoder_pair", "encoder_state", "encoder_chance"), np.nan)
    if not config.attention_only:
        written = np.asarray(clean["mlp1"], np.float64).reshape(-1, config.width)
        encoder = {
            "encoder_pair": _explained(written, pair.ravel()),
            "encoder_state": _explained(written, states[:, late:].ravel()),
            "encoder_chance": (len(np.unique(pair)) - 1) / (pair.size - 1),
        }
    phi = np.asarray(clean["phi"], np.float64)
    pairs = np.eye(size**2)[states[:, :-1] * size + states[:, 1:]].mean(1)
    frequencies = np.eye(size)[states].mean(1)
    # Chains alternate, so halves by parity of the round, not of the sequence.
    rounds = np.arange(len(phi)) // len(on.transition)
    fit, held = rounds % 2 == 0, rounds % 2 == 1
    means = np.stack([phi[chain == index].mean(0) for index in range(len(on.transition))])
    return Roles(
        heads=scores,
        induction_without_layer=float(blind),
        **encoder,
        pool=_r_squared(pairs, phi, fit, held),
        pool_state=_r_squared(frequencies, phi, fit, held),
        pool_chance=_r_squared(np.random.default_rng(0).permutation(pairs), phi, fit, held),
        decoder=float(clean["moved"]),
        decoder_chance=float(clean["moved_by_third"]),
        readout=linear_readout(phi, chain, fit, held),
        readout_chance=1 / len(on.transition),
        dimension=effective_dimension(means),
        dimension_limit=min(config.width, len(means) - 1),
        ood_loss=float(loss.mean()),
        ood_loss_error=float(loss.std(ddof=1) / np.sqrt(len(loss))),
    )


@eqx.filter_jit
def _activations(model: Transformer, on: Probe) -> dict[str, Any]:
    config = model.config
    context = on.states.shape[1]
    last = [config.senders.index(f"att{config.layers}.{head}") for head in range(config.heads)]
    encoder = {} if config.attention_only else {"mlp1": config.senders.index("mlp1")}
    # The task vector is what the last attention layer writes; swapped, all its edges are cut.
    graph = Graph(config)
    names = [edge for place in last for edge in graph.from_sender(config.senders[place])]
    mask = jnp.asarray(graph.mask(cut=names))

    def chunk(part: Probe) -> dict[str, Any]:
        clean = forward(model, part.states)
        rows = on.transition[part.chain[part.other], part.states[:, -1]]

        def distance(logits: Array) -> Array:
            log_probs = jax.nn.log_softmax(logits[:, -1])
            terms = rows * (jnp.log(jnp.where(rows > 0, rows, 1)) - log_probs)
            return jnp.mean(jnp.sum(terms, axis=-1))

        def swapped(which: Array) -> Array:
            values = tuple(v if v.ndim < 3 else v[which] for v in clean.senders.values)
            edges = Edges(mask, Senders(values, no_lag(model)))
            known = clean.senders.values[: last[0]]
            return distance(forward(model, part.states, edges, known).logits)

        written = {name: clean.senders.values[place] for name, place in encoder.items()}
        return {name: value[:, context // 2 :] for name, value in written.items()} | {
            "scores": head_scores(clean.attention, part.states),
            "phi": _task_vectors(model, clean),
            "distance": distance(clean.logits),
            "distance_swapped": swapped(part.other),
            "distance_by_third": swapped(part.third),
        }

    found = jax.lax.map(chunk, _in_rounds(on))
    joined = {n: found[n].reshape(-1, *found[n].shape[2:]) for n in (*encoder, "phi")}
    mean = jax.tree.map(lambda chunks: jnp.mean(chunks, axis=0), found)
    return joined | {
        "scores": mean["scores"],
        "moved": 1 - mean["distance_swapped"] / mean["distance"],
        "moved_by_third": 1 - mean["distance_by_third"] / mean["distance"],
    }


def _in_rounds(on: Probe) -> Probe:
    """Chunks of whole rounds (one sequence of each chain), with a leading axis, for `lax.map`.

    Partners are then counted within a chunk; the transition matrices are left out of it.
    """
    count, context = len(on.transition), on.states.shape[1]
    rounds = len(on.states) // count
    size = count * max(2, chunk_size(rounds, count * context))

    def split(array: Array) -> Array:
        return array.reshape(-1, size, *array.shape[1:])

    chunks = len(on.states) // size
    return Probe(
        states=split(on.states),
        chain=split(on.chain),
        transition=jnp.zeros((chunks, 0)),
        other=split(on.other) % size,
        third=split(on.third) % size,
    )


@eqx.filter_jit
def _induction_with(
    model: Transformer, on: Probe, mask: Float[Array, " edge"]
) -> Float[Array, "layer head"]:
    """Induction scores where cut edges carry the values of a sequence of another chain."""

    def chunk(part: Probe) -> Array:
        others = forward(model, part.states[part.other]).senders.values
        edges = Edges(mask, Senders(others, no_lag(model)))
        return head_scores(forward(model, part.states, edges).attention, part.states).induction

    return jnp.mean(jax.lax.map(chunk, _in_rounds(on)), axis=0)


class Showcase(eqx.Module):
    """What can be looked at: a few attention patterns, and task vectors."""

    states: Int[Array, "shown position"]
    attention: Float[Array, "layer head shown position key"]
    phi: Float[Array, "sequence width"]
    """What the last attention layer writes at the last position, for all sequences of a probe."""


@eqx.filter_jit
def showcase(model: Transformer, on: Probe, which: Int[Array, " shown"]) -> Showcase:
    """Attention patterns of some sequences of a probe, and all task vectors."""
    states = on.states[which]
    few = forward(model, states)
    patterns = jnp.stack([layer.swapaxes(0, 1) for layer in few.attention])
    phi = jax.lax.map(lambda part: last_task_vectors(model, part.states), _in_rounds(on))
    return Showcase(states, patterns, phi.reshape(-1, phi.shape[-1]))


def last_task_vectors(
    model: Transformer, states: Int[Array, "batch position"]
) -> Float[Array, "batch width"]:
    """phi: what the heads of the last attention layer write, together, at the last position."""
    return _task_vectors(model, forward(model, states))


def _task_vectors(model: Transformer, clean: Activations) -> Float[Array, "batch width"]:
    config = model.config
    first = config.senders.index(f"att{config.layers}.0")
    heads = clean.senders.values[first : first + config.heads]
    return jnp.sum(jnp.stack([value[:, -1] for value in heads]), axis=0)


def _explained(
    values: Float[np.ndarray, "sample width"], group: Int[np.ndarray, " sample"]
) -> float:
    """Share of the variance of vectors that lies between groups."""
    _, group = np.unique(group, return_inverse=True)
    centred = values - values.mean(0)
    counts = np.bincount(group)
    sums = np.stack([np.bincount(group, column) for column in centred.T], axis=1)
    return float((sums**2 / counts[:, None]).sum() / max((centred**2).sum(), 1e-300))


def _r_squared(
    features: Float[np.ndarray, "sample feature"],
    values: Float[np.ndarray, "sample width"],
    fit: np.ndarray,
    held: np.ndarray,
) -> float:
    """R^2 of a least-squares fit on samples that were left out of it."""
    design = np.column_stack([features, np.ones(len(features))])
    solution = np.linalg.lstsq(design[fit], values[fit], rcond=1e-6)[0]
    error = ((values[held] - design[held] @ solution) ** 2).sum()
    return float(1 - error / max(((values[held] - values[fit].mean(0)) ** 2).sum(), 1e-300))


@dataclass(frozen=True)
class Verdict:
    """A hypothesis about a model: the criteria that it stands on, and whether all of them hold."""

    criteria: dict[str, dict[str, Any]]
    """For each: `holds`, the `value`, and the `limit` that it must exceed."""

    @property
    def passes(self) -> bool:
        return all(criterion["holds"] for criterion in self.criteria.values())


def _criterion(value: float, limit: float) -> dict[str, Any]:
    return {"holds": bool(value > limit), "value": float(value), "limit": float(limit)}


def hypotheses(roles: Roles) -> dict[str, Verdict]:
    """Both hypotheses about a model; without MLPs only that of the statistical induction head.

    Most measures count where they are more than half-way from their chance level to 1.  Without a
    largest value of their own: that the keys of layer 1 matter (more than half of the excess goes
    without them), the lag that is attended to most, a loss beyond two standard errors, and pairs
    explaining more than states by what a random finer grouping would add.
    """
    heads = roles.heads
    chance = float(heads.induction_chance)
    later = np.asarray(heads.induction)[1:]
    best, layer = float(later.max()), int(later.max(-1).argmax()) + 1
    excess = (best - chance) / (1 - chance)
    blind = (roles.induction_without_layer - chance) / (1 - chance)
    lags = np.asarray(heads.by_lag)[:layer]
    found = {
        "statistical induction head": Verdict(
            {
                "attends to what followed the current state": _criterion(excess, HALF),
                "finds it by what the layer before wrote": _criterion(
                    excess - blind, HALF * max(excess, 0.0)
                ),
                "a head before it attends to the previous state most": _criterion(
                    float((lags[..., 1] - np.delete(lags, 1, axis=-1).max(-1)).max()), 0.0
                ),
                "is needed on fresh chains": _criterion(roles.ood_loss, 2 * roles.ood_loss_error),
            }
        )
    }
    if not np.isnan(roles.encoder_chance):
        found["task recognition head"] = Verdict(
            {
                "encodes pairs": _criterion(
                    roles.encoder_pair,
                    roles.encoder_chance + HALF * (1 - roles.encoder_chance),
                ),
                "by more than the current state": _criterion(
                    roles.encoder_pair - roles.encoder_state,
                    roles.encoder_chance,
                ),
                "pools them linearly": _criterion(
                    roles.pool, HALF + HALF * max(roles.pool_chance, 0.0)
                ),
                "not chosen by what they follow": _criterion(1 - excess, 1 - HALF),
                "decodes the task vector": _criterion(
                    roles.decoder, HALF + HALF * max(roles.decoder_chance, 0.0)
                ),
                "the task vector tells the chain": _criterion(
                    roles.readout, HALF + HALF * roles.readout_chance
                ),
            }
        )
    return found

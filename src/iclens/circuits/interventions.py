"""Interventions: what cutting edges does to what a model predicts.

An edge that is cut carries a baseline instead of its sender's value, and everything after it is
computed again, exactly.  Effects are KL(clean || cut) and changes of the expected loss, in nats,
for each sequence, averaged over positions.

Baselines, and what they keep:

    resample     another sequence's values
    swap_chain   values on a sequence of another chain that ends in the same state
    shuffle      values on the same states in another order before the last: the one-point
                 statistics are kept, the two-point statistics destroyed
    mean         the mean value over the sequences, at each position
    zero         zero

Of `swap_chain` and `shuffle` only the last position counts, for only there the current state is
the same.  Of the others the later half of positions does, as for distances.  A lag bias does not
depend on the sequence: cut, it is 0 for every baseline, which leaves a head without positions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jaxtyping import Array, Float, Int, PRNGKeyArray

from iclens.chains import ChainSet, Prior, stationary_distribution, walk
from iclens.circuits.graph import Graph
from iclens.names import unknown
from iclens.predictors import check_states
from iclens.transformer import Activations, Edges, Senders, Transformer, forward

BASELINES = ("resample", "swap_chain", "shuffle", "mean", "zero")
CHUNK_POSITIONS = 4096
"""Positions, sequences times context, that are worked on together."""
CANDIDATES = 16
"""Fresh chains out of which one that is likely to be in a given state is chosen."""
ROOM = 64
"""Interventions of one call; there is one program for any number up to that."""
WORLDS = 8
"""Interventions that are worked on together; with the former it bounds the memory."""
ROUNDING = 1e-5
"""A change of logits below this share is none."""


class Contrast(eqx.Module):
    """Sequences, and what cut edges carry on each (see `contrast`)."""

    states: Int[Array, "batch position"]
    target: Float[Array, "batch position state"]
    """True distribution of the next state."""
    instead: Int[Array, "batch position"] | None
    """States whose values cut edges carry; None for mean and zero."""
    baseline: str = eqx.field(static=True)
    since: int = eqx.field(static=True)
    """The first position at which effects count."""

    def __check_init__(self) -> None:
        for states in (self.states, self.instead):
            if states is not None:
                check_states(states, self.target.shape[-1])


class Effects(eqx.Module):
    """What interventions do, on each sequence, in nats."""

    kl: Float[Array, "batch ..."]
    """KL(clean || intervened), mean over the positions that count."""
    loss: Float[Array, "batch ..."]
    """Change of the expected cross-entropy; positive where the intervention hurts."""
    direct: Float[Array, "batch ..."] | None
    """KL of the path sender -> receiver -> out alone, everything else frozen at clean values."""
    changed: Float[Array, "batch ..."]
    """Largest change of a logit, over the largest logit (at least 1): rounding alone gives 1e-6."""


def contrast(
    baseline: str,
    source: ChainSet | Prior,
    sequences: int,
    context: int,
    *,
    key: PRNGKeyArray,
) -> Contrast:
    """Draw sequences, from a chain set (ID) or from the prior (OOD), and their counterfactuals.

    Raises `ValueError` for an unknown baseline, for fewer than two sequences or states of context,
    and for `swap_chain` where no other chain can produce a sequence's last state.
    """
    if baseline not in BASELINES:
        raise ValueError(unknown("baseline", baseline, BASELINES))
    if sequences < 2 or context < 2:
        raise ValueError(
            "a contrast needs at least 2 sequences and a context of at least 2, "
            f"got {sequences} sequences of {context} states"
        )
    first, second = jax.random.split(key)
    states, transition = source.draw(first, sequences, context)
    instead = {
        "resample": lambda: jnp.roll(states, 1, axis=0),
        "swap_chain": lambda: _of_another_chain(states, first, second, source),
        "shuffle": lambda: jnp.concatenate(
            [
                jax.random.permutation(second, states[:, :-1], axis=1, independent=True),
                states[:, -1:],
            ],
            axis=1,
        ),
    }
    return Contrast(
        states=states,
        target=jnp.take_along_axis(jnp.asarray(transition), states[..., None], axis=1),
        instead=instead[baseline]() if baseline in instead else None,
        baseline=baseline,
        since=context - 1 if baseline in ("swap_chain", "shuffle") else context // 2,
    )


def _of_another_chain(
    states: Array, drawn: PRNGKeyArray, key: PRNGKeyArray, source: ChainSet | Prior
) -> Array:
    """Stationary sequences of other chains, given their last states, walked backwards.

    Time reversed, a stationary chain is a chain with R[b, a] = pi_a T[a, b] / pi_b.
    """
    count, context = states.shape
    last = np.asarray(states[:, -1])
    which, steps = jax.random.split(key)
    if isinstance(source, ChainSet):
        own = np.asarray(source.sample(drawn, count, context)[1])
        weights = source.weights * source.stationary[:, last].T
        weights[np.arange(count), own] = 0
        if (nowhere := ~weights.any(axis=1)).any():
            sequence = int(nowhere.argmax())
            raise ValueError(
                f"swap_chain: no other chain of the set can produce state {last[sequence]}, in "
                f"which sequence {sequence} ends; expected at least two chains that can"
            )
        with np.errstate(divide="ignore"):
            other = np.asarray(jax.random.categorical(which, np.log(weights)))
        transition, stationary = source.transition[other], source.stationary[other]
    else:
        shape = (count, CANDIDATES, source.states, source.states)
        drawn_rows = np.asarray(source.draw(which, count * CANDIDATES, 1)[1], np.float64)
        candidates = (drawn_rows / drawn_rows.sum(-1, keepdims=True)).reshape(shape)
        laws = stationary_distribution(candidates.reshape(-1, *shape[2:])).reshape(shape[:3])
        chance = np.take_along_axis(laws, last[:, None, None], axis=2)[..., 0]
        if (nowhere := ~chance.any(axis=1)).any():
            sequence = int(nowhere.argmax())
            raise ValueError(
                f"swap_chain: none of {CANDIDATES} fresh chains visits state {last[sequence]}, in "
                f"which sequence {sequence} ends"
            )
        with np.errstate(divide="ignore"):
            likely = np.log(chance)
        other = np.asarray(jax.random.categorical(jax.random.fold_in(which, 1), likely))
        transition = candidates[np.arange(count), other]
        stationary = laws[np.arange(count), other]
    flow = (stationary[..., None] * transition).swapaxes(1, 2)
    total = flow.sum(-1, keepdims=True)
    backwards = np.divide(flow, total, out=np.full_like(flow, 1 / flow.shape[-1]), where=total > 0)
    start = np.eye(flow.shape[-1])[last]
    return walk(steps, jnp.asarray(start), jnp.asarray(backwards), context)[:, ::-1]


def mask_effects(
    model: Transformer, on: Contrast, masks: Float[np.ndarray, "world edge"]
) -> Effects:
    """The effects of any masks: nodes, circuits, random sets of edges.

    Raises `ValueError` if there is no mask, if one is not finite or of another graph, if the model
    and the contrast differ in their states, or if the model's parameters are not finite.
    """
    _check(model, on)
    expected = (len(model.config.edges),)
    if masks.shape[1:] != expected or not len(masks) or not np.isfinite(masks).all():
        raise ValueError(
            f"masks: expected at least one of {expected[0]} finite numbers, a row for each, got "
            f"shape {masks.shape}"
        )
    mean, found = mean_values(model, on), []
    for first in range(0, len(masks), ROOM):
        some = masks[first : first + ROOM]
        room = np.ones((ROOM, *expected), np.float32)
        room[: len(some)] = some
        found.append(_mask_effects(model, on, mean, jnp.asarray(room), jnp.int32(len(some))))
    return jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1)[:, : len(masks)], *found)


def edge_effects(model: Transformer, on: Contrast) -> Effects:
    """The effects of cutting each edge alone, in the order of `Graph.edges`.

    `tabulate` puts names on them.  Raises `ValueError` as `mask_effects` does.
    """
    _check(model, on)
    return effects_of_cuts(model, on, mean_values(model, on), None)


def _check(model: Transformer, on: Contrast) -> None:
    if (own := model.embedding.shape[0]) != (theirs := on.target.shape[-1]):
        raise ValueError(f"the model has {own} states, the contrast {theirs}")
    if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(model)):
        raise ValueError("the model's parameters are not all finite: its training diverged")


@eqx.filter_jit
def mean_values(model: Transformer, on: Contrast) -> Senders | None:
    """What edges carry for the baseline `mean`, over all sequences; None for the others."""
    if on.baseline != "mean":
        return None

    def sums(states: Array) -> tuple[Array, ...]:
        values = forward(model, states, since=on.since).senders.values
        return tuple(jnp.sum(v, axis=0) if v.ndim == 3 else len(states) * v for v in values)

    chunks = _in_chunks(on).states
    zero = jax.tree.map(
        lambda shape: jnp.zeros(shape.shape, shape.dtype), jax.eval_shape(sums, chunks[0])
    )
    total, _ = jax.lax.scan(
        lambda total, states: (jax.tree.map(jnp.add, total, sums(states)), None), zero, chunks
    )
    values = jax.tree.map(lambda sums: sums[None] / len(on.states), total)
    return Senders(values, no_lag(model))


@eqx.filter_jit
def _mask_effects(
    model: Transformer,
    on: Contrast,
    mean: Senders | None,
    masks: Float[Array, "world edge"],
    count: Int[Array, ""],
) -> Effects:
    """The effects of the first `count` masks; the rest of the room is left empty."""

    def chunk(part: Contrast) -> Effects:
        clean = forward(model, part.states, since=on.since).logits
        baseline = baseline_values(model, part, mean)

        def world(mask: Array) -> Effects:
            cut = forward(model, part.states, Edges(mask, baseline), since=on.since).logits
            return _compare(clean, cut, None, part)

        def group(number: Array, filled: Effects) -> Effects:
            rows = jax.lax.dynamic_slice_in_dim(masks, number * WORLDS, WORLDS)
            return jax.tree.map(
                lambda all, some: jax.lax.dynamic_update_slice_in_dim(
                    all, some, number * WORLDS, 0
                ),
                filled,
                jax.vmap(world)(rows),
            )

        empty = jnp.zeros((ROOM, len(part.states)))
        return jax.lax.fori_loop(0, -(-count // WORLDS), group, Effects(empty, empty, None, empty))

    return _joined(jax.lax.map(chunk, _in_chunks(on)))


@eqx.filter_jit
def effects_of_cuts(
    model: Transformer, on: Contrast, mean: Senders | None, mask: Float[Array, " edge"] | None
) -> Effects:
    """Effects of cutting each edge alone, or each on top of what `mask` cuts already.

    What comes before the cut is computed once for all edges into a block.
    """
    graph = Graph(model.config)

    def chunk(part: Contrast) -> Effects:
        clean = forward(model, part.states, since=on.since)
        baseline = baseline_values(model, part, mean)
        here = clean
        if mask is not None:
            here = forward(model, part.states, Edges(mask, baseline), since=on.since)
        found: list[Effects] = []
        for before, edges in graph.blocks:
            receivers = [graph.sender_of(graph.edges[e].split("->")[1]) for e in edges]
            fed = jnp.array([len(graph.senders) if r is None else r for r in receivers])

            def world(cut: tuple[Array, Array], before: int = before) -> Effects:
                edge, fed = cut
                whole = jnp.ones(len(graph.edges)) if mask is None else mask
                after = forward(
                    model,
                    part.states,
                    Edges(whole.at[edge].set(0), baseline),
                    here.senders.values[:before],
                    on.since,
                )
                alone = _one_path(model, part, clean, after, fed) if mask is None else None
                return _compare(clean.logits, after.logits, alone, part)

            found.append(_worlds(world, (jnp.asarray(edges), fed)))
        order = np.argsort(np.concatenate([edges for _, edges in graph.blocks]))
        return jax.tree.map(lambda *parts: jnp.concatenate(parts)[order], *found)

    return _joined(jax.lax.map(chunk, _in_chunks(on)))


def _one_path(
    model: Transformer, part: Contrast, clean: Activations, after: Activations, fed: Array
) -> Array:
    """Logits where `out` alone sees the change, and of it only what sender `fed` writes."""
    values = tuple(
        jnp.where(place == fed, patched, own)
        for place, (own, patched) in enumerate(
            zip(clean.senders.values, after.senders.values, strict=True)
        )
    )
    frozen = forward(model, part.states, None, values, part.since).logits
    return jnp.where(fed == len(values), after.logits, frozen)


def baseline_values(model: Transformer, part: Contrast, mean: Senders | None) -> Senders:
    """What cut edges carry; `mean` is what `mean_values` gave for all sequences."""
    if mean is not None:
        return mean
    if part.instead is None:
        zero = jnp.zeros((1, 1, model.config.width))
        return Senders((zero,) * len(model.config.senders), no_lag(model))
    values = forward(model, part.instead, since=part.since).senders.values
    return Senders(values, no_lag(model))


def no_lag(model: Transformer) -> Float[Array, "layer head lag"]:
    """What a cut lag bias carries."""
    config = model.config
    lags = model.context if config.positions == "relative" else 0
    return jnp.zeros((config.layers, config.heads, lags))


def _compare(clean: Array, cut: Array, alone: Array | None, part: Contrast) -> Effects:
    before, after = jax.nn.log_softmax(clean), jax.nn.log_softmax(cut)
    target = part.target[:, part.since :]

    def kl(other: Array) -> Array:
        return jnp.mean(jnp.sum(jnp.exp(before) * (before - other), axis=-1), axis=-1)

    return Effects(
        kl=kl(after),
        loss=jnp.mean(jnp.sum(target * (before - after), axis=-1), axis=-1),
        direct=None if alone is None else kl(jax.nn.log_softmax(alone)),
        changed=jnp.max(jnp.abs(cut - clean), axis=(1, 2))
        / jnp.maximum(1, jnp.max(jnp.abs(clean), axis=(1, 2))),
    )


def chunk_size(sequences: int, context: int) -> int:
    """The largest divisor of the number of sequences that keeps a chunk within its size."""
    sizes = [size for size in range(1, sequences + 1) if sequences % size == 0]
    return max(size for size in sizes if size == 1 or size * context <= CHUNK_POSITIONS)


def _in_chunks(on: Contrast) -> Contrast:
    size = chunk_size(*on.states.shape)
    return jax.tree.map(lambda array: array.reshape(-1, size, *array.shape[1:]), on)


def _worlds(world: Callable[[Any], Effects], cuts: Any) -> Effects:
    """Map over interventions, a few at a time: (world, batch)."""
    count = len(jax.tree.leaves(cuts)[0])
    groups = -(-count // WORLDS)
    found: Effects = jax.lax.map(world, cuts, batch_size=-(-count // groups))
    return found


def _joined(chunks: Effects) -> Effects:
    """From (chunk, world, batch) to (batch, world)."""
    return jax.tree.map(lambda a: a.swapaxes(1, 2).reshape(-1, a.shape[1]), chunks)


def attribution(
    model: Transformer, on: Contrast, *, integrated: int = 0
) -> Float[np.ndarray, " edge"]:
    """The effect of each edge to first order, from the gradient with respect to the mask.

    EAP: the change of the expected loss on cutting an edge, minus its derivative at the clean
    model.  With `integrated` steps EAP-IG: KL(clean || cut), minus its derivative averaged along
    the way from all edges cut to none (midpoint rule); at the clean model it would be 0.
    Both in nats, in the order of `Graph.edges`.  Where a model saturates, the derivative at the
    clean model says little about cutting an edge; see how it ranks against the exact effects.

    Raises `ValueError` as `mask_effects` does, or if `integrated` is below 0.
    """
    _check(model, on)
    if integrated < 0:
        raise ValueError(f"integrated: expected 0 or more steps, got {integrated}")
    found = _attribution(model, on, mean_values(model, on), integrated)
    return np.asarray(found)


@eqx.filter_jit
def _attribution(
    model: Transformer,
    on: Contrast,
    mean: Senders | None,
    integrated: int,
) -> Float[Array, " edge"]:
    count = len(model.config.edges)
    points = (jnp.arange(integrated) + 0.5) / integrated if integrated else jnp.ones(1)

    def add(total: Array, part: Contrast) -> tuple[Array, None]:
        baseline = jax.lax.stop_gradient(baseline_values(model, part, mean))
        clean = None
        if integrated:
            clean = jax.nn.log_softmax(forward(model, part.states, since=on.since).logits)

        def measured(mask: Array) -> Array:
            cut = forward(model, part.states, Edges(mask, baseline), since=on.since).logits
            log_probs = jax.nn.log_softmax(cut)
            if clean is None:
                return -jnp.mean(jnp.sum(part.target[:, on.since :] * log_probs, axis=-1))
            return jnp.mean(jnp.sum(jnp.exp(clean) * (clean - log_probs), axis=-1))

        slopes = jax.lax.map(lambda share: jax.grad(measured)(jnp.full(count, share)), points)
        return total - jnp.mean(slopes, axis=0), None

    chunks = _in_chunks(on)
    return jax.lax.scan(add, jnp.zeros(count), chunks)[0] / len(chunks.states)


def tabulate(effects: Effects, names: tuple[str, ...], axis: str = "edge") -> xr.Dataset:
    """Effects averaged over sequences, with standard errors, labelled by name, in nats."""
    sequences = len(effects.kl)
    table = xr.Dataset(coords={axis: list(names)})
    for name, values in {
        "kl": effects.kl,
        "loss_change": effects.loss,
        "direct_kl": effects.direct,
    }.items():
        if values is not None:
            array = np.asarray(values, np.float64)
            table[name] = (axis, array.mean(0), {"units": "nats"})
            table[f"{name}_error"] = (
                axis,
                array.std(0, ddof=1) / np.sqrt(sequences),
                {"units": "nats"},
            )
    table["changes"] = (axis, np.asarray(effects.changed).max(0) > ROUNDING)
    return table


def node_masks(config: Any) -> tuple[tuple[str, ...], Float[np.ndarray, "node edge"]]:
    """The senders, and for each a mask that cuts every edge that leaves it."""
    graph = Graph(config)
    masks = [graph.mask(cut=graph.from_sender(sender)) for sender in graph.senders]
    return graph.senders, np.stack(masks)

"""Interventions: identities, a slow oracle, a circuit solved by hand, what baselines keep."""

from __future__ import annotations

import dataclasses
import functools
import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from iclens.chains import ChainPrior, ChainSet, cyclic
from iclens.circuits import interventions
from iclens.circuits.graph import Graph
from iclens.circuits.interventions import (
    Contrast,
    attribution,
    baseline_values,
    contrast,
    edge_effects,
    mask_effects,
    mean_values,
    node_masks,
    tabulate,
)
from iclens.training import TrainingConfig, initial_state, train
from iclens.transformer import Edges, Transformer, TransformerConfig, forward

C, N, BATCH = 3, 8, 6
PRIOR = ChainPrior(C)
CHAINS = PRIOR.sample(jax.random.key(0), 5)
SHAPES = {
    "one head": TransformerConfig(width=8),
    "two heads, absolute": TransformerConfig(width=8, heads=2, positions="absolute"),
    "four heads": TransformerConfig(width=8, heads=4, norm="layer"),
    "no norm": TransformerConfig(width=8, heads=2, norm="none"),
}

CASES = [
    ("one head", "resample"),
    ("two heads, absolute", "swap_chain"),
    ("four heads", "shuffle"),
    ("no norm", "mean"),
    ("one head", "zero"),
]


@functools.cache
def make(config: TransformerConfig, seed: int = 0) -> Transformer:
    """A model with every parameter, biases too, away from its initial value."""
    model = Transformer(config, C, N, key=jax.random.key(seed))
    leaves, tree = jax.tree.flatten(model)
    keys = jax.random.split(jax.random.key(seed + 1), len(leaves))
    moved = [x + 0.2 * jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(tree, moved)


def drawn(baseline: str, source=CHAINS, sequences: int = BATCH) -> Contrast:
    return contrast(baseline, source, sequences, N, key=jax.random.key(7))


def trained(config: TransformerConfig) -> Transformer:
    """A model after 300 steps on the chains, far below the loss that it began with."""
    recipe = TrainingConfig(steps=300, batch=64, learning_rate=1e-2, evaluations=1)
    start = initial_state(Transformer(config, C, N, key=jax.random.key(0)), recipe)
    first, last = train(start, CHAINS, recipe, key=jax.random.key(1), evaluate={"loss": mean_loss})
    assert last.evaluations["loss"] < first.evaluations["loss"] - 0.1
    return last.state.model


@eqx.filter_jit
def mean_loss(model: Transformer) -> jax.Array:
    states, _ = CHAINS.draw(jax.random.key(2), 256, N + 1)
    log_probs = jax.nn.log_softmax(model(states[:, :-1]))
    return -jnp.take_along_axis(log_probs, states[:, 1:, None], -1).mean()


run = eqx.filter_jit(forward)
CAPTURED = {"capture_output": True, "text": True, "check": True}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "baseline"),
    [pytest.param(*case, marks=pytest.mark.slow if "heads" in case[0] else ()) for case in CASES],
)
def test_nothing_cut_is_clean_and_everything_cut_is_the_counterfactual(shape, baseline) -> None:
    model, on = make(SHAPES[shape]), drawn(baseline)
    edges = len(model.config.edges)
    entire = dataclasses.replace(on, since=0)
    instead = baseline_values(model, entire, mean_values(model, entire))
    clean = run(model, on.states).logits
    whole = run(model, on.states, Edges(jnp.ones(edges), instead)).logits
    np.testing.assert_array_equal(whole, clean)
    nothing = run(model, on.states, Edges(jnp.zeros(edges), instead)).logits
    if on.instead is not None:
        other = run(model, on.instead).logits
        np.testing.assert_allclose(nothing, other, atol=2e-6, rtol=1e-5)
    else:  # the same for every sequence
        np.testing.assert_allclose(nothing, nothing[:1].repeat(BATCH, 0), atol=1e-5)
    effects = mask_effects(model, on, np.stack([np.ones(edges), np.zeros(edges)]))
    assert np.all(effects.changed[:, 0] < interventions.ROUNDING)
    assert np.all(np.abs(effects.kl[:, 0]) < 1e-6)
    assert np.any(effects.changed[:, 1] > 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "baseline"), CASES)
def test_edges_at_once_equal_masks_one_by_one(shape, baseline, monkeypatch) -> None:
    monkeypatch.setattr(interventions, "CHUNK_POSITIONS", 2 * N)  # three chunks
    model, on = make(SHAPES[shape]), drawn(baseline)
    at_once = edge_effects(model, on)
    masks = 1 - np.eye(len(model.config.edges), dtype=np.float32)
    alone = mask_effects(model, on, np.concatenate([masks] * 3))  # more than fit in one call
    instead = baseline_values(model, on, mean_values(model, on))
    clean = jax.nn.log_softmax(run(model, on.states, since=on.since).logits)
    for world, mask in enumerate(masks):
        cut = run(model, on.states, Edges(jnp.asarray(mask), instead), since=on.since).logits
        kl = (jnp.exp(clean) * (clean - jax.nn.log_softmax(cut))).sum(-1).mean(-1)
        np.testing.assert_allclose(alone.kl[:, world], kl, atol=1e-6)
    np.testing.assert_array_equal(alone.kl[:, : len(masks)], alone.kl[:, -len(masks) :])
    alone = jax.tree.map(lambda array: array[:, : len(masks)], alone)
    np.testing.assert_allclose(at_once.kl, alone.kl, atol=1e-6)
    np.testing.assert_allclose(at_once.loss, alone.loss, atol=2e-6)
    np.testing.assert_allclose(at_once.changed, alone.changed, atol=1e-5)


# --- an independent implementation: plain numpy, one sequence, position, head and edge at a time


def oracle(model: Transformer, states, instead, cut: str, direct: bool = False) -> np.ndarray:
    """Logits of one sequence with one edge cut; `instead` gives the states it carries values of."""
    config = model.config
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), eqx.filter(model, eqx.is_array))

    def norm(x):
        if config.norm == "none":
            return x
        if config.norm == "layer":
            x = x - x.mean()
        return x / np.sqrt((x**2).mean() + 1e-6)

    def attend(layer, head, read, lag_bias):
        a, size = p.attentions[layer], config.head_width
        out = np.zeros((N, config.width))
        for n in range(N):
            scores = np.full(n + 1, -np.inf)
            for m in range(n + 1):
                q = norm(read("q", n)) @ a.query[head]
                k = norm(read("k", m)) @ a.key[head]
                scores[m] = q @ k / np.sqrt(size) + (lag_bias[n - m] if lag_bias is not None else 0)
            weights = np.exp(scores - scores.max())
            weights /= weights.sum()
            for m in range(n + 1):
                out[n] += weights[m] * (norm(read("v", m)) @ a.value[head] @ a.output[head])
        return out

    def senders(sequence, other=None, edge=None):
        values = {"embed": p.embedding[np.asarray(sequence)]}
        if p.position is not None:
            values["pos"] = p.position[:N]

        def reader(receiver, before):
            def read(n):
                total = np.zeros(config.width)
                for sender in before:
                    source = other if edge == f"{sender}->{receiver}" else values
                    total = total + source[sender][n]
                return total

            return read

        for layer in range(config.layers):
            before = list(values)
            new = {}
            for head in range(config.heads):
                name = f"att{layer + 1}.{head}"
                readers = {port: reader(f"{name}.{port}", before) for port in "qkv"}
                bias = p.attentions[layer].lag_bias
                bias = None if bias is None else bias[head]
                if edge == f"lag->{name}":
                    bias = np.zeros(N)
                new[name] = attend(layer, head, lambda port, n, r=readers: r[port](n), bias)
            values |= new
            before = list(values)
            mlp, read = p.mlps[layer], reader(f"mlp{layer + 1}", before)
            values[f"mlp{layer + 1}"] = np.stack(
                [
                    np.maximum(norm(read(n)) @ mlp.weight_in + mlp.bias_in, 0) @ mlp.weight_out
                    + mlp.bias_out
                    for n in range(N)
                ]
            )
        read = reader("out", list(values))
        return values, np.stack([norm(read(n)) @ p.unembedding for n in range(N)])

    clean, _ = senders(states)
    other = senders(instead)[0]
    patched, logits = senders(states, other, cut)
    receiver = cut.split("->")[1]
    if direct and receiver != "out":
        fed = receiver if receiver in clean else receiver.rsplit(".", 1)[0]
        total = sum(patched[s] if s == fed else clean[s] for s in clean)
        return np.stack([norm(row) @ p.unembedding for row in total])
    return logits


def log_softmax(x):
    return (
        x
        - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True))
        - x.max(-1, keepdims=True)
    )


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["one head", "two heads, absolute", "no norm"])
@pytest.mark.parametrize("origin", [make, trained])
def test_a_slow_oracle_agrees(shape, origin) -> None:
    model, on = origin(SHAPES[shape]), drawn("resample")
    effects = edge_effects(model, on)
    edges = model.config.edges
    tried = np.random.default_rng(0).permutation(len(edges))[:12]
    for sequence in (0, 4):
        states, instead = np.asarray(on.states[sequence]), np.asarray(on.instead[sequence])
        clean = np.asarray(forward(model, on.states[sequence][None]).logits[0], np.float64)
        before = log_softmax(clean)[on.since :]
        target = np.asarray(on.target[sequence], np.float64)[on.since :]
        for edge in tried:
            for direct in (False, True):
                after = log_softmax(oracle(model, states, instead, edges[edge], direct))[on.since :]
                kl = (np.exp(before) * (before - after)).sum(-1).mean()
                got = effects.direct if direct else effects.kl
                assert got[sequence, edge] == pytest.approx(kl, abs=1e-5), (edges[edge], direct)
            after = log_softmax(oracle(model, states, instead, edges[edge]))[on.since :]
            change = (target * (before - after)).sum(-1).mean()
            assert effects.loss[sequence, edge] == pytest.approx(change, abs=1e-5)


def test_a_circuit_solved_by_hand() -> None:
    """One layer, two states, width 2, no normalisation: every number can be worked out on paper.

    The embedding is the identity; queries and keys are 0, so that the head takes the mean over the
    context; values and output are the identity.  The MLP adds relu(first coordinate) to the second.
    On the states 0, 0, 1 the head writes (2/3, 1/3) at the last position, the MLP reads
    (2/3, 4/3) and writes (0, 2/3), and the logits are (0, 1) + (2/3, 1/3) + (0, 2/3) = (2/3, 2).
    On 1, 1, 1 they are (0, 1) + (0, 1) + (0, 0) = (0, 2).
    """
    config = TransformerConfig(width=2, layers=1, hidden=1, norm="none", positions="none")
    model = Transformer(config, 2, 3, key=jax.random.key(0))
    eye, zero = jnp.eye(2), jnp.zeros((1, 2, 2))
    attention = dataclasses.replace(
        model.attentions[0], query=zero, key=zero, value=eye[None], output=eye[None]
    )
    mlp = dataclasses.replace(
        model.mlps[0],
        weight_in=jnp.array([[1.0], [0.0]]),
        weight_out=jnp.array([[0.0, 1.0]]),
    )
    model = eqx.tree_at(
        lambda m: (m.embedding, m.unembedding, m.attentions[0], m.mlps[0]),
        model,
        (eye, eye, attention, mlp),
    )
    states, instead = jnp.array([[0, 0, 1]]), jnp.array([[1, 1, 1]])
    by_hand = {
        None: (2 / 3, 2),
        "embed->att1.0.q": (2 / 3, 2),
        "embed->att1.0.v": (0, 2),  # the head writes (0, 1), the MLP reads (0, 2)
        "embed->mlp1": (2 / 3, 2),  # the last states are the same
        "att1.0->mlp1": (2 / 3, 4 / 3),  # the MLP reads (0, 2) and writes nothing
        "embed->out": (2 / 3, 2),
        "att1.0->out": (0, 8 / 3),
        "mlp1->out": (2 / 3, 4 / 3),
    }
    on = Contrast(states, jnp.full((1, 3, 2), 0.5), instead, "resample", 2)
    graph = Graph(config)
    baseline = baseline_values(model, on, None)
    for edge, logits in by_hand.items():
        mask = jnp.asarray(graph.mask(cut=[] if edge is None else [edge]))
        got = forward(model, states, Edges(mask, baseline), since=2).logits[0, 0]
        np.testing.assert_allclose(got, logits, atol=1e-6, err_msg=str(edge))
    moved = np.asarray(edge_effects(model, on).changed[0]) > 1e-5
    changed = dict(zip(graph.edges, moved, strict=True))
    assert [edge for edge, differs in changed.items() if differs] == [
        "embed->att1.0.v",
        "att1.0->mlp1",
        "att1.0->out",
        "mlp1->out",
    ]


# --- baselines


def test_shuffle_keeps_the_counts_and_the_last_state() -> None:
    on = drawn("shuffle", sequences=64)
    np.testing.assert_array_equal(np.sort(on.instead, 1), np.sort(on.states, 1))
    np.testing.assert_array_equal(on.instead[:, -1], on.states[:, -1])
    assert on.since == N - 1
    assert len({tuple(row) for row in np.asarray(on.instead == on.states).tolist()}) > 10


@pytest.mark.parametrize("source", [CHAINS, PRIOR], ids=["set", "prior"])
def test_swap_chain_ends_in_the_same_state(source) -> None:
    on = drawn("swap_chain", source, 64)
    np.testing.assert_array_equal(on.instead[:, -1], on.states[:, -1])
    assert not np.array_equal(on.instead, on.states)


@pytest.mark.slow
def test_swapped_sequences_follow_the_other_chain() -> None:
    step = np.roll(np.eye(3), 1, axis=1)
    two = ChainSet(np.stack([step, step.T]))  # 0 -> 1 -> 2 and back
    on = contrast("swap_chain", two, 32, N, key=jax.random.key(1))
    forwards = np.diff(np.asarray(on.states), axis=1) % 3
    backwards = np.diff(np.asarray(on.instead), axis=1) % 3
    np.testing.assert_array_equal(forwards + backwards, 3)
    # And their pairs occur as stationary pi_a T_ab, up to sampling noise.
    other = ChainSet(CHAINS.transition[:2])
    on = contrast("swap_chain", other, 6000, N, key=jax.random.key(2))
    pairs = np.stack([np.asarray(on.instead[:, 0]), np.asarray(on.instead[:, 1])])
    found = np.histogram2d(*pairs, bins=C, range=[[0, C]] * 2)[0] / 6000
    own = np.asarray(other.sample(jax.random.split(jax.random.key(2))[0], 6000, N)[1])
    expected = np.mean(
        [(other.stationary[k][:, None] * other.transition[k]) * (own != k).mean() for k in (0, 1)],
        axis=0,
    )
    assert found.sum() == pytest.approx(1)
    np.testing.assert_allclose(found, 2 * expected, atol=0.06)


@pytest.mark.slow
def test_the_mean_is_exact_whatever_the_chunks(monkeypatch) -> None:
    model, on = make(SHAPES["two heads, absolute"]), drawn("mean")
    values = forward(model, on.states, since=on.since).senders.values
    for size in (N, 10**6):
        monkeypatch.setattr(interventions, "CHUNK_POSITIONS", size)
        jax.clear_caches()
        for mean, value in zip(mean_values(model, on).values, values, strict=True):
            own = value.mean(0) if value.ndim == 3 else value
            np.testing.assert_allclose(mean[0], own, atol=1e-6)


# --- attribution


@pytest.mark.slow
def test_attribution_is_the_derivative_along_each_edge() -> None:
    model, on = make(SHAPES["one head"]), drawn("resample")
    eap = attribution(model, on)
    edges, step = len(model.config.edges), 2e-2
    steps = np.concatenate([1 - step * np.eye(edges), 1 + step * np.eye(edges)])
    loss = np.asarray(mask_effects(model, on, steps.astype(np.float32)).loss, np.float64).mean(0)
    np.testing.assert_allclose(eap, (loss[:edges] - loss[edges:]) / (2 * step), atol=2e-3)


@pytest.mark.slow
def test_integrated_attribution_sums_to_the_whole_effect() -> None:
    # The integral of a gradient along a path is the difference of its ends.
    model, on = make(SHAPES["two heads, absolute"]), drawn("resample")
    everything = np.zeros((1, len(model.config.edges)), np.float32)
    whole = float(np.mean(mask_effects(model, on, everything).kl))
    assert attribution(model, on, integrated=64).sum() == pytest.approx(whole, rel=2e-2)


# --- memory


@pytest.mark.slow
def test_memory_does_not_grow_with_the_sequences() -> None:
    """Effects, attribution and mean values at the paper's size, in a process of their own."""
    script = """
import sys
from pathlib import Path
import jax
from iclens.chains import ChainPrior
from iclens.circuits.interventions import attribution, contrast, edge_effects, mean_values
from iclens.circuits.search import find_circuit
from iclens.transformer import Transformer, TransformerConfig

model = Transformer(TransformerConfig(width=64), 10, 128, key=jax.random.key(0))
chains = ChainPrior(10).sample(jax.random.key(1), 64)
for baseline in ("resample", "mean"):
    on = contrast(baseline, chains, int(sys.argv[1]), 128, key=jax.random.key(2))
    mean_values(model, on)
    edge_effects(model, on).kl.block_until_ready()
    attribution(model, on)
find_circuit(model, on, key=jax.random.key(3))
print(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
"""
    peak = [
        int(subprocess.run([sys.executable, "-c", script, str(count)], **CAPTURED).stdout) / 2**20
        for count in (64, 384)
    ]
    assert max(peak) < 2  # GiB
    assert peak[1] < peak[0] + 0.1  # what 25 edges carry of 320 more sequences is 0.24


# --- nodes, tables and errors


def test_nodes_are_ablated_by_cutting_all_that_leaves_them() -> None:
    config = SHAPES["two heads, absolute"]
    names, masks = node_masks(config)
    assert names == config.senders
    for name, mask in zip(names, masks, strict=True):
        for edge, share in zip(config.edges, mask, strict=True):
            assert share == (not edge.startswith(f"{name}->"))


def test_an_intervention_that_changes_nothing_says_so() -> None:
    model = make(TransformerConfig(width=8, layers=1, positions="absolute"))
    table = tabulate(edge_effects(model, drawn("resample")), model.config.edges)
    idle = table.edge.values[~table.changes.values]
    assert set(idle) == {edge for edge in model.config.edges if edge.startswith("pos")}
    assert table.kl.attrs["units"] == "nats"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("resampel", CHAINS, 4, N), "unknown baseline 'resampel'; did you mean 'resample'"),
        (("mean", CHAINS, 0, N), "at least 2 sequences"),
        (("mean", CHAINS, 4, 1), "a context of at least 2"),
        (("swap_chain", cyclic(3), 4, N), "no other chain of the set can produce state"),
    ],
)
def test_bad_contrasts_are_one_clear_error(arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        contrast(*arguments, key=jax.random.key(0))


def test_what_does_not_fit_a_contrast_is_refused() -> None:
    model, on = make(SHAPES["one head"]), drawn("resample")
    edges = len(model.config.edges)
    with pytest.raises(ValueError, match="expected 0 to 2, got 7"):
        dataclasses.replace(on, states=on.states.at[0, 0].set(7))
    with pytest.raises(ValueError, match="expected 0 to 2, got -1"):
        dataclasses.replace(on, instead=on.instead.at[0, 0].set(-1))
    other = contrast("mean", ChainPrior(4), 4, N, key=jax.random.key(0))
    with pytest.raises(ValueError, match="the model has 3 states, the contrast 4"):
        edge_effects(model, other)
    for masks in (np.ones((0, edges)), np.ones((2, edges - 1)), np.full((1, edges), np.nan)):
        with pytest.raises(ValueError, match=f"masks: expected at least one of {edges} finite"):
            mask_effects(model, on, masks)
    with pytest.raises(ValueError, match="integrated: expected 0 or more steps, got -3"):
        attribution(model, on, integrated=-3)
    lost = eqx.tree_at(lambda m: m.unembedding, model, replace_fn=lambda w: w.at[0, 0].set(jnp.nan))
    for measure in (edge_effects, attribution):
        with pytest.raises(ValueError, match="not all finite: its training diverged"):
            measure(lost, on)


def test_names_are_parsed_and_unknown_ones_get_the_nearest() -> None:
    graph = Graph(SHAPES["two heads, absolute"])
    assert graph.mask(cut=["att1.0->att2.1.k"]).sum() == len(graph.edges) - 1
    assert graph.mask(keep=["embed->out"]).sum() == 1
    with pytest.raises(ValueError, match=r"unknown edge 'att1.0->att2.k'; did you mean 'att1.0->"):
        graph.mask(cut=["att1.0->att2.k"])
    with pytest.raises(ValueError, match="unknown sender 'mpl1'; did you mean 'mlp1'"):
        graph.from_sender("mpl1")
    covered = np.concatenate([edges for _, edges in graph.blocks])
    assert sorted(covered.tolist()) == list(range(len(graph.edges)))
    assert graph.blocks[0][0] == 2  # embed and pos come before the first block
    assert graph.sender_of("out") is None
    assert graph.senders[graph.sender_of("att2.1.k")] == "att2.1"
    relative = Graph(SHAPES["four heads"])
    assert relative.senders[relative.sender_of("att1.3")] == "att1.3"
    assert "lag->att1.3" in relative.from_sender("lag")

"""The forward function: causality, the graph, the identities of interventions."""

from __future__ import annotations

import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from iclens.transformer import ACTIVATIONS, Edges, Senders, Transformer, TransformerConfig, forward

C, N, BATCH = 4, 12, 5
CONFIGS = [
    TransformerConfig(width=16, heads=heads, positions=positions, norm=norm)
    for heads, positions, norm in [
        (1, "relative", "rms"),
        (4, "relative", "layer"),
        (1, "absolute", "rms"),
        (2, "absolute", "none"),
        (2, "rotary", "layer"),
        (1, "none", "none"),
    ]
] + [
    TransformerConfig(width=16, heads=2, attention_only=True),
    TransformerConfig(width=8, layers=3, heads=2, hidden=5),
    TransformerConfig(width=8, layers=1, activation="gelu"),
]
each_config = pytest.mark.parametrize(
    "config",
    [
        pytest.param(config, marks=[pytest.mark.slow] * (place in (1, 2, 5, 7)))
        for place, config in enumerate(CONFIGS)
    ],
    ids=[f"{c.layers}x{c.heads}-{c.positions}-{c.norm}-{c.activation}" for c in CONFIGS],
)


@functools.cache
def make(config: TransformerConfig, seed: int = 0) -> Transformer:
    """A model with every parameter, biases too, away from its initial value."""
    model = Transformer(config, C, N, key=jax.random.key(seed))
    leaves, tree = jax.tree.flatten(model)
    keys = jax.random.split(jax.random.key(seed + 1), len(leaves))
    moved = [x + 0.3 * jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(tree, moved)


def draw(seed: int = 3) -> jax.Array:
    return jax.random.randint(jax.random.key(seed), (BATCH, N), 0, C)


run = eqx.filter_jit(forward)


@each_config
def test_later_states_change_no_earlier_output(config) -> None:
    model, states = make(config), draw()
    clean = run(model, states).logits
    for position in (1, N // 2, N - 1):
        changed = states.at[:, position:].set((states[:, position:] + 1) % C)
        logits = run(model, changed).logits
        np.testing.assert_array_equal(logits[:, :position], clean[:, :position])
        assert not np.allclose(logits[:, position], clean[:, position])


@each_config
def test_mask_of_ones_is_the_clean_model_bitwise(config) -> None:
    model, states = make(config), draw()
    clean = run(model, states)
    other = run(model, draw(9)).senders
    zeros = jax.tree.map(jnp.zeros_like, other)
    means = Senders(tuple(v.mean(axis=0, keepdims=True) for v in other.values), other.lag)
    for baseline in (other, zeros, means):
        masked = run(model, states, Edges(jnp.ones(len(config.edges)), baseline))
        for expected, got in zip(jax.tree.leaves(clean), jax.tree.leaves(masked), strict=True):
            np.testing.assert_array_equal(got, expected)


@each_config
def test_all_edges_cut_with_anothers_values_give_the_others_output(config) -> None:
    model, states = make(config), draw()
    other = run(model, draw(9))
    cut = run(model, states, Edges(jnp.zeros(len(config.edges)), other.senders))
    np.testing.assert_array_equal(cut.logits, other.logits)


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        pytest.param(config, marks=[pytest.mark.slow] * (place in (1, 2, 5)))
        for place, config in enumerate(CONFIGS[:7])
    ],
    ids=[f"{c.heads}-{c.positions}" for c in CONFIGS[:7]],
)
def test_worlds_at_once_equal_a_loop_over_worlds(config) -> None:
    model, states = make(config), draw()
    other = run(model, draw(9)).senders
    masks = 1 - jnp.eye(len(config.edges))
    at_once = jax.jit(jax.vmap(lambda mask: forward(model, states, Edges(mask, other)).logits))
    batched = at_once(masks)
    clean = run(model, states).logits
    for mask, logits, name in zip(masks, batched, config.edges, strict=True):
        alone = run(model, states, Edges(mask, other)).logits
        scale = max(1, np.abs(alone).max())  # without normalisation logits reach 100
        np.testing.assert_allclose(logits, alone, atol=2e-5 * scale)
        if not name.startswith(("lag", "pos")):  # those are the same in both runs
            assert not np.allclose(alone, clean, atol=1e-6), name


@each_config
def test_known_senders_are_not_recomputed_and_change_nothing(config) -> None:
    model, states = make(config), draw()
    clean = run(model, states)
    starts = [i for i, n in enumerate(config.senders) if n.endswith(".0") or n.startswith("mlp")]
    for count in [*starts, len(config.senders)]:
        resumed = run(model, states, None, clean.senders.values[:count])
        np.testing.assert_allclose(resumed.logits, clean.logits, atol=1e-5, rtol=1e-4)
    other = run(model, draw(9))
    taken = run(model, states, None, other.senders.values)
    np.testing.assert_allclose(taken.logits, other.logits, atol=1e-5, rtol=1e-5)


def test_cutting_the_lag_edge_removes_the_lag_bias() -> None:
    config = TransformerConfig(width=16, heads=2)
    model, states = make(config), draw()
    clean = run(model, states)
    baseline = Senders(clean.senders.values, jnp.zeros_like(clean.senders.lag))
    mask = jnp.array([0.0 if name == "lag->att2.1" else 1.0 for name in config.edges])
    without = eqx.tree_at(
        lambda m: m.attentions[1].lag_bias, model, replace_fn=lambda bias: bias.at[1].set(0)
    )
    np.testing.assert_allclose(
        run(model, states, Edges(mask, baseline)).logits, run(without, states).logits, atol=1e-6
    )


@pytest.mark.parametrize("config", [CONFIGS[0], CONFIGS[3]], ids=["one head", "two heads"])
def test_a_sub_circuit_is_the_whole_with_the_other_edges_cut_to_zero(config) -> None:
    every = config.edges
    kept = tuple(np.random.default_rng(0).permutation(every)[: 2 * len(every) // 3].tolist())
    smaller = dataclasses.replace(config, circuit=kept)
    assert smaller.edges == tuple(edge for edge in every if edge in kept)
    whole, states = make(config), draw()
    shape = jax.tree.structure(Transformer(smaller, C, N, key=jax.random.key(0)))
    part = jax.tree.unflatten(shape, jax.tree.leaves(whole))
    zeros = jax.tree.map(jnp.zeros_like, run(whole, states).senders)
    mask = jnp.array([float(edge in kept) for edge in every])
    expected = run(whole, states, Edges(mask, zeros)).logits
    np.testing.assert_allclose(run(part, states).logits, expected, atol=1e-5, rtol=1e-5)
    everything = Edges(jnp.ones(len(kept)), run(part, states).senders)
    np.testing.assert_array_equal(run(part, states, everything).logits, run(part, states).logits)


def test_unknown_edges_of_a_sub_circuit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"model.circuit: unknown edge 'embed->att1.q'; did you"):
        TransformerConfig(circuit=("embed->att1.q",))


def test_edges_are_named_and_counted() -> None:
    config = TransformerConfig()
    assert config.senders == ("embed", "att1.0", "mlp1", "att2.0", "mlp2")
    # 3 + lag, 2 into mlp1, 3 x 3 + lag, 4 into mlp2, 5 into out
    assert len(config.edges) == len(set(config.edges)) == 25
    assert "att1.0->att2.0.k" in config.edges
    assert "lag->att1.0" in config.edges
    assert "mlp2->mlp2" not in config.edges
    heads = TransformerConfig(heads=2, positions="absolute")
    assert heads.senders[:4] == ("embed", "pos", "att1.0", "att1.1")
    assert "att1.0->att1.1.q" not in heads.edges
    assert "pos->out" in heads.edges


def test_attention_rows_sum_to_one_and_look_back_only() -> None:
    model = make(TransformerConfig(width=16, heads=2))
    for pattern in run(model, draw()).attention:
        assert pattern.shape == (BATCH, 2, N, N)
        np.testing.assert_allclose(pattern.sum(-1), 1, atol=1e-6)
        assert np.all(np.triu(pattern, 1) == 0)


def test_plain_numpy_gives_the_same_logits() -> None:
    """An independent forward pass with loops over sequences, positions and heads."""
    config = TransformerConfig(width=8, heads=2)
    model, states = make(config), draw()
    stream = np.asarray(model.embedding, np.float64)[np.asarray(states)]

    def rms(x):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)

    for attention, mlp in zip(model.attentions, model.mlps, strict=True):
        a = jax.tree.map(lambda x: np.asarray(x, np.float64), attention)
        m = jax.tree.map(lambda x: np.asarray(x, np.float64), mlp)
        read, written = rms(stream), np.zeros_like(stream)
        for b in range(BATCH):
            for h in range(2):
                q, k, v = (read[b] @ w[h] for w in (a.query, a.key, a.value))
                for n in range(N):
                    scores = np.array(
                        [q[n] @ k[i] / np.sqrt(4) + a.lag_bias[h, n - i] for i in range(n + 1)]
                    )
                    weight = np.exp(scores - scores.max())
                    weight /= weight.sum()
                    written[b, n] += (weight @ v[: n + 1]) @ a.output[h]
        stream = stream + written
        hidden = np.maximum(rms(stream) @ m.weight_in + m.bias_in, 0)
        stream = stream + hidden @ m.weight_out + m.bias_out
    expected = rms(stream) @ np.asarray(model.unembedding, np.float64)
    np.testing.assert_allclose(run(model, states).logits, expected, atol=2e-5, rtol=1e-5)


@each_config
def test_float32_agrees_with_float64(config) -> None:
    model, states = make(config), draw()
    single = run(model, states).logits
    with jax.enable_x64(True):
        double = run(jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), model), states).logits
        assert double.dtype == jnp.float64
        np.testing.assert_allclose(single, double, atol=5e-5, rtol=1e-4)


@each_config
def test_gradients_are_finite_and_reach_every_parameter(config) -> None:
    model, states = Transformer(config, C, N, key=jax.random.key(0)), draw()

    def loss(model):
        log_probs = jax.nn.log_softmax(model(states[:, :-1]))
        return -jnp.take_along_axis(log_probs, states[:, 1:, None], -1).mean()

    gradient = eqx.filter_jit(eqx.filter_grad(loss))
    for candidate in (model, make(config)):
        for path, leaf in jax.tree_util.tree_leaves_with_path(gradient(candidate)):
            assert np.isfinite(leaf).all(), path
            assert np.any(leaf != 0), path


def test_an_mlp_is_the_activation_between_two_maps() -> None:
    inputs = jnp.linspace(-4, 4, 41, dtype=jnp.float32)
    cubic = np.asarray(inputs, float) + 0.044715 * np.asarray(inputs, float) ** 3
    gelu = inputs / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * cubic))
    np.testing.assert_allclose(ACTIVATIONS["gelu"](inputs), gelu, atol=1e-6)
    for name, values in {"relu": np.maximum(inputs, 0), "gelu": gelu}.items():
        config = TransformerConfig(
            width=2, layers=1, hidden=1, norm="none", activation=name, circuit=("embed->mlp1",)
        )
        model = Transformer(config, len(inputs), 1, key=jax.random.key(0))
        model = eqx.tree_at(
            lambda m: (m.embedding, m.mlps[0].weight_in, m.mlps[0].weight_out),
            model,
            (jnp.stack([inputs, inputs], 1), jnp.array([[2.0], [-1.0]]), jnp.array([[1.0, 3.0]])),
        )
        written = run(model, jnp.arange(len(inputs))[:, None]).senders.values[-1]
        np.testing.assert_allclose(written[:, 0], np.outer(values, [1, 3]), atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 3}, "expected a divisor of model.width = 32, got 3"),
        ({"heads": 0}, "model.heads: expected at least 1, got 0"),
        ({"hidden": 0}, "model.hidden: expected at least 1, got 0"),
        ({"width": 6, "heads": 2, "positions": "rotary"}, "even head width"),
    ],
)
def test_impossible_shapes_are_refused(change, message) -> None:
    with pytest.raises(ValueError, match=message):
        TransformerConfig(**change)


@pytest.mark.parametrize(
    ("config", "since"),
    [(CONFIGS[0], 1), (CONFIGS[3], N // 2)]
    + [
        pytest.param(CONFIGS[place], since, marks=pytest.mark.slow)
        for place, since in [(0, N - 1), (1, N // 2), (2, N // 2), (4, N // 2)]
    ],
    ids=lambda value: str(value) if isinstance(value, int) else f"{value.heads}-{value.positions}",
)
def test_late_positions_alone_are_the_same(config, since) -> None:
    model, states = make(config), draw()
    clean, other = run(model, states), run(model, draw(9)).senders
    late = run(model, states, since=since)
    last = config.senders.index(f"att{config.layers}.0")
    np.testing.assert_allclose(late.logits, clean.logits[:, since:], atol=1e-4, rtol=1e-4)
    assert all(value.shape[1] == N - since for value in late.senders.values[last:])
    mask = jax.random.uniform(jax.random.key(1), (len(config.edges),))
    whole = run(model, states, Edges(mask, other)).logits
    short = run(model, draw(9), since=since).senders
    again = run(model, states, Edges(mask, short), since=since).logits
    np.testing.assert_allclose(again, whole[:, since:], atol=1e-4, rtol=1e-4)


def test_what_does_not_fit_is_refused() -> None:
    config = TransformerConfig(width=8)
    model = make(config)
    with pytest.raises(ValueError, match="at most 12 states in the context, got 13"):
        model(jnp.zeros((1, 13), int))
    other = run(model, draw()).senders
    with pytest.raises(ValueError, match=r"each of 25 edges, got shape \(24,\)"):
        model(draw(), Edges(jnp.ones(24), other))
    with pytest.raises(ValueError, match="each of 5 senders"):
        model(draw(), Edges(jnp.ones(25), Senders(other.values[:-1], other.lag)))
    with pytest.raises(ValueError, match="at least 2 states"):
        Transformer(config, 1, N, key=jax.random.key(0))


def test_what_does_not_fit_the_graph_is_refused() -> None:
    config = TransformerConfig(width=16, heads=2)
    model, states = make(config), draw()
    clean = forward(model, states)
    for count in range(len(config.senders) + 2):
        known = (*clean.senders.values, clean.senders.values[0])[:count]
        if count in (0, 1, 3, 4, 6, 7):
            logits = forward(model, states, known=known).logits
            np.testing.assert_allclose(logits, clean.logits, atol=1e-5)
        else:
            with pytest.raises(ValueError, match="known: expected the values of whole blocks"):
                forward(model, states, known=known)
    edges = Edges(jnp.ones(len(config.edges)), clean.senders)
    for lag in (jnp.zeros((1, 1, N)), jnp.zeros((2, 2, 1)), jnp.zeros((2, 2, 0))):
        wrong = eqx.tree_at(lambda e: e.baseline.lag, edges, lag)
        with pytest.raises(ValueError, match=r"baseline.lag: expected shape .* = \(2, 2, 12\)"):
            forward(model, states, wrong)
    wrong = eqx.tree_at(lambda e: e.baseline.values[3], edges, jnp.zeros((7, 16)))
    with pytest.raises(ValueError, match="baseline of mlp1: expected a shape that broadcasts to"):
        forward(model, states, wrong)
    for state in (-1, C):
        with pytest.raises(ValueError, match=f"expected 0 to {C - 1}, got {state}"):
            forward(model, states.at[2, 3].set(state))

"""Checkpoints of TransformerLens: what is folded computes the same, what cannot be is refused."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from iclens.interop.checkpoints import read_checkpoint
from iclens.interop.export import export_model
from iclens.interop.unsaid import Unsaid
from iclens.lab.files import tree_to_arrays
from iclens.transformer import Transformer, TransformerConfig

STATES, CONTEXT, WIDTH, HEADS, HIDDEN, EPSILON, SCALE = 3, 6, 8, 2, 5, 1e-2, 3.0
ALL_SAID = Unsaid(norm="layer", eps=EPSILON, activation="gelu")


def tensors(layers: int = 2, **instead: Any) -> dict[str, np.ndarray]:
    """Tensors of a model with everything that can be folded; `instead` replaces some, None takes
    some away."""
    random = np.random.default_rng(0)
    inner = WIDTH // HEADS
    shapes: dict[str, tuple[int, ...]] = {
        "embed.W_E": (STATES, WIDTH),
        "pos_embed.W_pos": (CONTEXT, WIDTH),
        "ln_final.w": (WIDTH,),
        "unembed.W_U": (WIDTH, STATES),
    }
    for layer in range(layers):
        at = f"blocks.{layer}"
        shapes |= {f"{at}.attn.W_{name}": (HEADS, WIDTH, inner) for name in "QKV"}
        shapes |= {f"{at}.attn.W_O": (HEADS, inner, WIDTH), f"{at}.attn.b_K": (HEADS, inner)}
        shapes |= {f"{at}.{name}": (WIDTH,) for name in ("ln1.w", "ln2.w", "ln2.b", "mlp.b_out")}
        shapes |= {f"{at}.mlp.W_in": (WIDTH, HIDDEN), f"{at}.mlp.W_out": (HIDDEN, WIDTH)}
        shapes |= {f"{at}.mlp.b_in": (HIDDEN,)}
    found = {name: random.normal(0, 0.7, shape) for name, shape in shapes.items()}
    found |= {"ln_final.b": np.zeros(WIDTH), "blocks.0.attn.IGNORE": np.array(-1e5)}
    found |= {"blocks.1.attn.b_Q": np.zeros((HEADS, inner)), "unembed.b_U": np.zeros(STATES)}
    found |= {name.replace("__", "."): array for name, array in instead.items()}
    return {name: array for name, array in found.items() if array is not None}


def logits(found: dict[str, np.ndarray], states: np.ndarray, scale: float) -> np.ndarray:
    """What TransformerLens computes of such tensors, written down once more: one sequence."""

    def normal(stream: np.ndarray, name: str) -> np.ndarray:
        centred = stream - stream.mean(-1, keepdims=True)
        spread = np.sqrt((centred**2).mean(-1, keepdims=True) + EPSILON)
        return centred / spread * found[f"{name}.w"] + found.get(f"{name}.b", 0)

    def soft(scores: np.ndarray) -> np.ndarray:
        raised = np.exp(scores - scores.max(-1, keepdims=True))
        return raised / raised.sum(-1, keepdims=True)

    stream = found["embed.W_E"][states] + found["pos_embed.W_pos"][: len(states)]
    for layer in range(2):
        at = f"blocks.{layer}"
        read, written = normal(stream, f"{at}.ln1"), np.zeros_like(stream)
        for head in range(HEADS):
            weight = {name: found[f"{at}.attn.W_{name}"][head] for name in "QKVO"}
            keys = read @ weight["K"] + found[f"{at}.attn.b_K"][head]
            scores = (read @ weight["Q"]) @ keys.T / scale
            scores[np.triu_indices(len(states), 1)] = -np.inf
            written += soft(scores) @ (read @ weight["V"]) @ weight["O"]
        stream = stream + written
        hidden = normal(stream, f"{at}.ln2") @ found[f"{at}.mlp.W_in"] + found[f"{at}.mlp.b_in"]
        hidden *= 0.5 * (1 + np.tanh(np.sqrt(2 / np.pi) * (hidden + 0.044715 * hidden**3)))
        stream = stream + hidden @ found[f"{at}.mlp.W_out"] + found[f"{at}.mlp.b_out"]
    return normal(stream, "ln_final") @ found["unembed.W_U"]


def write(folder: Path, found: dict[str, np.ndarray], config: dict[str, Any] | None = None) -> Path:
    ordered = {name: np.asarray(array, order="C") for name, array in found.items()}
    (folder / "model.safetensors").write_bytes(safetensors.numpy.save(ordered))
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_what_is_folded_computes_the_same(tmp_path: Path) -> None:
    found = tensors()
    said = {"act_fn": "gelu_new", "normalization_type": "LN", "eps": EPSILON, "attn_scale": SCALE}
    model = read_checkpoint(write(tmp_path, found, said))
    assert model.config == TransformerConfig(
        WIDTH, heads=HEADS, hidden=HIDDEN, norm="layer", positions="absolute", activation="gelu"
    )
    states = np.array([0, 2, 1, 1, 0, 2])
    expected = logits(found, states, SCALE)
    np.testing.assert_allclose(model(jnp.asarray(states[None]))[0], expected, atol=3e-5)
    assert np.abs(expected - logits(found, states, 2.0)).max() > 1e-2


def test_the_user_says_what_no_file_says(tmp_path: Path) -> None:
    path = write(tmp_path, tensors()) / "model.safetensors"
    states = np.array([0, 2, 1, 1])
    model = read_checkpoint(path, dataclasses.replace(ALL_SAID, context=4))
    assert model.context == 4
    expected = logits(tensors(), states, np.sqrt(WIDTH // HEADS))
    np.testing.assert_allclose(model(jnp.asarray(states[None]))[0], expected, atol=3e-5)


SHAPES = [
    TransformerConfig(width=8, heads=2),
    TransformerConfig(width=8, positions="absolute", norm="layer", activation="gelu", hidden=3),
    TransformerConfig(width=8, positions="rotary", norm="none", attention_only=True, layers=3),
    TransformerConfig(width=8, positions="none", norm="rms", layers=1),
]


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(shape, marks=[pytest.mark.slow] * (place > 1))
        for place, shape in enumerate(SHAPES)
    ],
    ids=[shape.positions for shape in SHAPES],
)
def test_what_was_exported_comes_back_to_the_bit(config: TransformerConfig, tmp_path: Path) -> None:
    model = Transformer(config, STATES, CONTEXT, key=jax.random.key(0))
    model = jax.tree.map(lambda array: array + 0.1, model)  # also what starts at 0
    export_model(model, "transformer-lens", tmp_path)
    again = read_checkpoint(tmp_path)
    assert dataclasses.replace(again.config, hidden=None) == dataclasses.replace(
        config, hidden=None
    )
    assert again.context == CONTEXT
    before, after = tree_to_arrays(model), tree_to_arrays(again)
    assert before.keys() == after.keys()
    for name, array in before.items():
        assert np.array_equal(array, after[name]), name


def test_tensors_of_a_bridge_of_version_4(tmp_path: Path) -> None:
    found = tensors(ln_final__b=None, blocks__0__attn__IGNORE=None)
    bridge = {}
    for name, array in found.items():
        module, _, kind = name.rpartition(".")
        if module.endswith("attn"):
            flat = {"W_O": lambda a: a.reshape(-1, WIDTH).T, "b": np.ravel}.get(
                "W_O" if kind == "W_O" else kind[0], lambda a: a.mT.reshape(-1, WIDTH)
            )(array)
            bridge[f"{module}.{kind[-1].lower()}.{'weight' if kind[0] == 'W' else 'bias'}"] = flat
        elif module.endswith("mlp"):
            bridge[f"{module}.{kind[2:]}.{'weight' if kind[0] == 'W' else 'bias'}"] = array.T
        elif kind in ("W_E", "W_pos"):
            bridge[f"{module}.weight"] = array
        elif module == "unembed":
            bridge[f"{module}.{'weight' if kind[0] == 'W' else 'bias'}"] = array.T
        else:
            bridge[f"{module}.{'weight' if kind == 'w' else 'bias'}"] = array
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir(), new.mkdir()
    with pytest.raises(ValueError, match="expected --heads"):
        read_checkpoint(write(new, bridge), ALL_SAID)
    with pytest.raises(ValueError, match=r"blocks\..\.attn\.\w\.\w+: .* into 3 heads"):
        read_checkpoint(new, dataclasses.replace(ALL_SAID, heads=3))
    again = read_checkpoint(new, dataclasses.replace(ALL_SAID, heads=HEADS))
    expected = read_checkpoint(write(old, found), ALL_SAID)
    for name, array in tree_to_arrays(expected).items():
        assert np.array_equal(array, tree_to_arrays(again)[name]), name


ONES = np.ones((HEADS, WIDTH // HEADS))


@pytest.mark.parametrize(
    ("instead", "config", "told"),
    [
        ({"blocks__0__attn__b_Q": ONES}, {}, "blocks.0.attn.b_Q is not 0"),
        ({"blocks__1__attn__b_V": ONES}, {}, "blocks.1.attn.b_V is not 0"),
        ({"blocks__1__attn__b_O": np.ones(WIDTH)}, {}, "blocks.1.attn.b_O is not 0"),
        ({"blocks__0__ln1__b": np.ones(WIDTH)}, {}, "blocks.0.ln1.b is not 0"),
        ({"ln_final__b": np.ones(WIDTH)}, {}, "ln_final.b is not 0"),
        ({"unembed__b_U": np.ones(STATES)}, {}, "unembed.b_U is not 0"),
        ({"unembed__b_U": np.ones(4)}, {}, "unembed.b_U: expected shape (3), got (4,)"),
        ({"unembed__W_U": None}, {}, "unembed.W_U: expected a tensor of shape (8, 3), got none"),
        ({"embed__W_E": np.ones((0, 0))}, {}, "embed.W_E: expected shape (any, any), got (0, 0)"),
        ({"embed__W_E": np.full((3, 8), np.nan)}, {}, "embed.W_E: expected finite numbers"),
        ({"embed__W_E": np.ones((3, 8), int)}, {}, "embed.W_E: expected finite numbers"),
        ({"unembed__W_U": np.full((8, 3), 1e300)}, {}, "unembedding: the numbers are too large"),
        ({"blocks__1__attn__W_Q": np.ones((1, 8, 8))}, {}, "blocks.1.attn.W_Q: expected shape"),
        ({"blocks__1__attn__W_Q": None}, {}, "blocks.1.attn.W_Q: expected a tensor of shape"),
        ({"blocks__7__attn__W_Q": ONES}, {}, "blocks.2.attn.W_Q: expected a tensor of shape"),
        ({"blocks__0__mlp__W_gate": ONES}, {}, "blocks.0.mlp.W_gate: such a tensor has no"),
        ({}, {"normalization_type": "RMS"}, "blocks.0.ln2.b: such a tensor has no counterpart"),
        ({}, {"normalization_type": "BN"}, "normalization_type = 'BN' has no counterpart"),
        ({}, {"act_fn": "gelu"}, "act_fn: expected 'relu' or 'gelu_new', got 'gelu', which uses"),
        ({}, {"act_fn": None}, "expected --activation"),
        ({}, {"eps": None}, "expected --eps"),
        ({}, {"eps": 0}, "eps: expected a positive number, got 0"),
        ({}, {"eps": "small"}, "eps: expected a finite number, got 'small'"),
        ({}, {"attn_scale": math.nan}, "attn_scale: expected a finite number, got nan"),
        ({}, {"n_ctx": math.inf}, "n_ctx: expected a whole number from 1 to 1048576, got inf"),
        ({}, {"n_ctx": 10**30}, "n_ctx: expected a whole number from 1 to 1048576, got 1000"),
        ({}, {"n_heads": 2.0}, "n_heads: expected a whole number from 1 to 1048576, got 2.0"),
        ({}, {"n_heads": 4}, "n_heads: expected 2, got 4"),
        ({}, {"n_key_value_heads": 1}, "n_key_value_heads: expected 2, got 1"),
        ({}, {"gated_mlp": True}, "gated_mlp = True has no counterpart"),
        ({}, {"attention_dir": "bidirectional"}, "attention_dir = 'bidirectional' has no"),
        ({}, {"positional_embedding_type": "alibi"}, "'alibi' has no counterpart"),
        ({}, {"positional_embedding_type": "rotary"}, "give --positions rotary"),
        (
            {},
            {"positional_embedding_type": "rotary", "rotary_adjacent_pairs": True},
            "blocks.0.attn.b_K is not 0",
        ),
        (
            {"blocks__0__attn__b_K": None, "blocks__1__attn__b_K": None},
            {"positional_embedding_type": "rotary", "rotary_adjacent_pairs": True},
            "pos_embed.W_pos is not 0, but positions are rotary",
        ),
        ({"pos_embed__W_pos": None}, {}, "expected --positions"),
    ],
)
def test_what_cannot_be_expressed_is_named(instead, config, told, tmp_path: Path) -> None:
    said = {"act_fn": "gelu_new", "normalization_type": "LN", "eps": EPSILON, "n_ctx": 6}
    write(tmp_path, tensors(**instead), said | config)
    with pytest.raises(ValueError, match=re.escape(told)) as refusal:
        read_checkpoint(tmp_path)
    assert "model.safetensors" in str(refusal.value)


@pytest.mark.parametrize(
    ("unsaid", "told"),
    [
        (Unsaid(norm="rms"), "--norm: the checkpoint says 'layer', got 'rms'"),
        (Unsaid(context=7), "--context: expected at most 6, as many as there are learned"),
        (Unsaid(context=0), "a context of at least 1"),
        (Unsaid(positions="none"), "--positions: the checkpoint says 'absolute', got 'none'"),
    ],
)
def test_the_user_cannot_say_otherwise(unsaid: Unsaid, told: str, tmp_path: Path) -> None:
    said = {"act_fn": "gelu_new", "normalization_type": "LN", "eps": EPSILON}
    write(tmp_path, tensors(), said)
    with pytest.raises(ValueError, match=re.escape(told)):
        read_checkpoint(tmp_path, unsaid)


@pytest.mark.parametrize("text", ["{", "[]", "[" * 100_000, "\xff"])
def test_a_damaged_configuration_is_refused(text: str, tmp_path: Path) -> None:
    write(tmp_path, tensors())
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"config.json"):
        read_checkpoint(tmp_path)


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=2), max_leaves=3)
KEYS = st.sampled_from(["eps", "n_ctx", "n_heads", "act_fn", "attn_scale", "normalization_type"])
KEYS |= st.sampled_from(["positional_embedding_type", "rotary_adjacent_pairs", "rotary_dim"])
NAMES = st.sampled_from([*tensors(), "blocks.0.attn.q.weight", "blocks.9.ln1.w", "blocks.0.mlp.in"])
ARRAYS = st.none() | st.lists(st.integers(0, 8), max_size=3).map(np.ones)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(said=st.dictionaries(KEYS, VALUES), instead=st.dictionaries(NAMES, ARRAYS, max_size=3))
def test_no_checkpoint_is_answered_with_a_traceback(tmp_path: Path, said, instead) -> None:
    found = {n: a for n, a in {**tensors(), **instead}.items() if a is not None}
    write(tmp_path, found, {"act_fn": "relu", "normalization_type": "LN", "eps": 1e-5} | said)
    try:
        model = read_checkpoint(tmp_path)
    except ValueError:
        return
    assert model.embedding.shape == (STATES, WIDTH)

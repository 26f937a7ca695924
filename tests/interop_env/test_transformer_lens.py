"""TransformerLens computes what iclens computes: logits, patterns, interventions."""

from __future__ import annotations

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformer_lens.config import TransformerBridgeConfig
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.utilities.tl_checkpoint_conversion import convert_tl_checkpoint

from iclens import Transformer, export_model, forward
from iclens.interop.transformer_lens import load_bridge


def native(folder: Path) -> TransformerBridge:
    """The model by TransformerLens alone."""
    config = TransformerBridgeConfig(**json.loads((folder / "config.json").read_text()))
    bridge = TransformerBridge.boot_native(config)
    weights = load_file(folder / "model.safetensors")
    bridge.load_state_dict(convert_tl_checkpoint(weights, config))
    return bridge


@pytest.fixture(scope="module")
def folder(model: Transformer, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("lens")
    export_model(model, "transformer-lens", path)
    return path


def test_its_logits_and_everything_in_its_cache_are_ours(
    model: Transformer, folder: Path, states: np.ndarray
) -> None:
    ours = forward(model, jnp.asarray(states))
    logits, cache = load_bridge(folder).run_with_cache(torch.tensor(states))
    np.testing.assert_allclose(logits.detach(), ours.logits, atol=1e-5)
    written = iter(ours.senders.values[model.config.block_ends[1] :])
    for layer, pattern in enumerate(ours.attention):
        found = cache[f"blocks.{layer}.attn.hook_pattern"]
        np.testing.assert_allclose(found, pattern, atol=1e-5)
        heads = sum(next(written) for _ in range(model.config.heads))
        np.testing.assert_allclose(cache[f"blocks.{layer}.hook_attn_out"], heads, atol=1e-5)
        if model.mlps:
            mlp = cache[f"blocks.{layer}.hook_mlp_out"]
            np.testing.assert_allclose(mlp, next(written), atol=1e-5)


def test_it_needs_nothing_of_iclens_unless_positions_are_relative(
    model: Transformer, folder: Path, states: np.ndarray
) -> None:
    if model.config.positions == "relative":
        with pytest.raises(ValueError, match=r"blocks.0.attn.lag_bias"):
            native(folder)
        return
    logits = native(folder)(torch.tensor(states))
    np.testing.assert_allclose(logits.detach(), model(jnp.asarray(states)), atol=1e-5)


def test_shorter_sequences_too(model: Transformer, folder: Path, states: np.ndarray) -> None:
    logits = load_bridge(folder)(torch.tensor(states[:, :7]))
    np.testing.assert_allclose(logits.detach(), model(jnp.asarray(states[:, :7])), atol=1e-5)


def test_a_head_ablated_there_is_a_head_ablated_here(
    model: Transformer, folder: Path, states: np.ndarray, cut
) -> None:
    last = f"att1.{model.config.heads - 1}"

    def ablate(z: torch.Tensor, hook: object) -> torch.Tensor:
        z[:, :, -1] = 0
        return z

    bridge = load_bridge(folder)
    hooks = [("blocks.0.attn.hook_z", ablate)]
    theirs = bridge.run_with_hooks(torch.tensor(states), fwd_hooks=hooks)
    ours = cut(model, lambda edge: edge.startswith(f"{last}->"))
    np.testing.assert_allclose(theirs.detach(), ours, atol=1e-5)

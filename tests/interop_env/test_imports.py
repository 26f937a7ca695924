"""Models that TransformerLens made compute the same when they are imported."""

from __future__ import annotations

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformer_lens.config import TransformerBridgeConfig
from transformer_lens.model_bridge import TransformerBridge

from iclens import Transformer, Unsaid
from iclens.interop.checkpoints import read_checkpoint

SIZES = {"d_model": 16, "d_head": 8, "n_heads": 2, "n_layers": 2, "n_ctx": 16, "d_vocab": 3}
SHAPES = {
    "LN": {"normalization_type": "LN", "act_fn": "gelu_new", "d_mlp": 20},
    "LNPre": {"normalization_type": "LNPre", "act_fn": "relu", "eps": 1e-3},
    "RMS": {"normalization_type": "RMS", "act_fn": "relu", "attn_scale": 3.0},
    "rotary": {
        "normalization_type": "RMSPre",
        "positional_embedding_type": "rotary",
        "act_fn": "relu",
    },
    "attention": {"normalization_type": None, "attn_only": True},
}
BIASES = (
    ".attn.q.bias",
    ".attn.v.bias",
    ".attn.o.bias",
    "unembed.bias",
    "ln1.bias",
    "ln_final.bias",
)
"""What iclens has no place for; 0 in models as TransformerLens initialises them."""


@pytest.mark.parametrize("shape", SHAPES)
def test_a_model_of_its_own(shape: str, states: np.ndarray, tmp_path: Path) -> None:
    said = SIZES | SHAPES[shape]
    torch.manual_seed(0)
    bridge = TransformerBridge.boot_native(TransformerBridgeConfig(**said, seed=0))
    rotary = said.get("positional_embedding_type") == "rotary"
    fixed = BIASES + (".attn.k.bias",) * rotary
    with torch.no_grad():
        for name, tensor in bridge.state_dict().items():
            if not name.endswith(fixed):
                tensor.add_(0.2 * torch.randn_like(tensor))
    expected = bridge(torch.tensor(states)).detach()
    saved = {name: tensor.contiguous() for name, tensor in bridge.state_dict().items()}
    save_file(saved, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"eps": 1e-5, **said}))
    unsaid = Unsaid(positions="rotary") if rotary else Unsaid()
    model = read_checkpoint(tmp_path, unsaid)
    np.testing.assert_allclose(model(jnp.asarray(states)), expected, atol=1e-5)


def test_a_trained_bias_of_attention_is_refused(tmp_path: Path) -> None:
    config = TransformerBridgeConfig(**SIZES, normalization_type="RMSPre", seed=0)
    bridge = TransformerBridge.boot_native(config)
    saved = {name: tensor.contiguous() for name, tensor in bridge.state_dict().items()}
    saved["blocks.1.attn.q.bias"] = torch.ones(16)
    save_file(saved, tmp_path / "model.safetensors")
    unsaid = Unsaid(norm="rms", eps=1e-5, activation="relu", heads=2)
    with pytest.raises(ValueError, match=r"blocks.1.attn.b_Q is not 0: iclens has no such bias"):
        read_checkpoint(tmp_path, unsaid)


def test_what_was_exported_comes_back_through_transformer_lens(
    model: Transformer, states: np.ndarray, tmp_path: Path
) -> None:
    from iclens import export_model, load_bridge

    export_model(model, "transformer-lens", tmp_path / "out")
    if model.config.positions == "relative":  # TransformerLens does not save them
        return
    bridge = load_bridge(tmp_path / "out")
    saved = {name: tensor.contiguous() for name, tensor in bridge.state_dict().items()}
    (tmp_path / "back").mkdir()
    save_file(saved, tmp_path / "back" / "model.safetensors")
    (tmp_path / "out" / "config.json").rename(tmp_path / "back" / "config.json")
    unsaid = Unsaid(positions="none") if model.config.positions == "none" else Unsaid()
    again = read_checkpoint(tmp_path / "back", unsaid)
    np.testing.assert_allclose(again(jnp.asarray(states)), model(jnp.asarray(states)), atol=1e-6)

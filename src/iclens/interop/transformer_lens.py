"""Models as TransformerLens 4 has them: weights under its names, its configuration, its bridge.

The weights are named as its state dictionaries were before version 4 (`blocks.0.attn.W_Q`), which
its `convert_tl_checkpoint` reads.  Attention there has biases: they are 0.  Where a model has no
positions its learned vectors are 0.  A learned bias per lag is not among its positions:
`load_bridge` adds it, and the file has it under a name, `blocks.0.attn.lag_bias`, that
TransformerLens refuses.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from iclens.lab.files import read_arrays_and_metadata
from iclens.transformer import NORM_EPSILON, ROTARY_BASE, Transformer

WEIGHTS, CONFIG = "model.safetensors", "config.json"
NORMS = {"rms": "RMSPre", "layer": "LNPre", "none": None}
"""Its names of norms without parameters."""
ACTIVATIONS = {"relu": "relu", "gelu": "gelu_new"}
LAG_BIAS = "blocks.{}.attn.lag_bias"


def lens_config(model: Transformer) -> dict[str, Any]:
    """The arguments of `TransformerBridgeConfig`."""
    config = model.config
    return {
        "d_model": config.width,
        "d_head": config.head_width,
        "n_heads": config.heads,
        "n_layers": config.layers,
        "n_ctx": model.context,
        "d_vocab": model.embedding.shape[0],
        "d_mlp": config.mlp_width,
        "attn_only": config.attention_only,
        "act_fn": ACTIVATIONS[config.activation],
        "normalization_type": NORMS[config.norm],
        "eps": NORM_EPSILON,
        "positional_embedding_type": "rotary" if config.positions == "rotary" else "standard",
        "rotary_dim": config.head_width,
        "rotary_base": int(ROTARY_BASE),
        "rotary_adjacent_pairs": True,
    }


def lens_arrays(model: Transformer) -> dict[str, np.ndarray]:
    """The parameters by the names that TransformerLens had for them before version 4."""
    config = model.config
    states = model.embedding.shape[0]
    arrays: dict[str, Any] = {"embed.W_E": model.embedding}
    if model.position is not None:
        arrays["pos_embed.W_pos"] = model.position
    elif config.positions != "rotary":
        arrays["pos_embed.W_pos"] = np.zeros((model.context, config.width), np.float32)
    for layer, attention in enumerate(model.attentions):
        at = f"blocks.{layer}.attn"
        projections = {"Q": attention.query, "K": attention.key, "V": attention.value}
        for name, weight in projections.items():
            arrays[f"{at}.W_{name}"] = weight
            arrays[f"{at}.b_{name}"] = np.zeros((config.heads, config.head_width), np.float32)
        arrays[f"{at}.W_O"] = attention.output
        arrays[f"{at}.b_O"] = np.zeros(config.width, np.float32)
        if attention.lag_bias is not None:
            arrays[LAG_BIAS.format(layer)] = attention.lag_bias
    for layer, mlp in enumerate(model.mlps):
        at = f"blocks.{layer}.mlp"
        arrays[f"{at}.W_in"], arrays[f"{at}.b_in"] = mlp.weight_in, mlp.bias_in
        arrays[f"{at}.W_out"], arrays[f"{at}.b_out"] = mlp.weight_out, mlp.bias_out
    arrays["unembed.W_U"] = model.unembedding
    arrays["unembed.b_U"] = np.zeros(states, np.float32)
    return {name: np.asarray(array) for name, array in arrays.items()}


def load_bridge(folder: str | Path) -> Any:
    """A `TransformerBridge` of a model in a folder that `iclens export` wrote.

    Hooks, caches and patches of TransformerLens work on it.  Needs the extra `interop`.

    Raises `ValueError` if a file is damaged, `OSError` if one cannot be opened.
    """
    import torch
    from transformer_lens.config import TransformerBridgeConfig
    from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module
    from transformer_lens.model_bridge.sources.native import NativeModel
    from transformer_lens.utilities.tl_checkpoint_conversion import convert_tl_checkpoint

    arrays, _ = read_arrays_and_metadata(Path(folder) / WEIGHTS)
    config = TransformerBridgeConfig(**read_config(Path(folder) / CONFIG))
    tensors = {name: torch.tensor(array) for name, array in arrays.items()}
    native = NativeModel(config)
    for layer in range(config.n_layers):
        if LAG_BIAS.format(layer) in tensors:
            native.layers[layer].attn.rotary = _lag_bias(tensors.pop(LAG_BIAS.format(layer)))
    bridge = build_bridge_from_module(
        native, architecture="TransformerLensNative", tl_config=config, tokenizer=None
    )
    bridge.load_state_dict(convert_tl_checkpoint(tensors, config))
    return bridge.eval()


def read_config(path: Path) -> dict[str, Any]:
    """The configuration beside the weights.

    Raises `ValueError` if it is no JSON object, `OSError` if it cannot be opened.
    """
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path}: expected an object of keys, got {config!r}")
    return config


def _lag_bias(bias: Any) -> Any:
    """A bias per lag in the place where TransformerLens' attention has its rotary positions.

    That is asked for other queries and keys, of any width: (q, scale B[n]).(k, e_m) / scale is
    q.k / scale + B[n, m], so that the attention itself is TransformerLens' own.
    """
    import torch

    class LagBias(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lag_bias = torch.nn.Parameter(bias)  # (head, lag)

        def apply_rope(self, q: Any, k: Any, *, position_ids: Any = None) -> tuple[Any, Any]:
            """Queries and keys of shape (batch, head, position, head_width), made wider."""
            length, width = q.shape[-2:]
            positions = torch.arange(length, device=q.device)
            at = positions[None] if position_ids is None else position_ids
            lag = (at[:, :, None] - at[:, None, :]).clamp(min=0)
            added = self.lag_bias[:, lag].transpose(0, 1) * width**0.5  # (batch, head, n, m)
            one_hot = torch.eye(length, dtype=k.dtype, device=k.device).expand(*k.shape[:2], -1, -1)
            added = added.expand(*q.shape[:2], -1, -1)
            return torch.cat([q, added], -1), torch.cat([k, one_hot], -1)

    return LagBias()

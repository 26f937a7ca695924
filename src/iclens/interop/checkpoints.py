"""Checkpoints of TransformerLens in: its tensors and its configuration as a `Transformer`.

What differs is folded into the weights where that is exact:

    weights w of a norm                  rows of the matrices that read behind it
    bias b of the norm before an MLP     b_in + b @ W_in
    epsilon e of the norms               all that is written to the residual stream, times
                                         sqrt(1e-6 / e): the norms then cancel the factor
    attention scaled by s                W_Q, times sqrt(head width) / s
    bias of the keys                     left out: it adds the same to the scores of all keys

What `Transformer` cannot express, such as other biases of attention, is refused by its name.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from iclens.interop.files import build_model
from iclens.interop.transformer_lens import CONFIG, LAG_BIAS, WEIGHTS, read_config
from iclens.interop.unsaid import UNSAID, Unsaid
from iclens.lab.files import read_safetensors
from iclens.transformer import NORM_EPSILON, ROTARY_BASE, Transformer, TransformerConfig

Arrays = dict[str, np.ndarray]
BUFFERS = (".mask", ".IGNORE", ".rotary_sin", ".rotary_cos")
"""Endings of the names of tensors that the configuration decides."""
EMBEDDINGS = {"embed": "embed.W_E", "pos_embed": "pos_embed.W_pos"}
NUMBERS = ("attn_scale", "eps")
COUNTS = ("n_ctx", "n_heads", "n_key_value_heads", "rotary_dim")
LARGEST_COUNT = 2**20
"""A context of more could not be attended to anyway."""
NORMS = {"LN": "layer", "LNPRE": "layer", "RMS": "rms", "RMSPRE": "rms"}
NEUTRAL: dict[str, tuple[object, ...]] = {
    "attention_dir": ("causal",),
    "attn_scores_soft_cap": (-1, 0, None),
    "attn_types": (None,),
    "final_rms": (False, None),
    "gated_mlp": (False, None),
    "output_logits_soft_cap": (-1, 0, None),
    "parallel_attn_mlp": (False, None),
    "post_embedding_ln": (False, None),
    "rope_scaling": (None,),
    "rotary_base": (ROTARY_BASE,),
    "scale_attn_by_inverse_layer_idx": (False, None),
    "shortformer_pos": (False, None),
    "use_attn_scale": (True,),
    "use_local_attn": (False, None),
    "use_qk_norm": (False, None),
    "window_size": (None,),
}
"""Keys of its configuration whose other values make another model than ours."""


def read_checkpoint(path: str | Path, unsaid: Unsaid = UNSAID) -> Transformer:
    """Read a checkpoint of TransformerLens, in safetensors, as a model that computes the same.

    Args:
        path: The file, or the folder that has it as `model.safetensors`; a `config.json` beside it
            is read too.  Tensors have the names of TransformerLens before version 4
            (`blocks.0.attn.W_Q`) or since (`blocks.0.attn.q.weight`).
        unsaid: What neither of them says.

    Raises `ValueError`, naming the file and the tensor or key, for what is missing, contradicts
    itself, or cannot be expressed; `OSError` if a file cannot be opened.
    """
    path = checkpoint_file(path)
    arrays, metadata = read_safetensors(path)
    config = read_config(path.with_name(CONFIG)) if path.with_name(CONFIG).exists() else {}
    try:
        return _Checkpoint(arrays, config, metadata.get("positions"), unsaid).model()
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def checkpoint_file(path: str | Path) -> Path:
    """The safetensors file that is meant by it or by its folder."""
    return Path(path) / WEIGHTS if Path(path).is_dir() else Path(path)


class _Checkpoint:
    """Takes tensors by name, each once, and folds what can be folded."""

    def __init__(
        self, arrays: Arrays, config: Mapping[str, Any], positions: str | None, unsaid: Unsaid
    ) -> None:
        self.config, self.unsaid, self.saved_positions = config, unsaid, positions
        for key, allowed in NEUTRAL.items():
            if key in config and config[key] not in allowed:
                raise ValueError(f"{CONFIG}: {key} = {config[key]!r} has no counterpart in iclens")
        for key in NUMBERS:
            number = config.get(key)
            if number is not None and not (
                type(number) in (int, float) and abs(number) <= sys.float_info.max
            ):
                raise ValueError(f"{CONFIG}: {key}: expected a finite number, got {number!r}")
        for key in COUNTS:
            count = config.get(key)
            if count is not None and not (type(count) is int and 1 <= count <= LARGEST_COUNT):
                raise ValueError(
                    f"{CONFIG}: {key}: expected a whole number from 1 to {LARGEST_COUNT}, "
                    f"got {count!r}"
                )
        arrays = {name: a for name, a in arrays.items() if not name.endswith(BUFFERS)}
        if any(name.endswith(".q.weight") for name in arrays):
            arrays = older_names(arrays, self.say("heads", config.get("n_heads")))
        for name, array in arrays.items():
            if array.dtype.kind != "f" or not np.isfinite(array).all():
                raise ValueError(f"{name}: expected finite numbers")
        self.arrays = {name: array.astype(np.float64) for name, array in arrays.items()}

    def model(self) -> Transformer:
        """The model of the tensors."""
        embedding = self.take("embed.W_E", (None, None))
        states, width = embedding.shape
        learned = "pos_embed.W_pos" in self.arrays
        position = self.take("pos_embed.W_pos", (None, width)) if learned else None
        numbers = (re.match(r"blocks\.(\d{1,6})\.", name) for name in self.arrays)
        layers = 1 + max((int(number[1]) for number in numbers if number), default=0)
        query = self.take("blocks.0.attn.W_Q", (None, width, None), keep=True)
        mlp = "blocks.0.mlp.W_in" in self.arrays
        config = TransformerConfig(
            width=width,
            layers=layers,
            heads=len(query),
            hidden=self.take("blocks.0.mlp.W_in", (width, None), keep=True).shape[1]
            if mlp
            else None,
            attention_only=not mlp,
            norm=self.say("norm", self._norm()),
            positions=self._positions(position),
            activation=self.say("activation", self._activation()) if mlp else "relu",
        )
        self._check_heads(config, query.shape[2])
        context = self._context(config, position)
        with np.errstate(all="ignore"):
            fields = self._fields(config, states)
            shrink = self._shrink(config)
            fields["embedding"] = embedding * shrink
            if position is not None and config.positions == "absolute":
                fields["position"] = position[:context] * shrink
            elif position is not None and position.any():
                raise ValueError(f"pos_embed.W_pos is not 0, but positions are {config.positions}")
            found = {name: array.astype(np.float32) for name, array in fields.items()}
        if self.arrays:
            raise ValueError(f"{min(self.arrays)}: such a tensor has no counterpart in iclens")
        if infinite := [name for name, array in found.items() if not np.isfinite(array).all()]:
            raise ValueError(f"{infinite[0]}: the numbers are too large")
        if config.positions == "relative":
            for layer in range(layers):
                name = f"attentions.{layer}.lag_bias"
                found[name] = found[name][:, :context]
        return build_model(config, states, context, found)

    def take(self, name: str, shape: tuple[int | None, ...], keep: bool = False) -> np.ndarray:
        """A tensor, which is then used up."""
        found = self.arrays.get(name) if keep else self.arrays.pop(name, None)
        expected = "(" + ", ".join("any" if side is None else str(side) for side in shape) + ")"
        if found is None:
            raise ValueError(f"{name}: expected a tensor of shape {expected}, got none")
        fits = found.ndim == len(shape) and found.size
        if not fits or any(a not in (None, b) for a, b in zip(shape, found.shape, strict=True)):
            raise ValueError(f"{name}: expected shape {expected}, got {found.shape}")
        return found

    def say(self, name: str, found: Any) -> Any:
        """What is known of a property: by the user, or as found; both must agree."""
        given = getattr(self.unsaid, name)
        if given is None and found is None:
            raise ValueError(f"neither the tensors nor a {CONFIG} say it: expected --{name}")
        if None not in (given, found) and given != found:
            raise ValueError(f"--{name}: the checkpoint says {found!r}, got {given!r}")
        return found if given is None else given

    def _norm(self) -> str | None:
        if "normalization_type" not in self.config:
            return "layer" if "ln_final.b" in self.arrays else None
        kind = self.config["normalization_type"]
        if kind is not None and str(kind).upper() not in NORMS:
            raise ValueError(f"{CONFIG}: normalization_type = {kind!r} has no counterpart")
        return "none" if kind is None else NORMS[str(kind).upper()]

    def _activation(self) -> str | None:
        kind = self.config.get("act_fn")
        if kind not in (None, "relu", "gelu_new"):
            near = ", which uses erf; that with tanh is 'gelu_new'" if kind == "gelu" else ""
            raise ValueError(f"{CONFIG}: act_fn: expected 'relu' or 'gelu_new', got {kind!r}{near}")
        return "gelu" if kind == "gelu_new" else kind

    def _positions(self, position: np.ndarray | None) -> Any:
        kind = self.config.get("positional_embedding_type")
        if kind not in (None, "standard", "rotary"):
            raise ValueError(f"{CONFIG}: positional_embedding_type = {kind!r} has no counterpart")
        adjacent = self.config.get("rotary_adjacent_pairs") is True
        if kind == "rotary" and not adjacent and self.unsaid.positions != "rotary":
            raise ValueError(
                f"{CONFIG}: rotary_adjacent_pairs is not true, and other pairs have no "
                "counterpart. If pairs are adjacent all the same (TransformerLens 4 has no others "
                "in models of its own), give --positions rotary"
            )
        if LAG_BIAS.format(0) in self.arrays:
            return self.say("positions", "relative")
        if position is None or kind == "rotary":
            return self.say("positions", kind if kind == "rotary" else None)
        nothing = not position.any() and "none" in (self.saved_positions, self.unsaid.positions)
        return self.say("positions", "none" if nothing else "absolute")

    def _context(self, config: TransformerConfig, position: np.ndarray | None) -> int:
        learned = position if config.positions == "absolute" else None
        if config.positions == "relative":
            learned = self.take(LAG_BIAS.format(0), (config.heads, None), keep=True).T
        most = self.config.get("n_ctx") if learned is None else len(learned)
        given = self.unsaid.context
        if given is not None and learned is not None and given > len(learned):
            raise ValueError(
                f"--context: expected at most {len(learned)}, as many as there are learned "
                f"positions, got {given}"
            )
        return int(self.say("context", most) if given is None else given)

    def _check_heads(self, config: TransformerConfig, head_width: int) -> None:
        if head_width != config.head_width:
            raise ValueError(
                f"blocks.0.attn.W_Q: expected a head width of {config.head_width}, the width over "
                f"the heads, got {head_width}"
            )
        expected = {
            "n_heads": config.heads,
            "n_key_value_heads": config.heads,
            "rotary_dim": config.head_width,
        }
        for key, number in expected.items():
            if key == "rotary_dim" and config.positions != "rotary":
                continue
            if self.config.get(key) not in (None, number):
                raise ValueError(f"{CONFIG}: {key}: expected {number}, got {self.config[key]!r}")

    def _shrink(self, config: TransformerConfig) -> float:
        """What all that is written to the residual stream is multiplied by."""
        if config.norm == "none":
            return 1.0
        epsilon = float(self.say("eps", self.config.get("eps")))
        if not 0 < epsilon < math.inf:
            raise ValueError(f"eps: expected a positive number, got {epsilon}")
        return math.sqrt(NORM_EPSILON / epsilon)

    def _fields(self, config: TransformerConfig, states: int) -> Arrays:
        """The arrays of our model by name, but for the embeddings."""
        width, heads, head_width = config.width, config.heads, config.head_width
        into, shrink = (heads, width, head_width), self._shrink(config)
        scale = self.config.get("attn_scale") or -1
        sharpen = math.sqrt(head_width) / scale if scale > 0 else 1.0
        fields = {}
        for layer in range(config.layers):
            at, ours = f"blocks.{layer}.attn", f"attentions.{layer}"
            weight, bias = self._norm_parameters(config, f"blocks.{layer}.ln1")
            _refuse(bias, f"blocks.{layer}.ln1.b")
            for name in "QKV":
                biases = self._optional(f"{at}.b_{name}", (heads, head_width))
                if name != "K" or config.positions == "rotary":
                    _refuse(biases, f"{at}.b_{name}")
            _refuse(self._optional(f"{at}.b_O", (width,)), f"{at}.b_O")
            fields[f"{ours}.query"] = weight * self.take(f"{at}.W_Q", into) * sharpen
            fields[f"{ours}.key"] = weight * self.take(f"{at}.W_K", into)
            fields[f"{ours}.value"] = weight * self.take(f"{at}.W_V", into)
            fields[f"{ours}.output"] = self.take(f"{at}.W_O", (heads, head_width, width)) * shrink
            if config.positions == "relative":
                fields[f"{ours}.lag_bias"] = self.take(LAG_BIAS.format(layer), (heads, None))
            if config.attention_only:
                continue
            at, ours, hidden = f"blocks.{layer}.mlp", f"mlps.{layer}", config.mlp_width
            weight, bias = self._norm_parameters(config, f"blocks.{layer}.ln2")
            inward = self.take(f"{at}.W_in", (width, hidden))
            fields[f"{ours}.weight_in"] = weight * inward
            fields[f"{ours}.bias_in"] = self.take(f"{at}.b_in", (hidden,)) + bias @ inward
            fields[f"{ours}.weight_out"] = self.take(f"{at}.W_out", (hidden, width)) * shrink
            fields[f"{ours}.bias_out"] = self.take(f"{at}.b_out", (width,)) * shrink
        weight, bias = self._norm_parameters(config, "ln_final")
        _refuse(bias, "ln_final.b")
        _refuse(self._optional("unembed.b_U", (states,)), "unembed.b_U")
        fields["unembedding"] = weight * self.take("unembed.W_U", (width, states))
        return fields

    def _optional(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """A tensor, or zeros where there is none."""
        return self.take(name, shape) if name in self.arrays else np.zeros(shape)

    def _norm_parameters(
        self, config: TransformerConfig, name: str
    ) -> tuple[np.ndarray, np.ndarray]:
        """Weights, as a column, and biases of a norm; those that our kind lacks stay unused."""
        known = config.norm != "none" and f"{name}.w" in self.arrays
        weight = self.take(f"{name}.w", (config.width,)) if known else np.ones(config.width)
        layer = config.norm == "layer"
        bias = self._optional(f"{name}.b", (config.width,)) if layer else np.zeros(config.width)
        return weight[:, None], bias


def _refuse(bias: np.ndarray, name: str) -> None:
    if bias.any():
        raise ValueError(f"{name} is not 0: iclens has no such bias")


def older_names(arrays: Mapping[str, np.ndarray], heads: int) -> Arrays:
    """Tensors of a TransformerLens 4 bridge by the names and in the shapes of before.

    Raises `ValueError` if a projection cannot be split into so many heads.
    """
    found = {}
    for name, array in arrays.items():
        module, _, kind = name.rpartition(".")
        parent, _, part = module.rpartition(".")
        symbol = {"weight": "W", "bias": "b"}.get(kind, kind)
        if part in ("q", "k", "v"):
            array, name = _split(name, array, heads), f"{parent}.{symbol}_{part.upper()}"
            array = array.mT if kind == "weight" else array
        elif part == "o":
            array = _split(name, array.T, heads) if kind == "weight" else array
            name = f"{parent}.{symbol}_O"
        elif part in ("in", "out"):
            array, name = array.T, f"{parent}.{symbol}_{part}"
        elif part in ("ln1", "ln2", "ln_final"):
            name = f"{module}.{symbol.lower()}"
        elif module == "unembed":
            array, name = array.T, f"{module}.{symbol}_U"
        elif module in EMBEDDINGS:
            name = EMBEDDINGS[module]
        found[name] = array
    return found


def _split(name: str, array: np.ndarray, heads: int) -> np.ndarray:
    """Rows by head: (head, row of the head, ...)."""
    if heads < 1 or not array.ndim or not array.size or len(array) % heads:
        raise ValueError(f"{name}: shape {array.shape} cannot be split into {heads} heads")
    return array.reshape(heads, -1, *array.shape[1:])

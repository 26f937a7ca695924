"""A transformer of iclens in PyTorch: this file and a safetensors file are all that it takes.

    model = load("model.safetensors")
    logits = model(states)                  # (batch, position, state), of integers in [0, C)

All that is computed is the output of a named module, so that hooks and tools such as nnsight can
read and change it.  Every layer `blocks[i]` has

    attention.read_query, read_key, read_value   (batch, head, position, width): the residual stream
                                                 as each head reads it, before normalisation
    attention.pattern                            (batch, head, position, key)
    attention.written                            (batch, head, position, width)
    mlp.read, mlp.written                        (batch, position, width)

and the model has `embed`, `position` with absolute positions, and `read_out`.  These are copies: a
change of one changes nothing else, which is how single edges of the model are cut.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn import functional

ROTARY_BASE = 10_000.0
NORM_EPSILON = 1e-6


def load(path: str | Path) -> Transformer:
    """The model in a safetensors file that iclens wrote, on the CPU."""
    with safe_open(str(path), framework="pt") as file:
        about = json.loads(file.metadata()["iclens"])
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    model = Transformer(about["model"], about["states"], about["context"])
    model.load_state_dict({_place(name): array for name, array in arrays.items()})
    return model.eval()


def _place(name: str) -> str:
    """Where an array of the file goes, such as `blocks.0.attention.query`."""
    kind, _, rest = name.partition(".")
    if not rest:
        return {"embedding": "embed.weight", "position": "position.weight"}.get(name, name)
    layer, _, field = rest.partition(".")
    return f"blocks.{layer}.{'attention' if kind == 'attentions' else 'mlp'}.{field}"


class Copy(nn.Module):
    """Hands on a copy of its input: a place to look at and to intervene."""

    def forward(self, values: Tensor) -> Tensor:
        return values.clone()


class Normalise(nn.Module):
    """Normalisation over the width without parameters: "rms", "layer" or "none"."""

    def __init__(self, norm: str) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, stream: Tensor) -> Tensor:
        if self.norm == "none":
            return stream
        if self.norm == "layer":
            stream = stream - stream.mean(-1, keepdim=True)
        return stream * torch.rsqrt(stream.square().mean(-1, keepdim=True) + NORM_EPSILON)


class Attention(nn.Module):
    """Causal attention without biases in its projections."""

    def __init__(self, config: dict[str, Any], context: int) -> None:
        super().__init__()
        width, heads = config["width"], config["heads"]
        into = (heads, width, width // heads)
        self.query = nn.Parameter(torch.zeros(into))
        self.key = nn.Parameter(torch.zeros(into))
        self.value = nn.Parameter(torch.zeros(into))
        self.output = nn.Parameter(torch.zeros(heads, width // heads, width))
        relative = config["positions"] == "relative"
        self.lag_bias = nn.Parameter(torch.zeros(heads, context)) if relative else None
        self.rotary = config["positions"] == "rotary"
        self.norm = Normalise(config["norm"])
        self.read_query, self.read_key, self.read_value = Copy(), Copy(), Copy()
        self.pattern = nn.Softmax(dim=-1)
        self.written = Copy()

    def forward(self, stream: Tensor) -> Tensor:
        length = stream.shape[1]
        each = stream[:, None].expand(-1, len(self.query), -1, -1)
        queries = self.norm(self.read_query(each)) @ self.query
        keys = self.norm(self.read_key(each)) @ self.key
        values = self.norm(self.read_value(each)) @ self.value
        if self.rotary:
            queries, keys = rotate(queries), rotate(keys)
        scores = queries @ keys.mT * self.query.shape[-1] ** -0.5
        positions = torch.arange(length, device=stream.device)
        lag = positions[:, None] - positions
        if self.lag_bias is not None:
            scores = scores + self.lag_bias[:, lag.clamp(min=0)]
        pattern = self.pattern(scores.masked_fill(lag < 0, float("-inf")))
        return self.written(pattern @ values @ self.output).sum(1)


class MLP(nn.Module):
    """One hidden layer, of rectified linear units or GELU in its form with tanh."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width = config["width"]
        hidden = config["hidden"] or 4 * width
        self.weight_in = nn.Parameter(torch.zeros(width, hidden))
        self.bias_in = nn.Parameter(torch.zeros(hidden))
        self.weight_out = nn.Parameter(torch.zeros(hidden, width))
        self.bias_out = nn.Parameter(torch.zeros(width))
        self.activation = config["activation"]
        self.norm = Normalise(config["norm"])
        self.read, self.written = Copy(), Copy()

    def forward(self, stream: Tensor) -> Tensor:
        hidden = self.norm(self.read(stream)) @ self.weight_in + self.bias_in
        if self.activation == "relu":
            hidden = functional.relu(hidden)
        else:
            hidden = functional.gelu(hidden, approximate="tanh")
        return self.written(hidden @ self.weight_out + self.bias_out)


class Block(nn.Module):
    """A layer: attention, then an MLP unless there is none; each adds to the residual stream."""

    def __init__(self, config: dict[str, Any], context: int) -> None:
        super().__init__()
        self.attention = Attention(config, context)
        self.mlp = None if config["attention_only"] else MLP(config)

    def forward(self, stream: Tensor) -> Tensor:
        stream = stream + self.attention(stream)
        return stream if self.mlp is None else stream + self.mlp(stream)


class Transformer(nn.Module):
    """A pre-norm transformer over C states and contexts of up to N states.

    `config` has the keys `width`, `layers`, `heads`, `hidden`, `attention_only`, `norm`,
    `positions` and `activation`, as the metadata of the weights has them.
    """

    def __init__(self, config: dict[str, Any], states: int, context: int) -> None:
        super().__init__()
        if config["circuit"]:
            raise ValueError("a sub-circuit has no residual stream that all layers share")
        width = config["width"]
        self.context = context
        self.embed = nn.Embedding(states, width)
        self.position = nn.Embedding(context, width) if config["positions"] == "absolute" else None
        self.blocks = nn.ModuleList(Block(config, context) for _ in range(config["layers"]))
        self.read_out = Copy()
        self.norm = Normalise(config["norm"])
        self.unembedding = nn.Parameter(torch.zeros(width, states))

    def forward(self, states: Tensor) -> Tensor:
        """Logits of the next state at every position."""
        if states.shape[1] > self.context:
            raise ValueError(f"expected at most {self.context} states, got {states.shape[1]}")
        stream = self.embed(states)
        if self.position is not None:
            stream = stream + self.position(torch.arange(states.shape[1], device=states.device))
        for block in self.blocks:
            stream = block(stream)
        return self.norm(self.read_out(stream)) @ self.unembedding


def rotate(vectors: Tensor) -> Tensor:
    """Rotary positions: pair (2i, 2i + 1) at position n turns by n / 10000^(2i / d) radians."""
    length, width = vectors.shape[-2:]
    rates = ROTARY_BASE ** (-torch.arange(0, width, 2, device=vectors.device) / width)
    angles = torch.arange(length, device=vectors.device)[:, None] * rates
    cosine, sine = angles.cos(), angles.sin()
    even, odd = vectors[..., 0::2], vectors[..., 1::2]
    turned = torch.stack([even * cosine - odd * sine, even * sine + odd * cosine], dim=-1)
    return turned.flatten(-2)

"""The same transformer and train step in eager PyTorch, as a careful user would write it."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    """Pre-norm attention with one head and a bias per lag, then a pre-norm MLP."""

    def __init__(self, width: int, context: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.output = nn.Linear(width, width, bias=False)
        self.lag_bias = nn.Parameter(torch.zeros(context))
        self.into = nn.Linear(width, 4 * width)
        self.out = nn.Linear(4 * width, width)
        lag = torch.arange(context)[:, None] - torch.arange(context)
        self.register_buffer("lag", lag.clamp(min=0))
        self.register_buffer("future", lag < 0)

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        read = normalise(stream)
        bias = self.lag_bias[self.lag].masked_fill(self.future, -torch.inf)
        bias = bias.expand(len(stream), -1, -1)
        scale = stream.shape[-1] ** -0.5
        logits = torch.baddbmm(bias, self.query(read), self.key(read).mT, alpha=scale)
        stream = stream + self.output(logits.softmax(-1) @ self.value(read))
        return stream + self.out(F.relu(self.into(normalise(stream))))


class Reference(nn.Module):
    """Two blocks between an embedding and an untied read-out."""

    def __init__(self, states: int, width: int, context: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(states, width)
        self.blocks = nn.ModuleList(Block(width, context) for _ in range(2))
        self.unembedding = nn.Linear(width, states, bias=False)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        stream = self.embedding(states)
        for block in self.blocks:
            stream = block(stream)
        return self.unembedding(normalise(stream))


def normalise(stream: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(stream, stream.shape[-1:], eps=1e-6)


def loss(model: Reference, states: torch.Tensor) -> torch.Tensor:
    """Mean next-state cross-entropy of a batch of shape (batch, context + 1)."""
    return F.cross_entropy(model(states[:, :-1]).flatten(0, 1), states[:, 1:].flatten())


def load(model: Reference, ours) -> None:
    """Copy the weights of an `iclens.Transformer`."""
    with torch.no_grad():

        def copy(parameter: torch.Tensor, array) -> None:
            parameter.copy_(torch.tensor(array.tolist()))

        copy(model.embedding.weight, ours.embedding)
        copy(model.unembedding.weight, ours.unembedding.T)
        for block, attention, mlp in zip(model.blocks, ours.attentions, ours.mlps, strict=True):
            for name in ("query", "key", "value", "output"):
                copy(getattr(block, name).weight, getattr(attention, name)[0].T)
            copy(block.lag_bias, attention.lag_bias[0])
            copy(block.into.weight, mlp.weight_in.T)
            copy(block.into.bias, mlp.bias_in)
            copy(block.out.weight, mlp.weight_out.T)
            copy(block.out.bias, mlp.bias_out)

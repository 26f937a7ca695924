"""The transformer, whole, from states to next-state logits, with every edge open to intervention.

Axes, in this order wherever they occur:

    batch      sequences
    head       attention heads
    position   index n in the context; the output at n predicts state n + 1 (the query axis)
    key        position that is attended to
    state      the C symbols
    width      the residual stream, D
    lag        position - key, from 0 to N - 1

A transformer is read as a graph.  *Senders* write to the residual stream, *receivers* read from it,
and an *edge* is a pair of them in causal order.  A receiver r reads

    sum over senders s before r of  mask[s->r] * value[s] + (1 - mask[s->r]) * baseline[s]

and everything downstream is recomputed exactly.  Without edges the sum is the residual stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from iclens.names import nearest
from iclens.predictors import States, check_states

EMBEDDING_SCALE = 0.5
ROTARY_BASE = 10_000.0
NORM_EPSILON = 1e-6
QUERY_BLOCK = 64
"""Queries that are attended from together."""
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "relu": jax.nn.relu,
    "gelu": partial(jax.nn.gelu, approximate=True),
}
"""GELU is x Phi(x) with Phi(x) near (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2 (Hendrycks and
Gimpel, 2016)."""


@dataclass(frozen=True)
class TransformerConfig:
    """Shape of a transformer.  Raises `ValueError` where the shape is impossible."""

    width: int = 32
    """Width D of the residual stream."""
    layers: int = 2
    """Layers, each one attention block and one MLP block."""
    heads: int = 1
    """Attention heads H in each layer; D must be a multiple of H."""
    hidden: int | None = None
    """Hidden width F of the MLPs; 4 D where it is not given."""
    activation: Literal["relu", "gelu"] = "relu"
    """What the hidden units of the MLPs do; GELU in its form with tanh."""
    attention_only: bool = False
    """Drop the MLPs."""
    norm: Literal["rms", "layer", "none"] = "rms"
    """Normalisation, without parameters, before each block and before the read-out."""
    positions: Literal["relative", "absolute", "rotary", "none"] = "relative"
    """Positions: a learned bias per lag and head, a learned vector per position, rotary, none."""
    circuit: tuple[str, ...] = ()
    """The edges that there are, where not all of them are: a sub-circuit, to train by itself."""

    def __post_init__(self) -> None:
        for name in ("width", "layers", "heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.{name}: expected at least 1, got {getattr(self, name)}")
        if self.hidden is not None and self.hidden < 1:
            raise ValueError(f"model.hidden: expected at least 1, got {self.hidden}")
        if self.width % self.heads:
            raise ValueError(
                f"model.heads: expected a divisor of model.width = {self.width}, got {self.heads}"
            )
        if self.positions == "rotary" and self.head_width % 2:
            raise ValueError(
                "model.positions: rotary needs an even head width, got "
                f"model.width / model.heads = {self.head_width}"
            )
        every = _every_edge(self) if self.circuit else ()
        for edge in self.circuit:
            if edge not in every:
                raise ValueError(f"model.circuit: unknown edge {edge!r}{nearest(edge, every)}")

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def mlp_width(self) -> int:
        return 4 * self.width if self.hidden is None else self.hidden

    @cached_property
    def senders(self) -> tuple[str, ...]:
        """Names of the senders in causal order: `embed`, `pos`, `att1.0`, `mlp1`, `att2.0`, ..."""
        names = ["embed"] + ["pos"] * (self.positions == "absolute")
        for layer in range(1, self.layers + 1):
            names += [f"att{layer}.{head}" for head in range(self.heads)]
            names += [f"mlp{layer}"] * (not self.attention_only)
        return tuple(names)

    @cached_property
    def block_ends(self) -> tuple[int, ...]:
        """Numbers of senders that nothing, the embeddings, and all up to each block make."""
        ends = [0, self.senders.index("att1.0")]
        for _ in range(self.layers):
            ends.append(ends[-1] + self.heads)
            ends += [ends[-1] + 1] * (not self.attention_only)
        return tuple(ends)

    @cached_property
    def edges(self) -> tuple[str, ...]:
        """Names of the edges, `sender->receiver`, in the order of `Edges.mask`.

        Receivers are `att1.0.q`, `att1.0.k`, `att1.0.v`, `mlp1`, ..., `out`.  With relative
        positions each head also has an edge from its lag bias, `lag->att1.0`.
        """
        every = _every_edge(self)
        return tuple(edge for edge in every if edge in self.circuit) if self.circuit else every


def _every_edge(config: TransformerConfig) -> tuple[str, ...]:
    names: list[str] = []
    before = list(config.senders[: config.senders.index("att1.0")])
    for layer in range(1, config.layers + 1):
        heads = [f"att{layer}.{head}" for head in range(config.heads)]
        for head in heads:
            names += [f"{sender}->{head}.{port}" for port in "qkv" for sender in before]
            names += [f"lag->{head}"] * (config.positions == "relative")
        before += heads
        if not config.attention_only:
            names += [f"{sender}->mlp{layer}" for sender in before]
            before.append(f"mlp{layer}")
    return tuple(names + [f"{sender}->out" for sender in before])


class Attention(eqx.Module):
    """Causal attention without biases in its projections."""

    query: Float[Array, "head width head_width"]
    key: Float[Array, "head width head_width"]
    value: Float[Array, "head width head_width"]
    output: Float[Array, "head head_width width"]
    lag_bias: Float[Array, "head lag"] | None


class MLP(eqx.Module):
    """One hidden layer."""

    weight_in: Float[Array, "width hidden"]
    bias_in: Float[Array, " hidden"]
    weight_out: Float[Array, "hidden width"]
    bias_out: Float[Array, " width"]


class Senders(eqx.Module):
    """What every sender writes, in the order of `TransformerConfig.senders`, and the lag biases.

    Values have shape (batch, position, width), or any shape that broadcasts to it.  `lag` has
    shape (layer, head, lag) with relative positions and is empty otherwise.
    """

    values: tuple[Float[Array, ...], ...]
    lag: Float[Array, ...]


class Edges(eqx.Module):
    """An intervention: the share of each edge's own value, and what the rest carries instead.

    `mask` is in the order of `TransformerConfig.edges`, usually in [0, 1].  `baseline` must be
    finite: 0 * inf is not 0.
    """

    mask: Float[Array, " edge"]
    baseline: Senders


class Activations(eqx.Module):
    """All that a forward pass computes."""

    logits: Float[Array, "batch position state"]
    senders: Senders
    attention: tuple[Float[Array, "batch head _ key"], ...]


class Transformer(eqx.Module):
    """A pre-norm transformer over C states and contexts of up to N states.

    Weights are drawn from a normal law with standard deviation 1 / sqrt(fan-in), embeddings with
    standard deviation 0.5; biases and lag biases start at 0.
    """

    embedding: Float[Array, "state width"]
    position: Float[Array, "position width"] | None
    attentions: tuple[Attention, ...]
    mlps: tuple[MLP, ...]
    unembedding: Float[Array, "width state"]
    config: TransformerConfig = eqx.field(static=True)
    context: int = eqx.field(static=True)

    def __init__(
        self, config: TransformerConfig, states: int, context: int, *, key: PRNGKeyArray
    ) -> None:
        if states < 2 or context < 1:
            raise ValueError(
                "a transformer needs at least 2 states and a context of at least 1, "
                f"got {states} states and a context of {context}"
            )
        self.config, self.context = config, context
        width, heads, head_width = config.width, config.heads, config.head_width
        keys = iter(jax.random.split(key, 3 + 6 * config.layers))

        def normal(*shape: int, scale: float) -> Array:
            return scale * jax.random.normal(next(keys), shape)

        def attention() -> Attention:
            into = (heads, width, head_width)
            return Attention(
                query=normal(*into, scale=width**-0.5),
                key=normal(*into, scale=width**-0.5),
                value=normal(*into, scale=width**-0.5),
                output=normal(heads, head_width, width, scale=width**-0.5),
                lag_bias=jnp.zeros((heads, context)) if config.positions == "relative" else None,
            )

        def mlp() -> MLP:
            hidden = config.mlp_width
            return MLP(
                weight_in=normal(width, hidden, scale=width**-0.5),
                bias_in=jnp.zeros(hidden),
                weight_out=normal(hidden, width, scale=hidden**-0.5),
                bias_out=jnp.zeros(width),
            )

        self.embedding = normal(states, width, scale=EMBEDDING_SCALE)
        self.position = (
            normal(context, width, scale=EMBEDDING_SCALE)
            if config.positions == "absolute"
            else None
        )
        self.attentions = tuple(attention() for _ in range(config.layers))
        self.mlps = () if config.attention_only else tuple(mlp() for _ in range(config.layers))
        self.unembedding = normal(width, states, scale=width**-0.5)

    def __call__(
        self, states: States, edges: Edges | None = None
    ) -> Float[Array, "batch position state"]:
        """Logits of the next state at every position; see `forward`."""
        return forward(self, states, edges).logits


def forward(
    model: Transformer,
    states: States,
    edges: Edges | None = None,
    known: Sequence[Float[Array, ...]] = (),
    since: int = 0,
) -> Activations:
    """Run the model, every receiver reading what its edges carry.

    `known` gives the values of the first senders, in order (whole layers of heads at a time):
    those are taken as they are and not computed, so that an intervention on a late receiver pays
    for what comes after it only.  Attention patterns are returned for computed layers.

    `since` is the first position whose logits are wanted: the logits, the attention pattern and
    the senders of the last layer then begin there, and what only earlier positions need is not
    computed.

    Gradients are for reverse mode; forward mode is not defined (see `_product`).

    Raises `ValueError` if the states are more than the context or outside [0, C), or if an
    intervention does not fit the graph.
    """
    config = model.config
    states = check_states(states, model.embedding.shape[0])
    length = states.shape[1]
    if length > model.context:
        raise ValueError(f"expected at most {model.context} states in the context, got {length}")
    if not 0 <= since < length:
        raise ValueError(f"since: expected a position from 0 to {length - 1}, got {since}")
    lag_bias = (
        jnp.stack([a.lag_bias for a in model.attentions if a.lag_bias is not None])
        if config.positions == "relative"
        else jnp.zeros((config.layers, config.heads, 0))
    )
    if len(known) not in config.block_ends:
        raise ValueError(
            "known: expected the values of whole blocks, the first "
            f"{' or '.join(map(str, config.block_ends))} senders of {', '.join(config.senders)}; "
            f"got {len(known)}"
        )
    if edges is not None:
        _check_edges(config, edges, (len(states), length, config.width), lag_bias.shape, since)

    index = {name: i for i, name in enumerate(config.edges)}
    values: list[Float[Array, ...]] = list(known)
    patterns: list[Float[Array, "batch head position key"]] = []

    def read(receiver: str, senders: int, start: int = 0) -> Float[Array, "batch position width"]:
        """Normalised input of a receiver that comes after the first `senders` senders."""

        def late(value: Float[Array, ...]) -> Float[Array, ...]:
            return value[..., start:, :] if value.shape[-2] == length else value

        total = jnp.zeros(config.width) if config.circuit else None
        for name, value, instead in zip(
            config.senders[:senders],
            values,
            values if edges is None else edges.baseline.values,
            strict=False,
        ):
            if config.circuit and f"{name}->{receiver}" not in index:
                continue
            value = late(value)
            if edges is not None:
                share = edges.mask[index[f"{name}->{receiver}"]]
                value = share * value + (1 - share) * late(instead)
            total = value if total is None else total + value
        assert total is not None
        shape = (states.shape[0], length - start, config.width)
        return normalise(jnp.broadcast_to(total, shape), config.norm)

    if not values:
        values.append(model.embedding[states])
    if model.position is not None and len(values) < 2:
        values.append(model.position[:length])

    for layer, attention in enumerate(model.attentions, start=1):
        before = config.senders.index(f"att{layer}.0")
        start = since if layer == config.layers else 0
        if len(values) == before:
            outputs, pattern = [], []
            for head in range(config.heads):
                name = f"att{layer}.{head}"
                bias = lag_bias[layer - 1, head]
                if config.circuit and f"lag->{name}" not in index:
                    bias = jnp.zeros_like(bias)
                elif edges is not None and config.positions == "relative":
                    share = edges.mask[index[f"lag->{name}"]]
                    bias = share * bias + (1 - share) * edges.baseline.lag[layer - 1, head]
                # The scale of the logits goes into the weights, which are smaller than the queries.
                query = attention.query[head] * config.head_width**-0.5
                queries = dense(read(f"{name}.q", before, start), query)
                keys = dense(read(f"{name}.k", before), attention.key[head])
                if config.positions == "rotary":
                    queries, keys = rotate(queries, start), rotate(keys, 0)
                given = dense(read(f"{name}.v", before), attention.value[head])
                mixed, weights = attend(queries, keys, given, bias)
                outputs.append(dense(mixed, attention.output[head]))
                pattern.append(weights)
            values += outputs
            patterns.append(jnp.stack(pattern, axis=1))
        if model.mlps and len(values) == before + config.heads:
            mlp = model.mlps[layer - 1]
            hidden = dense(read(f"mlp{layer}", before + config.heads, start), mlp.weight_in)
            hidden = ACTIVATIONS[config.activation](hidden + mlp.bias_in)
            values.append(dense(hidden, mlp.weight_out) + mlp.bias_out)

    logits = dense(read("out", len(config.senders), since), model.unembedding)
    return Activations(logits, Senders(tuple(values), lag_bias), tuple(patterns))


def dense(
    inputs: Float[Array, "batch position into"], weight: Float[Array, "into out"]
) -> Float[Array, "batch position out"]:
    """inputs @ weight."""
    rows = _product(inputs.reshape(-1, inputs.shape[-1]), weight)
    return rows.reshape(*inputs.shape[:-1], weight.shape[-1])


@jax.custom_vjp
def _product(rows: Float[Array, "row into"], weight: Float[Array, "into out"]) -> Array:
    """rows @ weight, with a gradient of the weight that a CPU computes twice as fast.

    It is rows.T @ cotangent, a product over the long axis: on a CPU the narrower of the two is
    transposed in memory first.  Without barriers the compiler folds the transposes back into the
    product.
    """
    return rows @ weight


def _product_gradient(saved: tuple[Array, Array], cotangent: Array) -> tuple[Array, Array]:
    rows, weight = saved
    fixed: Any = jax.lax.optimization_barrier
    if jax.default_backend() != "cpu":
        gradient = rows.T @ cotangent
    elif weight.shape[0] <= weight.shape[1]:
        gradient = fixed(fixed(rows).T) @ cotangent
    else:
        gradient = fixed(fixed(fixed(cotangent).T) @ rows).T
    return cotangent @ weight.T, gradient


_product.defvjp(lambda rows, weight: (rows @ weight, (rows, weight)), _product_gradient)


def normalise(
    stream: Float[Array, "batch position width"], norm: str
) -> Float[Array, "batch position width"]:
    """Root-mean-square or layer normalisation over the width, without parameters."""
    if norm == "none":
        return stream
    # Means as matrix products: a sum is rounded differently depending on what the compiler fuses it
    # with, and an intervention that changes nothing must change no bit.
    width = stream.shape[-1]
    average = jnp.full((width, 1), 1 / width, stream.dtype)
    if norm == "layer":
        stream = stream - dense(stream, average)
    return stream * jax.lax.rsqrt(dense(stream**2, average) + NORM_EPSILON)


def attend(
    queries: Float[Array, "batch position head_width"],
    keys: Float[Array, "batch key head_width"],
    values: Float[Array, "batch key head_width"],
    lag_bias: Float[Array, " lag"],
) -> tuple[Float[Array, "batch position head_width"], Float[Array, "batch position key"]]:
    """Causal attention of one head: weights @ values, and the weights.

    They are a softmax over key <= position of q.k + bias, the queries being scaled already; the
    last query is at the last key.  `lag_bias` has an entry per lag, or none at all where positions
    are not relative.
    """
    length, first = keys.shape[1], keys.shape[1] - queries.shape[1]
    lag = jnp.arange(first, length)[:, None] - jnp.arange(length)
    bias = lag_bias[jnp.maximum(lag, 0)] if lag_bias.size else jnp.zeros_like(lag, queries.dtype)
    bias = jnp.where(lag >= 0, bias, -jnp.inf)
    mixed, weights = [], []
    for start in range(0, len(lag), QUERY_BLOCK):  # no block computes the keys after its last query
        queried = slice(start, min(start + QUERY_BLOCK, len(lag)))
        stop = first + queried.stop
        logits = queries[:, queried] @ keys[:, :stop].mT + bias[queried, :stop]
        block = jax.nn.softmax(logits, axis=-1)
        mixed.append(block @ values[:, :stop])
        weights.append(jnp.pad(block, ((0, 0), (0, 0), (0, length - stop))))
    return jnp.concatenate(mixed, axis=1), jnp.concatenate(weights, axis=1)


def rotate(
    vectors: Float[Array, "batch position head_width"], first: int
) -> Float[Array, "batch position head_width"]:
    """Rotary positions: pair (2i, 2i + 1) at position n turns by n / 10000^(2i / d) radians.

    The vectors are those of the positions from `first` on.
    """
    length, head_width = vectors.shape[1:]
    rates = ROTARY_BASE ** (-jnp.arange(0, head_width, 2, dtype=vectors.dtype) / head_width)
    angles = jnp.arange(first, first + length)[:, None] * rates
    cosine, sine = jnp.cos(angles), jnp.sin(angles)
    even, odd = vectors[..., 0::2], vectors[..., 1::2]
    turned = jnp.stack([even * cosine - odd * sine, even * sine + odd * cosine], axis=-1)
    return turned.reshape(vectors.shape)


def _check_edges(
    config: TransformerConfig,
    edges: Edges,
    full: tuple[int, int, int],
    lag: tuple[int, ...],
    since: int,
) -> None:
    if edges.mask.shape != (len(config.edges),):
        raise ValueError(
            f"mask: expected one entry for each of {len(config.edges)} edges, "
            f"got shape {edges.mask.shape}"
        )
    if len(edges.baseline.values) != len(config.senders):
        raise ValueError(
            f"baseline: expected a value for each of {len(config.senders)} senders "
            f"({', '.join(config.senders)}), got {len(edges.baseline.values)}"
        )
    last = config.senders.index(f"att{config.layers}.0")
    for place, (name, value) in enumerate(zip(config.senders, edges.baseline.values, strict=True)):
        lengths = (full[1], full[1] - since) if place >= last else (full[1],)
        sizes = zip(value.shape[::-1], ((full[2],), lengths, (full[0],)), strict=False)
        if value.ndim > len(full) or any(size not in (1, *whole) for size, whole in sizes):
            raise ValueError(
                f"baseline of {name}: expected a shape that broadcasts to {full}, got {value.shape}"
            )
    if edges.baseline.lag.shape != lag:
        raise ValueError(
            f"baseline.lag: expected shape (layer, head, lag) = {lag}, "
            f"got {edges.baseline.lag.shape}"
        )

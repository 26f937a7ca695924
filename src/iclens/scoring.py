"""Any model against the references: one that iclens trained, or one of any framework.

A model is a function from states, a numpy array of int64 (batch, position), to log-probabilities of
the next state at every position, in nats, (batch, position, state).  It may return arrays of numpy,
JAX or PyTorch, on any device and of any precision.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jaxtyping import Array, Float, Int, PRNGKeyArray

from iclens.chains import ChainSet, Prior
from iclens.phases import (
    EvaluationSet,
    Measurement,
    compose,
    evaluation_set,
    is_clear,
    kl_divergence,
    measure,
    measure_divergence,
    phase_name,
    position_bins,
)
from iclens.predictors import PREDICTORS, States, check_states, reference_predictors

Model = Callable[[Any], Any]
"""States (batch, position) -> log-probabilities (batch, position, state)."""

SETS = ("id", "ood")
PURPOSES = (*SETS, "shuffles")
"""What `score_contexts` needs randomness for; each has a stream of its own."""
SUM_TOLERANCE = 1e-4
"""By how much probabilities may miss a sum of 1, beside what the precision of their type allows."""


@dataclass(frozen=True)
class Score:
    """Any model against the four references (see `score`)."""

    measurement: Measurement
    composition: dict[str, float]
    residual: float

    @property
    def phase(self) -> str:
        """The phase, `none` where the model is no nearer to any reference than uniform is."""
        return phase_name(int(self.measurement.nearest))

    @property
    def clear(self) -> bool:
        """Whether the phase can be relied on (see `is_clear`)."""
        return bool(is_clear(self.measurement, jnp.array(list(self.composition.values()))))

    @cached_property
    def distance(self) -> dict[str, float]:
        """KL(reference || model) in nats, by reference."""
        return dict(zip(self.composition, self.measurement.distance.tolist(), strict=True))


def score(
    model: Model | Float[Array, "batch position state"] | np.ndarray,
    states: States,
    chains: ChainSet | None,
    prior: Prior,
) -> Score:
    """Score any model on contexts drawn from `chains` against the four references.

    `model` is an array of log-probabilities of the next state at every position, or a function
    from `states` to one, of numpy, JAX or PyTorch.  `chains` may be None for a model trained on
    fresh chains; the memorising references then do not exist.

    Raises `ValueError`, naming the place, if a state is outside [0, C), if the log-probabilities
    have a wrong shape, contain NaN or do not sum to 1 (within 1e-4, or what half precision allows:
    they are then divided by their sum), if the function fails, or if no chain of the set or of
    the prior can produce a context.
    """
    checked = check_states(states, prior.states)
    array = np.asarray(checked)
    output = _call(model, array) if callable(model) else model
    log_probs = _log_probs(output, (*array.shape, prior.states))
    predictors = reference_predictors(chains, prior)
    references = jnp.stack([predictor(checked) for predictor in predictors.values()])
    undefined = np.isnan(np.asarray(references)).any(axis=3)
    if undefined.any():
        sequence, position = np.argwhere(undefined.any(axis=0))[0].tolist()
        first = list(predictors)[int(undefined[:, sequence, position].argmax())]
        whose = "of the set" if first.endswith("Mem") else "of the prior"
        raise ValueError(
            f"sequence {sequence}: no chain {whose} can produce its first {position + 1} states"
        )
    on = EvaluationSet(checked, None, references)
    weights, residual = compose(log_probs, on)
    return Score(
        measurement=measure(log_probs, on),
        composition=dict(zip(predictors, weights.tolist(), strict=True)),
        residual=float(residual),
    )


def score_contexts(
    model: Model,
    chains: ChainSet | None,
    prior: Prior,
    contexts: Sequence[int] = (16, 32, 64),
    *,
    sequences: int = 512,
    shuffles: int = 1,
    key: PRNGKeyArray,
    on_context: Callable[[int], None] = lambda context: None,
) -> xr.Dataset:
    """Score a model on sequences drawn at several context lengths N.

    At each N, `sequences` sequences of N states are drawn from `chains` (ID; from the prior where
    they are None, and the memorising references do not exist) and from fresh chains (OOD).

    With `shuffles` above 1 the model is asked under so many ways to number the states: as it is,
    and in other random orders.  Whoever gives states a meaning that the model may know (the tokens
    of a language model) sees by that how far the choice decides.  Distances, composition and loss
    are then means over the orders, of the same sequences each time, and errors hold both the spread
    over sequences and that over orders.  `on_context` hears of each N that is done.

    Returns a dataset over `context`, `set` ("id", "ood") and `predictor`:

    - `distance`: KL(reference || model) in nats over late positions, `distance_error`, its standard
      error, and `distance_binned` in bins of positions (`bin_start` to `bin_end`, half-open);
    - `composition` and `residual`, `loss`, and `reference_loss`, nats, on the true next states;
    - `phase`, `phase_ood`, `margin` with `margin_error`, `separation` and `clear`, as in curves;
    - with several orders `order` (shuffle, state), and by `shuffle` the distance, composition and
      phase under each.

    Raises `ValueError`, naming the context and the place, for what `score` refuses in a model;
    if the context is below 2 or given twice; for fewer than 2 sequences; and for more shuffles than
    there are orders of C states.
    """
    contexts = list(contexts)
    _check_request(contexts, sequences, shuffles, prior.states)
    keys = {name: jax.random.fold_in(key, place) for place, name in enumerate(PURPOSES)}
    orders = _orders(keys["shuffles"], shuffles, prior.states)
    predictors = reference_predictors(chains, prior)
    sources = {"id": prior if chains is None else chains, "ood": prior}
    bins = max(len(position_bins(context)) for context in contexts)
    tables = []
    for context in contexts:
        sets = {
            name: evaluation_set(
                source, predictors, sequences, context, key=jax.random.fold_in(keys[name], context)
            )
            for name, source in sources.items()
        }
        tables.append(_score_context(model, sets, orders, bins))
        on_context(context)
    table = xr.concat(tables, "context", data_vars="all", coords="different", compat="equals")
    table = table.reindex(predictor=list(PREDICTORS))
    for name, variable in table.variables.items():
        if variable.dtype.kind == "f":
            one = ("composition", "undefined", "bin_start", "bin_end")
            unit = "nats" if not str(name).startswith(one) else "1"
            variable.attrs["units"] = "positions" if str(name).startswith("bin") else unit
    return table.assign_coords(context=("context", contexts, {"units": "states"})).assign_attrs(
        chains="infinite" if chains is None else chains.count,
        states=prior.states,
        prior=prior.two_gen,
        sequences=sequences,
        shuffles=shuffles,
    )


def _check_request(contexts: list[int], sequences: int, shuffles: int, states: int) -> None:
    if not contexts or min(contexts) < 2 or len(set(contexts)) < len(contexts):
        raise ValueError(f"contexts: expected different lengths of at least 2, got {contexts}")
    if sequences < 2:
        raise ValueError(f"sequences: expected at least 2, got {sequences}")
    if shuffles < 1:
        raise ValueError(f"shuffles: expected at least 1, got {shuffles}")
    if states < 9 and shuffles > math.factorial(states):
        raise ValueError(
            f"shuffles: expected 1 to {math.factorial(states)}, as many as there are orders of "
            f"{states} states, got {shuffles}"
        )


def _orders(key: PRNGKeyArray, count: int, states: int) -> Int[np.ndarray, "shuffle state"]:
    """The order as it is, and random ones, all different."""
    random = np.random.default_rng(np.asarray(jax.random.key_data(key)))
    orders = {tuple(range(states)): None}
    while len(orders) < count:
        orders[tuple(random.permutation(states).tolist())] = None
    return np.array(list(orders))


def _score_context(
    model: Model,
    sets: dict[str, EvaluationSet],
    orders: Int[np.ndarray, "shuffle state"],
    bins: int,
) -> xr.Dataset:
    """One context length, without the context axis."""
    context = next(iter(sets.values())).states.shape[1]
    pooled: list[Measurement] = []
    each: dict[str, list[Measurement]] = {}
    mixtures: list[tuple[Array, Array]] = []
    for name, on in sets.items():
        where = f"context {context}, {name.upper()} sequences"
        each[name], divergences = [], []
        for order in orders:
            log_probs = _in_order(model, np.asarray(on.states), order, where)
            each[name].append(measure(log_probs, on))
            if len(orders) > 1:
                divergences.append(_divergence(on.references, log_probs))
            if name == "id":
                mixtures.append(compose(log_probs, on))
        pooled.append(_pool(each[name], divergences, on))
    compositions = np.stack([weights for weights, _ in mixtures])
    here, there = pooled
    edges = np.full((bins, 2), np.nan)
    edges[: len(position_bins(context))] = position_bins(context)
    binned = np.full((len(SETS), compositions.shape[1], bins), np.nan)
    binned[..., : len(position_bins(context))] = [m.distance_binned for m in pooled]
    table = xr.Dataset(
        {
            name: (("set", "predictor"), np.stack([getattr(m, name) for m in pooled]))
            for name in ("distance", "distance_error", "undefined")
        }
        | {
            "distance_binned": (("set", "predictor", "bin"), binned),
            "loss": ("set", np.stack([m.loss for m in pooled])),
            "reference_loss": (
                ("set", "predictor"),
                np.stack([on.reference_loss for on in sets.values()]),
            ),
            "composition": ("predictor", compositions.mean(axis=0)),
            "residual": ((), np.mean([float(residual) for _, residual in mixtures])),
            "phase": ((), phase_name(int(here.nearest))),
            "phase_ood": ((), phase_name(int(there.nearest))),
            "clear": ((), bool(is_clear(here, jnp.asarray(compositions.mean(axis=0))))),
        }
        | {
            name: ((), float(getattr(here, name)))
            for name in ("margin", "margin_error", "separation")
        },
        coords={
            "set": list(SETS),
            "predictor": list(PREDICTORS[: compositions.shape[1]]),
            "bin_start": ("bin", edges[:, 0]),
            "bin_end": ("bin", edges[:, 1]),
        },
    )
    if len(orders) > 1:
        by_order = [np.stack([m.distance for m in each[name]]) for name in SETS]
        table["distance_by_shuffle"] = (("set", "shuffle", "predictor"), np.stack(by_order))
        table["composition_by_shuffle"] = (("shuffle", "predictor"), compositions)
        labels = [phase_name(int(m.nearest)) for m in each["id"]]
        table["phase_by_shuffle"] = ("shuffle", labels)
        table = table.assign_coords(order=(("shuffle", "state"), orders))
    return table


_divergence = jax.jit(kl_divergence)
_measure_divergence = jax.jit(measure_divergence)


def _pool(
    each: Sequence[Measurement], divergences: Sequence[Array], on: EvaluationSet
) -> Measurement:
    """A mean over orders of states; its errors are those over sequences and orders together."""
    if len(each) == 1:
        return each[0]
    loss = jnp.mean(jnp.stack([measured.loss for measured in each]))
    whole: Measurement = _measure_divergence(sum(divergences) / len(each), loss, on)
    distances = np.stack([measured.distance for measured in each])
    first, second = np.argsort(np.where(np.isnan(whole.distance), np.inf, whole.distance))[:2]

    def over_orders(values: np.ndarray) -> Any:
        return np.std(values, axis=0, ddof=1) / math.sqrt(len(each))

    with np.errstate(invalid="ignore"):  # infinite distances have no error
        margins = over_orders(distances[:, second] - distances[:, first])
        spreads = over_orders(distances)
    return replace(
        whole,
        margin_error=jnp.hypot(whole.margin_error, margins),
        distance_error=jnp.hypot(whole.distance_error, spreads),
    )


def _in_order(
    model: Model, states: np.ndarray, order: Int[np.ndarray, " state"], where: str
) -> Float[Array, "batch position state"]:
    """Log-probabilities of a model to which state s is the one of number `order[s]`."""
    try:
        output = _call(model, order[states])
        return _log_probs(output, (*states.shape, len(order)))[..., order]
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _call(model: Model, states: np.ndarray) -> Any:
    given = np.array(states, np.int64)
    try:
        return model(given)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise ValueError(
            f"the model failed, called with states of shape {states.shape} (int64): "
            f"{type(error).__name__}: {error} ({last.filename}, line {last.lineno})"
        ) from error


def _log_probs(output: Any, expected: tuple[int, int, int]) -> Float[Array, "batch position state"]:
    """What a model returned, in float32, or an error that names the place."""
    array, epsilon = _as_array(output)
    if array.shape != expected:
        raise ValueError(
            f"log-probabilities: expected shape (batch, position, state) = {expected}, "
            f"got {array.shape}"
        )
    array = array.astype(np.float64)
    if (missing := np.isnan(array)).any():
        where = tuple(np.argwhere(missing)[0].tolist())
        raise ValueError(f"log-probabilities: NaN at (batch, position, state) = {where}")
    with np.errstate(over="ignore"):
        totals = np.exp(array).sum(-1)
    # Rounding log p by epsilon / 2 moves sum p by up to epsilon / 2 sum p |log p|.
    tolerance = max(SUM_TOLERANCE, epsilon * math.log(expected[-1]))
    if (wrong := ~(np.abs(totals - 1) <= tolerance)).any():
        where = tuple(np.argwhere(wrong)[0].tolist())
        raise ValueError(
            f"probabilities at (batch, position) = {where} sum to {totals[where]:.6g}, "
            f"expected 1 within {tolerance:.2g}{_likely(array)}"
        )
    if tolerance > SUM_TOLERANCE:
        array -= np.log(totals)[..., None]
    return jnp.asarray(array, jnp.float32)


def _likely(array: np.ndarray) -> str:
    """What was returned instead of log-probabilities, to end a message with."""
    if array.min() >= 0 and np.allclose(array.sum(-1), 1, atol=1e-3):
        return ": these are probabilities, return their logarithm"
    if array.max() > 0:
        return ": if these are logits, return their log-softmax"
    return ""


def _as_array(output: Any) -> tuple[np.ndarray, float]:
    """A numpy array of what a model returned, and the epsilon of the type it was computed in.

    PyTorch is known by its `detach`, without which its tensors cannot leave a gradient's graph;
    numpy lacks its bfloat16.
    """
    try:
        if callable(getattr(output, "detach", None)):
            output = output.detach().cpu()
            precise = str(output.dtype).removeprefix("torch.")
            if precise.startswith(("bfloat", "float8")):
                return np.asarray(output.float()), _epsilon(precise)
        array = np.asarray(output)
    except Exception as error:
        raise ValueError(
            f"log-probabilities: expected an array, got {type(output).__name__} "
            f"({type(error).__name__}: {error})"
        ) from error
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise ValueError(
            f"log-probabilities: expected an array of floating-point numbers, got "
            f"{type(output).__name__} of {array.dtype}"
        )
    return array, _epsilon(array.dtype)


def _epsilon(kind: Any) -> float:
    finfo: Any = jnp.finfo  # which knows the types that numpy lacks
    return float(finfo(kind).eps)

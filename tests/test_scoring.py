"""Any model against the references: models of several frameworks, at several context lengths."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from iclens.chains import ChainPrior, ChainSet
from iclens.phases import PHASES
from iclens.predictors import PREDICTORS, reference_predictors
from iclens.scoring import _in_order, _log_probs, score, score_contexts

# Everywhere the same sizes, those of test_phases, so that everything is compiled once.
SEQUENCES, CONTEXT, C = 128, 32, 4
PRIOR = ChainPrior(C)
CHAINS = PRIOR.sample(jax.random.key(0), 12)
KEY = jax.random.key(0)
Model = Callable[[np.ndarray], np.ndarray]


def scored(model: Callable, key: jax.Array = KEY, **options: object) -> xr.Dataset:
    return score_contexts(
        model, CHAINS, PRIOR, (CONTEXT,), sequences=SEQUENCES, key=key, **options
    ).isel(context=0)


def formula(name: str) -> Model:
    """A reference written anew, in numpy, one sequence and position after another."""
    T, pi = CHAINS.transition, CHAINS.stationary

    def row(seen: np.ndarray) -> np.ndarray:
        now = seen[-1]
        if name == "1-Gen":
            counts = np.bincount(seen, minlength=C) + PRIOR.one_point_concentration
            return counts / counts.sum()
        if name == "2-Gen":
            counts = np.bincount(seen[1:][seen[:-1] == now], minlength=C) + 1.0
            return counts / counts.sum()
        log_weight = np.log(CHAINS.weights)
        if name == "1-Mem":
            log_weight = log_weight + np.log(pi[:, seen]).sum(1)
        else:
            log_weight = log_weight + np.log(pi[:, seen[0]])
            log_weight = log_weight + np.log(T[:, seen[:-1], seen[1:]]).sum(1)
        weight = np.exp(log_weight - log_weight.max())
        return weight / weight.sum() @ T[:, now]

    return lambda states: np.log(
        [[row(sequence[: n + 1]) for n in range(len(sequence))] for sequence in states]
    )


def two_gen(states: np.ndarray) -> np.ndarray:
    """The same for 2-Gen, at once for all sequences."""
    follows = np.eye(C)[states[:, :-1]][..., None] * np.eye(C)[states[:, 1:]][:, :, None]
    counts = 1 + np.concatenate([np.zeros((len(states), 1, C, C)), follows.cumsum(1)], axis=1)
    here = np.take_along_axis(counts, states[..., None, None], axis=2)[:, :, 0]
    return np.log(here / here.sum(-1, keepdims=True))


def uniform(states: np.ndarray) -> np.ndarray:
    return np.full((*states.shape, C), -np.log(C))


@pytest.mark.parametrize(("phase", "name"), list(zip(PHASES, PREDICTORS, strict=True)))
def test_a_model_that_is_a_formula_has_its_label_and_distance_0(phase: str, name: str) -> None:
    for model in (formula(name), reference_predictors(CHAINS, PRIOR)[name]):
        found = scored(model)
        assert found.phase == phase
        assert found.clear
        for kind in ("id", "ood"):
            distance = found.distance.sel(set=kind, predictor=name)
            assert distance == pytest.approx(0, abs=2e-6)
            binned = found.distance_binned.sel(set=kind, predictor=name)
            np.testing.assert_allclose(binned, 0, atol=2e-6)
        assert found.phase_ood == phase
        assert found.composition.sel(predictor=name) == pytest.approx(1, abs=0.02)
        assert found.residual == pytest.approx(0, abs=1e-5)
        np.testing.assert_allclose(found.loss, found.reference_loss.sel(predictor=name), rtol=1e-5)


def test_a_uniform_model_is_none_of_them() -> None:
    found = scored(uniform)
    assert (found.phase, found.phase_ood) == ("none", "none")
    np.testing.assert_allclose(found.loss, np.log(C), rtol=1e-6)
    for almost in (lambda s: jnp.asarray(uniform(s), jnp.bfloat16), lambda s: uniform(s) + 3e-7):
        assert scored(almost).phase == "none"


@pytest.mark.slow
def test_fresh_chains_only_have_no_memorising_references() -> None:
    options = {"sequences": SEQUENCES, "key": KEY}
    found = score_contexts(two_gen, None, PRIOR, (CONTEXT,), **options).isel(context=0)
    assert found.phase == "G2"
    assert found.distance.sel(predictor=["1-Mem", "2-Mem"]).isnull().all()
    assert found.attrs["chains"] == "infinite"


@pytest.mark.slow
def test_each_context_is_scored_as_a_call_of_its_own_would_be() -> None:
    asked: list[np.ndarray] = []

    def model(states: np.ndarray) -> np.ndarray:
        asked.append(states.copy())
        states[:] = 0  # what a model does to its copy is its own affair
        return two_gen(asked[-1])

    told: list[int] = []
    found = score_contexts(
        model, CHAINS, PRIOR, (CONTEXT, 2), sequences=SEQUENCES, key=KEY, on_context=told.append
    )
    assert told == [CONTEXT, 2]
    assert [states.shape for states in asked] == [(128, 32)] * 2 + [(128, 2)] * 2
    assert asked[0].dtype == np.int64
    whole = score(two_gen, asked[0], CHAINS, PRIOR)
    here = found.sel(context=CONTEXT)
    np.testing.assert_array_equal(here.distance.sel(set="id"), list(whole.distance.values()))
    np.testing.assert_allclose(here.composition, list(whole.composition.values()))
    assert here.margin == whole.measurement.margin
    assert here.phase == whole.phase
    assert here.margin_error == whole.measurement.margin_error
    assert found.context.attrs["units"] == "states"
    short = found.sel(context=2)
    assert short.bin_end.values[:2].tolist() == [1, 2]
    assert short.bin_end.isnull().sum() == 4
    assert short.distance_binned.isel(bin=slice(2, None)).isnull().all()
    assert xr.Dataset.from_dict(found.to_dict()).identical(found)


def test_distances_and_errors_by_explicit_sums() -> None:
    asked: list[np.ndarray] = []

    def model(states: np.ndarray) -> np.ndarray:
        asked.append(states)
        return 0.5 * two_gen(states) - np.log(np.exp(0.5 * two_gen(states)).sum(-1, keepdims=True))

    found = scored(model).sel(set="id")
    log_p = np.asarray(formula("2-Mem")(asked[0]))
    each = (np.exp(log_p) * (log_p - model(asked[0]))).sum(-1)[:, CONTEXT // 2 :].mean(1)
    row = found.sel(predictor="2-Mem")
    assert row.distance == pytest.approx(each.mean(), rel=1e-4)
    assert row.distance_error == pytest.approx(each.std(ddof=1) / math.sqrt(SEQUENCES), rel=1e-3)


@pytest.mark.slow
def test_errors_say_how_far_another_draw_may_be() -> None:
    """Of many draws, two thirds lie within one error of the mean of all, and 95 % within two."""
    drawn = [scored(uniform, jax.random.key(1000 + draw)) for draw in range(40)]
    distances = np.stack([one.distance.values for one in drawn])
    errors = np.stack([one.distance_error.values for one in drawn])
    margins = np.array([float(one.margin) for one in drawn])
    aside = np.abs(distances - distances.mean(0)) / errors
    assert 0.5 < (aside < 1).mean() < 0.85
    assert (aside < 2).mean() > 0.88
    error = np.mean([float(one.margin_error) for one in drawn])
    assert margins.std() == pytest.approx(error, rel=0.5)


@pytest.mark.slow
def test_a_model_that_names_no_state_is_the_same_in_every_order() -> None:
    found = scored(two_gen, shuffles=6)
    assert found.phase_by_shuffle.values.tolist() == ["G2"] * 6
    assert sorted(map(tuple, found.order.values.tolist())) == sorted(
        {tuple(order) for order in found.order.values.tolist()}
    )
    assert found.order.values[0].tolist() == [0, 1, 2, 3]
    one = scored(two_gen)
    np.testing.assert_allclose(found.distance, one.distance, atol=1e-6)
    np.testing.assert_allclose(found.margin_error, one.margin_error, rtol=1e-3)


@pytest.mark.slow
def test_a_model_that_knows_states_by_name_is_told_by_the_spread_over_orders() -> None:
    memory = reference_predictors(CHAINS, PRIOR)["2-Mem"]
    found = scored(memory, shuffles=4)
    assert found.phase_by_shuffle.values[0] == "M2"
    assert set(found.phase_by_shuffle.values[1:]) <= {"none", "G1", "G2", "M1"}
    row = found.sel(set="id", predictor="2-Mem")
    by_order = row.distance_by_shuffle.values
    assert by_order[0] == pytest.approx(0, abs=1e-6)
    assert row.distance == pytest.approx(by_order.mean(), rel=1e-5)
    over = by_order.std(ddof=1) / 2
    assert row.distance_error >= over
    assert row.distance_error == pytest.approx(over, rel=0.3)
    assert found.margin_error > 5 * scored(memory).margin_error
    np.testing.assert_allclose(found.composition, found.composition_by_shuffle.mean("shuffle"))


@given(st.permutations(range(C)), st.integers(0, 2**32 - 1))
@settings(max_examples=20, deadline=None)
def test_a_model_in_another_order_has_its_rows_and_columns_in_that_order(
    order: list[int], seed: int
) -> None:
    """A model that reads its prediction off a table, for which the table is turned by hand."""
    random = np.random.default_rng(seed)
    table = np.log(random.dirichlet(np.ones(C), C))
    states = random.integers(0, C, (4, 5))
    found = _in_order(lambda given: table[given], states, np.array(order), "here")
    turned = np.array([[table[order[a], order[b]] for b in range(C)] for a in range(C)])
    np.testing.assert_allclose(found, turned[states], rtol=1e-6)


def test_halves_of_precision_are_taken_within_their_rounding() -> None:
    exact = scored(two_gen)
    for kind in (jnp.bfloat16, jnp.float16):
        found = scored(lambda states, kind=kind: jnp.asarray(two_gen(states), kind))
        assert found.phase == "G2"
        assert abs(found.distance.sel(set="id", predictor="2-Gen")) < 1e-4
        np.testing.assert_allclose(found.distance, exact.distance, atol=2e-3)
    with pytest.raises(ValueError, match="sum to"):  # beyond what rounding does
        scored(lambda states: jnp.asarray(two_gen(states) + 0.03, jnp.bfloat16))


def raising(states: np.ndarray) -> np.ndarray:
    raise IndexError("too <far>")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            lambda s: two_gen(s)[:, :-1],
            r"\(batch, position, state\) = \(128, 32, 4\), got \(128, 3",
        ),
        (lambda s: two_gen(s)[..., :2], r"expected shape .* got \(128, 32, 2\)"),
        (lambda s: np.where(np.arange(C) == 2, np.nan, two_gen(s)), r"NaN at .* = \(0, 0, 2\)"),
        (lambda s: two_gen(s) + 0.1 * (s == 1)[..., None], r"sum to 1.10517, expected 1 within"),
        (lambda s: np.exp(two_gen(s)), "these are probabilities, return their logarithm"),
        (lambda s: two_gen(s) + 5, "if these are logits, return their log-softmax"),
        (lambda s: np.full((*s.shape, C), np.inf), "sum to inf"),
        (lambda s: np.zeros((*s.shape, C), int), "floating-point numbers, got ndarray of int64"),
        (lambda s: two_gen(s).astype(complex), "got ndarray of complex128"),
        (lambda s: {"logits": two_gen(s)}, "got dict of object"),
        (lambda s: None, "got NoneType"),
        (lambda s: [[0.5], [0.5, 0.5]], "expected an array, got list"),
        (raising, r"shape \(128, 32\) \(int64\): IndexError: too <far> \(.*test_scoring.py, line"),
        (lambda: None, "the model failed, .* TypeError"),
    ],
)
def test_what_is_no_distribution_is_refused_with_the_place(model, message: str) -> None:
    with pytest.raises(ValueError, match=f"^context 32, ID sequences: .*{message}"):
        scored(model)


def test_the_first_fault_is_named_by_its_place_and_set() -> None:
    calls = []

    def later(states: np.ndarray) -> np.ndarray:
        calls.append(states)
        log_probs = two_gen(states)
        log_probs[7, 3] += len(calls) == 2
        return log_probs

    with pytest.raises(ValueError, match=r"OOD sequences: .* \(batch, position\) = \(7, 3\)"):
        scored(later)


def test_an_interrupted_model_is_interrupted() -> None:
    def stop(states: np.ndarray) -> np.ndarray:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        scored(stop)


@given(
    hnp.arrays(
        st.sampled_from([np.float16, np.float32, np.float64, np.int32, np.bool_, object]),
        st.sampled_from([(2, 3, 2), (2, 3), (0,), ()]),
    )
)
@settings(deadline=None)
def test_whatever_a_model_returns_is_taken_or_refused(array: np.ndarray) -> None:
    try:
        found = np.asarray(_log_probs(array, (2, 3, 2)))
    except ValueError:
        return
    np.testing.assert_allclose(np.exp(found).sum(-1), 1, atol=2e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"contexts": (16, 1)}, r"lengths of at least 2, got \[16, 1\]"),
        ({"contexts": (16, 16)}, "expected different lengths"),
        ({"contexts": ()}, "expected different lengths"),
        ({"sequences": 1}, "sequences: expected at least 2, got 1"),
        ({"shuffles": 25}, "expected 1 to 24, as many as there are orders of 4 states, got 25"),
        ({"shuffles": 0}, "shuffles: expected at least 1, got 0"),
    ],
)
def test_requests_that_make_no_sense_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        score_contexts(two_gen, CHAINS, PRIOR, **{"key": KEY, **options})


def test_chains_of_other_states_are_refused() -> None:
    two = ChainSet(np.full((1, 2, 2), 0.5))
    with pytest.raises(ValueError, match="expected chains of 4 states, as the prior has, got 2"):
        score_contexts(two_gen, two, PRIOR, key=KEY)

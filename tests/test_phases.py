"""Distances, composition, labels and the phase map."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xarray as xr

from iclens.chains import ChainPrior, ChainSet
from iclens.phases import (
    PHASES,
    PhaseMap,
    compose,
    cross_entropy,
    evaluation_set,
    is_clear,
    kl_divergence,
    measure,
    position_bins,
    successive_phases,
)
from iclens.predictors import PREDICTORS, reference_predictors
from iclens.scoring import score

PRIOR = ChainPrior(4)
CHAINS = PRIOR.sample(jax.random.key(0), 12)
PREDICT = reference_predictors(CHAINS, PRIOR)
ON = evaluation_set(CHAINS, PREDICT, 128, 32, key=jax.random.key(1))


@pytest.mark.parametrize(("phase", "name"), list(zip(PHASES, PREDICTORS, strict=True)))
def test_a_model_that_is_a_reference_has_its_label(phase, name) -> None:
    result = score(PREDICT[name], ON.states, CHAINS, PRIOR)
    assert result.phase == phase
    assert result.distance[name] == pytest.approx(0, abs=1e-6)
    assert result.clear
    assert result.composition[name] == pytest.approx(1, abs=1e-2)
    assert result.residual == pytest.approx(0, abs=1e-5)


def test_a_uniform_or_a_random_model_has_no_phase() -> None:
    uniform = np.full((128, 32, 4), -np.log(4))
    assert score(uniform, ON.states, CHAINS, PRIOR).phase == "none"
    noise = jax.nn.log_softmax(2 * jax.random.normal(jax.random.key(0), uniform.shape))
    assert score(noise, ON.states, CHAINS, PRIOR).phase == "none"


def test_distances_by_explicit_loops() -> None:
    model = jax.nn.log_softmax(jax.random.normal(jax.random.key(2), ON.references.shape[1:]))
    result = measure(model, ON)
    for index, reference in enumerate(np.asarray(ON.references, np.float64)):
        total = np.zeros(32)
        for sequence in range(128):
            for position in range(32):
                p = np.exp(reference[sequence, position])
                q = np.asarray(model[sequence, position], np.float64)
                total[position] += sum(
                    a * (np.log(a) - b) for a, b in zip(p, q, strict=True) if a > 0
                )
        total /= 128
        assert result.distance[index] == pytest.approx(total[16:].mean(), rel=1e-4)
        for value, (start, end) in zip(
            result.distance_binned[index], position_bins(32), strict=True
        ):
            assert value == pytest.approx(total[start:end].mean(), rel=1e-4)


def test_position_bins_cover_the_context() -> None:
    assert position_bins(48) == [(0, 1), (1, 2), (2, 4), (4, 8), (8, 16), (16, 32), (32, 48)]
    assert position_bins(2) == [(0, 1), (1, 2)]
    assert position_bins(32)[-1] == (16, 32)


def test_divergence_with_zero_probabilities() -> None:
    with np.errstate(divide="ignore"):
        p = jnp.log(jnp.array([[0.0, 0.5, 0.5], [1.0, 0.0, 0.0]]))
        q = jnp.log(jnp.array([[0.2, 0.4, 0.4], [0.0, 0.5, 0.5]]))
    np.testing.assert_allclose(kl_divergence(p, q), [np.log(1.25), np.inf], rtol=1e-6)
    np.testing.assert_allclose(kl_divergence(p, p), [0, 0])
    slope = jax.grad(lambda q: kl_divergence(p[0], q))(q[0])
    np.testing.assert_allclose(slope, [0, -0.5, -0.5], rtol=1e-6)


def test_the_composition_of_a_mixture_is_its_weights() -> None:
    weights = jnp.array([0.1, 0.5, 0.15, 0.25])
    mixture = jnp.log(jnp.tensordot(weights, jnp.exp(ON.references), 1))
    found, residual = compose(mixture, ON)
    np.testing.assert_allclose(found, weights, atol=0.02)
    assert residual == pytest.approx(0, abs=1e-5)


def test_the_composition_minimises_the_divergence() -> None:
    """Against scipy's constrained minimiser on the same objective."""
    from scipy.optimize import minimize

    log_model = jax.nn.log_softmax(
        ON.references[1] + 0.5 * jax.random.normal(jax.random.key(4), ON.references[1].shape)
    )
    model = np.exp(np.asarray(log_model, np.float64))[:, 16:]
    references = np.exp(np.asarray(ON.references, np.float64))[:, :, 16:]

    def objective(w):
        mixture = np.tensordot(w, references, 1)
        return (model * (np.log(model) - np.log(mixture))).sum(-1).mean()

    best = minimize(
        objective,
        np.full(4, 0.25),
        bounds=[(0, 1)] * 4,
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1},
        options={"ftol": 1e-12},
    )
    weights, residual = compose(log_model, ON)
    assert residual == pytest.approx(best.fun, abs=2e-5)
    np.testing.assert_allclose(weights, best.x, atol=0.03)


def test_the_margin_error_is_that_of_the_mean_over_sequences() -> None:
    model = jax.nn.log_softmax(ON.references[1] + 0.3)
    result = measure(model, ON)
    kl = np.asarray(kl_divergence(ON.references, model))[:, :, 16:].mean(-1)
    first, second = np.argsort(kl.mean(-1))[:2]
    difference = kl[second] - kl[first]
    assert result.margin == pytest.approx(difference.mean(), rel=1e-4)
    assert result.margin_error == pytest.approx(difference.std() / np.sqrt(128), rel=0.2)


@pytest.mark.slow
def test_a_label_between_two_equal_references_is_not_clear() -> None:
    # Between 2-Gen and 2-Mem there is a mixture that is as far from both: the margin changes sign.
    low, high = 0.0, 1.0
    for _ in range(20):
        share = (low + high) / 2
        two = jnp.stack([ON.references[1], ON.references[3]])
        half = jnp.logaddexp(two[0] + jnp.log(1 - share), two[1] + jnp.log(share))
        result = measure(half, ON)
        low, high = (share, high) if result.distance[1] < result.distance[3] else (low, share)
    assert result.margin < result.margin_error
    assert not is_clear(result, compose(half, ON)[0])
    one = PRIOR.sample(jax.random.key(3), 1)  # with one chain, 1-Mem is 2-Mem
    predict = reference_predictors(one, PRIOR)
    result = score(predict["2-Mem"], one.sample(jax.random.key(0), 64, 16)[0], one, PRIOR)
    assert result.measurement.separation == pytest.approx(0, abs=1e-6)
    assert not result.clear


def test_a_mixture_that_is_nearest_to_a_third_reference_is_not_clear() -> None:
    # On the way from G1 to M2 a model may be nearest to G2, of which it has nothing.
    nearest = []
    for share in np.linspace(0, 1, 21):
        mixed = jnp.logaddexp(
            ON.references[0] + jnp.log(1 - share), ON.references[3] + jnp.log(share)
        )
        result = measure(mixed, ON)
        weights = compose(mixed, ON)[0]
        assert weights[0] + weights[3] == pytest.approx(1, abs=0.02)
        nearest.append(int(result.nearest))
        assert nearest[-1] in (0, 3) or not is_clear(result, weights)
    assert nearest[0] == 0
    assert nearest[-1] == 3
    assert set(nearest) - {0, 3}, "no share of these references shows the case"


@pytest.mark.slow
def test_an_exact_model_of_chains_with_zeros_is_clear() -> None:
    step = np.roll(np.eye(3), 1, axis=1)
    chains, prior = ChainSet(np.stack([step, step.T])), ChainPrior(3)
    states = np.asarray(chains.sample(jax.random.key(0), 16, 8)[0])
    result = score(lambda s: reference_predictors(chains, prior)["2-Mem"](s), states, chains, prior)
    assert result.phase == "M2"
    assert result.distance["2-Mem"] == 0
    assert np.isposinf(result.measurement.margin)
    assert result.clear


def test_one_sequence_says_nothing_of_errors() -> None:
    result = score(ON.references[1][:1], np.asarray(ON.states)[:1], CHAINS, PRIOR)
    assert np.isnan(result.measurement.margin_error)
    assert not result.clear


def test_a_model_in_numpy_is_scored_like_its_array() -> None:
    def frequencies(states: np.ndarray) -> np.ndarray:
        counts = np.cumsum(np.eye(4)[np.asarray(states)], axis=1) + PRIOR.one_point_concentration
        return np.log(counts / counts.sum(-1, keepdims=True))

    assert frequencies(ON.states).dtype == np.float64
    result = score(frequencies, ON.states, CHAINS, PRIOR)
    assert result.phase == "G1"
    assert result.distance["1-Gen"] == pytest.approx(0, abs=1e-6)
    assert result.distance == score(frequencies(ON.states), ON.states, CHAINS, PRIOR).distance
    with pytest.raises(ValueError, match="state at position 2 of sequence 0: expected 0 to 3"):
        score(frequencies, np.array([[0, 1, 4]]), CHAINS, PRIOR)


def test_no_model_beats_two_point_memory_on_its_own_sequences() -> None:
    losses = [float(cross_entropy(ON.target, reference)) for reference in ON.references]
    assert min(losses) == losses[3]


@pytest.mark.slow
def test_undefined_references_are_left_out_and_counted() -> None:
    two = ChainSet(np.array([np.full((2, 2), 0.5), [[0.0, 1.0], [1.0, 0.0]]])[1:])
    prior = ChainPrior(2)
    on = evaluation_set(prior, reference_predictors(two, prior), 64, 8, key=jax.random.key(0))
    result = measure(jnp.full((64, 8, 2), -np.log(2)), on)
    assert result.undefined[1] == 0
    assert 0.5 < result.undefined[3] < 1
    assert np.isfinite(result.distance).all()
    with pytest.raises(ValueError, match="no chain of the set can produce its first"):
        score(np.full((1, 3, 2), -np.log(2)), np.array([[0, 1, 1]]), two, prior)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda x: x[:, :-1], r"expected shape \(batch, position, state\) = \(128, 32, 4\)"),
        (lambda x: np.where(np.arange(4) == 2, np.nan, x), r"NaN at .* = \(0, 0, 2\)"),
        (lambda x: x + 0.1, r"probabilities at \(batch, position\) = \(0, 0\) sum to 1.1"),
    ],
)
def test_what_is_no_distribution_is_refused_with_the_place(spoil, message) -> None:
    good = np.asarray(ON.references[0])
    with pytest.raises(ValueError, match=message):
        score(spoil(good), ON.states, CHAINS, PRIOR)


def curves(chains, seed: int, phases: list[str], clear=None, outcome="finished") -> xr.Dataset:
    steps = np.arange(len(phases)) * 100
    return xr.Dataset(
        {"phase": ("step", phases), "clear": ("step", clear or [True] * len(phases))},
        coords={"step": steps},
        attrs={"chains": chains, "seed": seed, "outcome": outcome},
    )


def test_successive_phases_skip_repeats_none_and_unclear_labels() -> None:
    path = ["none", "M1", "M1", "G2", "G2", "M1", "M2"]
    clear = [True, True, True, True, True, False, True]
    assert successive_phases(curves(4, 0, path, clear)) == (["M1", "G2", "M2"], [100, 300, 600])


def test_thresholds_bracket_both_changes() -> None:
    rows = {2: ["M1", "M2"], 8: ["M1", "M2"], 16: ["G2", "M2"], 32: ["G1", "G2"], 64: ["G1", "G2"]}
    found = PhaseMap.from_curves([curves(k, 0, row) for k, row in rows.items()])
    assert found.thresholds["K1*"]["bracket"] == [8, 16]
    assert found.thresholds["K2*"]["bracket"] == [16, 32]
    second = PhaseMap.from_curves(
        [curves(k, s, row) for k, row in rows.items() for s in (0, 1)]
        + [curves(12, 0, ["M1", "G2", "M2"]), curves(12, 1, ["M1", "M2"])]
    )
    assert second.thresholds["K1*"]["bracket"] == [8, 16]
    assert second.thresholds["K1*"]["per_seed"][0] == {"seed": 0, "low": 8, "high": 12}


def test_thresholds_outside_the_sweep_are_open_and_mixed_stretches_are_spanned() -> None:
    below = PhaseMap.from_curves([curves(2, 0, ["M1", "M2"]), curves("infinite", 0, ["G1", "G2"])])
    assert below.thresholds["K2*"]["bracket"] == [2, "infinite"]
    only = PhaseMap.from_curves([curves(2, 0, ["M1", "M2"])])
    assert only.thresholds["K1*"]["bracket"] == [2, None]
    mixed = PhaseMap.from_curves(
        [curves(2, 0, ["M2"]), curves(4, 0, ["G2"]), curves(8, 0, ["M2"]), curves(16, 0, ["G2"])]
    )
    assert mixed.thresholds["K2*"]["bracket"] == [2, 16]
    assert PhaseMap.from_curves([curves(2, 0, ["none"])]).thresholds["K1*"]["bracket"] is None


def test_cells_that_did_not_finish_say_nothing_of_thresholds() -> None:
    cells = [curves(2, 0, ["M2"]), curves(4, 0, ["M1"], outcome="unfinished")]
    cells += [
        curves(8, 0, ["M2"]),
        curves(16, 0, ["G2"]),
        curves(32, 0, ["M1"], outcome="diverged"),
    ]
    found = PhaseMap.from_curves(cells).thresholds
    assert found["K2*"]["bracket"] == [8, 16]

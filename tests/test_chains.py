import re

import equinox as eqx
import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from iclens.chains import (
    ChainPrior,
    ChainSet,
    _cumulative,
    _log_stationary,
    birth_death,
    cyclic,
    doubly_stochastic,
    stationary_distribution,
    two_state,
)

KEY = jax.random.key(7)
FAIR = np.full((1, 2, 2), 0.5)


@st.composite
def transition_matrices(draw, zeros=False, counts=(1, 2, 4), sizes=(2, 3, 5)):
    """Chains whose entries span many orders; with `zeros`, some of 0.

    State 0 stays reachable from all states, so that the stationary law is unique.
    """
    count, states = draw(st.sampled_from(counts)), draw(st.sampled_from(sizes))
    shape = (count, states, states)
    exponents = draw(hnp.arrays(float, shape, elements=st.floats(-12, 0)))
    weights = 10.0**exponents
    if zeros:
        weights = weights * draw(hnp.arrays(bool, shape))
        weights[..., 0] = 10.0 ** exponents[..., 0]
    return weights / weights.sum(-1, keepdims=True)


# Stationary law


@settings(deadline=None)
@given(st.one_of(transition_matrices(), transition_matrices(zeros=True)))
def test_stationary_law_is_a_fixed_point(transition):
    law = stationary_distribution(transition)
    assert law.dtype == np.float64
    assert (law >= 0).all()
    np.testing.assert_allclose(law.sum(-1), 1, rtol=1e-14)
    np.testing.assert_allclose(np.einsum("ka,kab->kb", law, transition), law, rtol=1e-12)


@settings(deadline=None)
@given(transition_matrices(zeros=True))
def test_stationary_law_is_zero_exactly_at_transient_states(transition):
    law = stationary_distribution(transition)
    for matrix, row in zip(transition, law, strict=True):
        steps = np.linalg.matrix_power((matrix > 0) + np.eye(len(matrix)), len(matrix))
        # State 0 is reachable from all, so that the recurrent states are those that 0 reaches.
        np.testing.assert_array_equal(row > 0, steps[0] > 0)


def test_stationary_law_of_nearly_closed_classes_is_accurate():
    law = stationary_distribution(two_state(1e-13, 3e-13).transition[0])
    # The two-state closed form; solving pi (I - T) = 0 loses four digits to 1 - p here.
    np.testing.assert_allclose(law, [0.75, 0.25], rtol=1e-13)


def test_stationary_law_when_the_first_state_is_transient_or_the_last_absorbing():
    absorbing = [[0.5, 0.5, 0], [0, 0.5, 0.5], [0, 0, 1]]
    np.testing.assert_array_equal(stationary_distribution(absorbing), [0, 0, 1])
    transient_first = [[0.5, 0.25, 0.25], [0, 0.25, 0.75], [0, 0.25, 0.75]]
    np.testing.assert_allclose(stationary_distribution(transient_first), [0, 0.25, 0.75])


@pytest.mark.slow
def test_float32_laws_of_small_concentrations_agree_with_float64():
    logs = ChainPrior(4, 0.02)._log_rows(KEY, 200)
    assert logs.min() < -200  # far below the smallest float32
    law = np.exp(_log_stationary(logs, np))
    np.testing.assert_allclose(
        np.exp(_log_stationary(jnp.asarray(logs, "float32"), jnp)), law, atol=1e-3
    )


# Families with closed forms


@settings(deadline=None)
@given(st.floats(1e-6, 1), st.floats(1e-6, 1))
def test_two_state_law(p, q):
    chains = two_state(p, q)
    np.testing.assert_allclose(chains.transition, [[[1 - p, p], [q, 1 - q]]])
    np.testing.assert_allclose(chains.stationary, [[q / (p + q), p / (p + q)]], rtol=1e-9)


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0.01, 0.5), st.floats(0.01, 0.5)), min_size=1, max_size=6))
def test_birth_death_law_holds_detailed_balance(moves):
    up, down = np.array(moves).T
    chains = birth_death(up, down)
    flow = chains.stationary[0, :, None] * chains.transition[0]
    np.testing.assert_allclose(flow, flow.T, rtol=1e-12)
    law = np.cumprod(np.concatenate([[1], up / down]))
    np.testing.assert_allclose(chains.stationary[0], law / law.sum(), rtol=1e-12)


def test_doubly_stochastic_law_is_uniform():
    shifts = [np.roll(np.arange(5), -shift) for shift in (0, 1, 3)]
    chains = doubly_stochastic(shifts, [0.2, 0.5, 0.3])
    np.testing.assert_allclose(chains.transition.sum(1), 1)
    np.testing.assert_allclose(chains.transition[0, 4], [0.5, 0, 0.3, 0, 0.2])
    np.testing.assert_allclose(chains.stationary, 0.2)


def test_cyclic_chain_is_deterministic_and_its_law_uniform():
    chains = cyclic(6)
    np.testing.assert_allclose(chains.stationary, 1 / 6)
    states, _ = chains.sample(KEY, 600, 13)
    np.testing.assert_array_equal(np.diff(states, axis=1) % 6, 1)
    counts = np.bincount(states[:, 0], minlength=6)  # the phase is random although T is not
    assert abs(counts - 100).max() < 5 * np.sqrt(600 / 6)


# Sampling


@pytest.mark.slow
def test_frequencies_follow_the_transition_matrices_and_the_stationary_laws():
    chains = ChainPrior(4).sample(KEY, 3)
    states, index = map(np.asarray, chains.sample(jax.random.key(1), 30_000, 12))
    assert states.shape == (30_000, 12)
    assert states.dtype == index.dtype == np.int32
    for k in range(3):
        mine = states[index == k]
        for position in (0, 11):
            check_frequencies(mine[:, position], chains.stationary[k])
        for a in range(4):
            check_frequencies(mine[:, 1:][mine[:, :-1] == a], chains.transition[k, a])


def check_frequencies(draws, probability):
    """Fail where a count is more than five standard deviations from its mean."""
    counts = np.bincount(draws, minlength=len(probability))
    deviation = np.sqrt(len(draws) * probability * (1 - probability))
    assert (abs(counts - len(draws) * probability) <= 5 * deviation).all()


def test_successive_states_and_neighbouring_sequences_are_independent():
    # Of a chain with equal rows every state is a fresh draw, so that pairs factorise.
    states, _ = ChainSet(np.tile([0.2, 0.3, 0.5], (1, 3, 1))).sample(KEY, 20_000, 3)
    law = np.outer([0.2, 0.3, 0.5], [0.2, 0.3, 0.5]).ravel()
    states = np.asarray(states)
    check_frequencies(states[:, 0] * 3 + states[:, 1], law)
    check_frequencies(states[:, 0] * 3 + states[:, 2], law)
    check_frequencies(states[::2, 1] * 3 + states[1::2, 1], law)


def test_chains_are_drawn_by_their_weights():
    chains = ChainSet(np.repeat(FAIR, 5, axis=0), weights=[0, 1, 0, 3, 0])
    np.testing.assert_array_equal(chains.weights, [0, 0.25, 0, 0.75, 0])
    _, index = chains.sample(KEY, 40_000, 1)
    check_frequencies(np.asarray(index), chains.weights)


def test_many_chains_of_equal_weight_have_equal_intervals():
    chains = ChainSet(np.repeat(FAIR, 100_000, axis=0))
    widths = np.diff(chains.cumulative.astype(np.int64), prepend=0)
    assert widths.min() >= 2**32 // 100_000
    assert widths.max() <= 2**32 // 100_000 + 1


@pytest.mark.parametrize("draw", [0, 2**32 - 1])
def test_extreme_bits_never_draw_a_chain_of_weight_zero(monkeypatch, draw):
    monkeypatch.setattr(
        jax.random, "bits", lambda key, shape, dtype: jnp.full(shape, draw, dtype=dtype)
    )
    chains = ChainSet(np.repeat(FAIR, 5, axis=0), weights=[0, 1, 0, 3, 0])
    _, index = chains.sample(KEY, 2, 1)
    assert index.tolist() == [1 if draw == 0 else 3] * 2


@settings(deadline=None)
@given(transition_matrices(zeros=True), st.sampled_from([0.0, 0.5, 1 - 2**-24]))
def test_impossible_transitions_are_never_drawn_not_even_by_extreme_numbers(transition, number):
    rows = np.zeros((4, 5, 6))  # one shape, compiled once
    rows[: len(transition), : transition.shape[1], : transition.shape[2]] = transition
    cumulative = np.asarray(_cumulative(jnp.asarray(rows)))
    drawn = np.sum(cumulative <= np.float32(number), axis=-1)
    drawn = drawn[: len(transition), : transition.shape[1], None]
    chosen = np.take_along_axis(rows[: len(transition), : transition.shape[1]], drawn, axis=-1)
    assert (chosen > 0).all()


def test_sampled_sequences_take_possible_transitions_only():
    chains = birth_death([0.3, 1e-6, 0.7], [0.7, 0.3, 1.0])
    states, _ = chains.sample(KEY, 2000, 100)
    assert (abs(np.diff(states, axis=1)) <= 1).all()


@pytest.mark.parametrize(
    "source",
    [
        ChainPrior(3),
        pytest.param(ChainPrior(3, 0.3), marks=pytest.mark.slow),
        ChainPrior(3).sample(KEY, 9),
    ],
)
def test_draw_is_the_same_compiled_or_not(source):
    states, transition = source.draw(KEY, 50, 7)
    compiled = eqx.filter_jit(lambda source, key: source.draw(key, 50, 7))(source, KEY)
    np.testing.assert_array_equal(states, compiled[0])
    np.testing.assert_allclose(transition, compiled[1], rtol=1e-5)


def test_draw_returns_the_matrix_of_each_sequence():
    chains = ChainPrior(3).sample(KEY, 20)
    states, index = chains.sample(KEY, 50, 7)
    again, transition = chains.draw(KEY, 50, 7)
    np.testing.assert_array_equal(again, states)
    np.testing.assert_array_equal(transition, chains.transition[np.asarray(index)].astype("f4"))


def test_mapped_keys_draw_what_single_keys_draw():
    chains = jax.tree.map(jnp.asarray, ChainPrior(3).sample(KEY, 20))
    keys = jax.random.split(KEY, 3)
    together = jax.vmap(lambda key: chains.draw(key, 5, 7)[0])(keys)
    alone = jnp.stack([chains.draw(key, 5, 7)[0] for key in keys])
    np.testing.assert_array_equal(together, alone)
    assert not (together[0] == together[1]).all()


def test_golden_draws():
    """Pins the draws of the default random numbers: a change here changes every saved run."""
    chains = ChainPrior(3).sample(jax.random.key(0), 2)
    states, index = chains.sample(jax.random.key(1), 2, 8)
    np.testing.assert_allclose(chains.transition[0, 0], GOLDEN_ROW, rtol=1e-12)
    assert states.tolist() == GOLDEN_STATES
    assert index.tolist() == GOLDEN_INDEX
    fresh, _ = ChainPrior(3).draw(jax.random.key(1), 2, 8)
    assert fresh.tolist() == GOLDEN_FRESH


GOLDEN_ROW = [0.3573950830995909, 0.6281257854941138, 0.014479131406295316]
GOLDEN_STATES = [[1, 0, 2, 0, 2, 1, 2, 2], [1, 0, 1, 0, 1, 2, 1, 2]]
GOLDEN_INDEX = [1, 0]
GOLDEN_FRESH = [[1, 0, 1, 0, 1, 1, 1, 1], [2, 1, 2, 1, 2, 2, 2, 2]]


# The prior


@pytest.mark.parametrize("concentration", [0.2, 1.0, 5.0])
@pytest.mark.parametrize("method", ["sample", "draw"])
def test_rows_are_dirichlet(concentration, method):
    prior, states, count = ChainPrior(3, concentration), 3, 20_000
    if method == "sample":
        rows = prior.sample(KEY, count).transition
    else:
        rows = np.asarray(prior.draw(KEY, count, 1)[1], dtype=float)
    rows = rows.reshape(-1, states)
    np.testing.assert_allclose(rows.sum(-1), 1, rtol=1e-6)
    total = states * concentration
    variance = (states - 1) / states**2 / (total + 1)
    covariance = np.cov(rows.T)
    np.testing.assert_allclose(rows.mean(0), 1 / states, atol=5 * np.sqrt(variance / len(rows)))
    expected = variance * (np.eye(3) * 1.5 - 0.5)  # covariances are -1/(C-1) of the variance
    np.testing.assert_allclose(covariance, expected, atol=0.05 * variance)


def test_fresh_chains_start_in_their_stationary_laws_and_follow_their_matrices():
    # A stationary sequence looks the same in both positions: P(x_0 = x_1 = a) through E[pi_a T_aa].
    states, transition = map(np.asarray, ChainPrior(2).draw(KEY, 40_000, 2))
    leave = np.stack([transition[:, 0, 1], transition[:, 1, 0]], axis=1)
    law = leave[:, ::-1] / leave.sum(1, keepdims=True)
    expected = law[:, :, None] * transition
    pairs = np.zeros_like(expected)
    pairs[np.arange(40_000), states[:, 0], states[:, 1]] = 1
    deviation = np.sqrt((expected * (1 - expected)).sum(0))
    assert (abs((pairs - expected).sum(0)) < 5 * deviation).all()


@pytest.mark.slow
@pytest.mark.parametrize("concentration", [pytest.param(1e-4, marks=pytest.mark.slow), 1e4])
def test_extreme_concentrations(concentration):
    prior = ChainPrior(4, concentration)
    chains = prior.sample(KEY, 300)
    assert (chains.transition > 0).all()
    states, transition = prior.draw(KEY, 300, 20)
    assert np.isfinite(transition).all()
    assert ((states >= 0) & (states < 4)).all()
    assert 0 < prior.one_point_concentration < np.inf


def test_one_point_concentration():
    # For two states pi = q / (p + q) has variance 3/4 - ln 2 when p and q are uniform.
    exact = (1 / 4 / (3 / 4 - np.log(2)) - 1) / 2
    assert ChainPrior(2).one_point_concentration == pytest.approx(exact, rel=0.015)
    for states, expected in {3: 2.5, 4: 3.45, 5: 4.49, 10: 9.69}.items():
        assert ChainPrior(states).one_point_concentration == pytest.approx(expected, rel=0.025)
    # Where T_ab = 1/C + small, pi_b is the mean of column b: C times less variance than the rows.
    assert ChainPrior(4, 1000.0).one_point_concentration == pytest.approx(4000, rel=0.02)


# Bad input

ROW = [0.5, 0.5]


@pytest.mark.parametrize(
    ("transition", "message"),
    [
        ([[ROW, [0.5, 0.47]]], "row 1 of chain 0 sums to 0.97, expected 1 within 1e-06"),
        ([[ROW, ROW], [[1.5, -0.5], ROW]], "row 0 of chain 1: expected a probability at column 1"),
        ([[ROW, [np.nan, 1.0]]], "row 1 of chain 0: expected a probability at column 0, got nan"),
        ([[ROW, [np.inf, 1.0]]], "row 1 of chain 0: expected a probability at column 0, got inf"),
        ([ROW, ROW], "expected shape (chain, state, state), got (2, 2)"),
        ([[[0.5, 0.25, 0.25], [0.5, 0.25, 0.25]]], "got (1, 2, 3)"),
        (np.zeros((0, 3, 3)), "expected at least 1 chain and 2 states, got shape (0, 3, 3)"),
        (np.ones((2, 1, 1)), "expected at least 1 chain and 2 states, got shape (2, 1, 1)"),
        ([np.full((3, 3), 1 / 3), np.eye(3)], "chain 1: states 0 and 1 lie in different closed"),
        (
            [[[0, 0.5, 0, 0.5], [0, 1, 0, 0], [0, 0, 0, 1], [0, 0, 1, 0]]],
            "chain 0: states 1 and 2 lie in different closed classes, expected one closed class",
        ),
    ],
)
def test_bad_transition_matrices_are_refused(transition, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        ChainSet(transition)


def test_rows_within_the_tolerance_are_normalised():
    chains = ChainSet(np.float32([[[0.1, 0.9], [0.7, 0.3]]]))
    np.testing.assert_array_equal(chains.transition.sum(-1), 1)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0], "weights: expected shape (2,), one for each chain, got (1,)"),
        ([1.0, -0.1], "weight of chain 1: expected a finite number of at least 0, got -0.1"),
        ([np.nan, 1.0], "weight of chain 0: expected a finite number of at least 0, got nan"),
        ([0.0, 0.0], "weights: expected a positive sum, got 0 for every chain"),
    ],
)
def test_bad_weights_are_refused(weights, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        ChainSet(np.repeat(FAIR, 2, axis=0), weights)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ChainPrior(1), "expected at least 2 states, got 1"),
        (lambda: ChainPrior(3, 0.0), "expected a positive number as the concentration, got 0.0"),
        (lambda: ChainPrior(3, np.nan), "concentration, got nan"),
        (lambda: ChainPrior(3, np.inf), "concentration, got inf"),
        (lambda: ChainPrior(3).sample(KEY, 0), "expected at least 1 chain to draw, got 0"),
        (lambda: ChainPrior(3).draw(KEY, 0, 5), "got 0 sequences of length 5"),
        (lambda: ChainSet(FAIR).sample(KEY, 5, 0), "got 5 sequences of length 0"),
        (lambda: ChainSet(FAIR).draw(KEY, 0, 5), "got 0 sequences of length 5"),
        (lambda: two_state(0.0, 0.0), "chain 0: states 0 and 1 lie in different closed classes"),
        (lambda: two_state(1.2, 0.5), "state 0 is left with probability 1.2, expected 0 to 1"),
        (lambda: birth_death([0.5], [0.5, 0.5]), "got shapes (1,) and (2,)"),
        (lambda: birth_death([], []), "got shapes (0,) and (0,)"),
        (lambda: birth_death([0.5, 0.6], [0.6, 0.5]), "state 1 is left with probability 1.2"),
        (lambda: birth_death([0.5, -0.1], [0.6, 0.5]), "row 1 of chain 0: expected a probability"),
        (
            lambda: doubly_stochastic([[0, 0]], [1.0]),
            "expected row 0 to be a permutation of 0 to 1",
        ),
        (lambda: doubly_stochastic([[1, 0]], [0.5, 0.5]), "got shapes (1, 2) and (2,)"),
        (lambda: doubly_stochastic([[1, 0]], [0.5]), "row 0 of chain 0 sums to 0.5"),
        (lambda: cyclic(1), "expected at least 1 chain and 2 states, got shape (1, 1, 1)"),
    ],
)
def test_bad_arguments_are_refused(build, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        build()

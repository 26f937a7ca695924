import itertools
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from iclens import predictors
from iclens.chains import ChainPrior, ChainSet, birth_death, cyclic, two_state
from iclens.predictors import (
    PREDICTORS,
    check_states,
    generalising,
    memorising,
    reference_predictors,
)
from test_chains import transition_matrices

KEY = jax.random.key(11)


def by_enumeration(context, chains, points, readout="row"):
    """Probabilities by Bayes' rule, chain by chain and state by state, in float64."""
    answer = np.full((*context.shape, chains.states), np.nan)
    for sequence, states in enumerate(context.tolist()):
        for n in range(len(states)):
            seen = states[: n + 1]
            posterior = []
            for k in range(chains.count):
                law, rows = chains.stationary[k], chains.transition[k]
                if points == 1:
                    likelihood = np.prod([law[a] for a in seen])
                else:
                    steps = [rows[a, b] for a, b in itertools.pairwise(seen)]
                    likelihood = law[seen[0]] * np.prod(steps)
                posterior.append(chains.weights[k] * likelihood)
            if sum(posterior) > 0:
                posterior = np.array(posterior) / sum(posterior)
                read = chains.transition[:, seen[-1]] if readout == "row" else chains.stationary
                answer[sequence, n] = posterior @ read
    return answer


def all_sequences(states, length):
    return np.array(list(itertools.product(range(states), repeat=length)), dtype=np.int32)


def mean_kl(log_p, log_q):
    return float(jnp.mean(jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)))


@pytest.fixture(scope="module")
def chains():
    return ChainPrior(4).sample(KEY, 20)


@pytest.fixture(scope="module")
def context(chains):
    return chains.sample(jax.random.key(1), 32, 24)[0]


# Generalising predictors


@pytest.mark.parametrize("pseudo_count", [0.1, 1.0, 3.5])
def test_generalising_predictors_count(context, pseudo_count):
    one = np.exp(generalising(4, points=1, pseudo_count=pseudo_count)(context))
    two = np.exp(generalising(4, points=2, pseudo_count=pseudo_count)(context))
    for sequence, states in enumerate(context.tolist()):
        for n in range(len(states)):
            seen = states[: n + 1]
            for b in range(4):
                count = seen.count(b)
                after = list(itertools.pairwise(seen)).count((states[n], b))
                left = seen[:-1].count(states[n])
                assert one[sequence, n, b] == pytest.approx(
                    (count + pseudo_count) / (n + 1 + 4 * pseudo_count), rel=1e-5
                )
                assert two[sequence, n, b] == pytest.approx(
                    (after + pseudo_count) / (left + 4 * pseudo_count), rel=1e-5
                )


def test_2_gen_is_the_posterior_mean_of_the_row():
    # The row of state 0 among two: integrate T_01 over its posterior on a fine grid.
    context = jnp.array([[0, 1, 0, 0, 1, 1, 0, 1, 0]])
    p, alpha = (np.arange(200_000) + 0.5) / 200_000, 2.5
    log_posterior = (3 + alpha - 1) * np.log(p) + (1 + alpha - 1) * np.log(1 - p)
    posterior = np.exp(log_posterior - log_posterior.max())
    predicted = generalising(2, points=2, pseudo_count=alpha)(context)[0, -1, 1]
    assert np.exp(predicted) == pytest.approx(np.average(p, weights=posterior), rel=1e-5)


# Memorising predictors


@pytest.mark.parametrize("points", [1, 2])
@pytest.mark.parametrize("readout", ["row", "stationary"])
def test_memorising_predictors_equal_enumeration(chains, context, points, readout):
    predicted = memorising(chains, points=points, readout=readout)(context)
    expected = by_enumeration(context, chains, points, readout)
    np.testing.assert_allclose(np.exp(predicted), expected, rtol=1e-4, atol=1e-6)


@settings(deadline=None, max_examples=60)
@given(transition_matrices(zeros=True, counts=(3,), sizes=(2, 3)), st.data())
def test_zeros_give_exact_posteriors(transition, data):
    count, states = transition.shape[:2]
    weights = np.array(data.draw(st.lists(st.integers(0, 3), min_size=count, max_size=count)))
    weights[data.draw(st.integers(0, count - 1))] = 1
    chains = ChainSet(transition, weights)
    sequence = st.lists(st.integers(0, states - 1), min_size=5, max_size=5)
    context = np.array(data.draw(st.lists(sequence, min_size=4, max_size=4)), dtype=np.int32)
    for points in (1, 2):
        predicted = np.exp(memorising(chains, points=points)(jnp.asarray(context)))
        expected = by_enumeration(context, chains, points)
        np.testing.assert_array_equal(np.isnan(predicted), np.isnan(expected))
        np.testing.assert_array_equal((predicted == 0) | (expected < 1e-30), expected < 1e-30)
        np.testing.assert_allclose(predicted, expected, rtol=1e-4, atol=1e-6)


def test_an_impossible_chain_has_no_weight_and_takes_no_precision_from_the_others():
    alternating, rest = cyclic(2), ChainPrior(2).sample(KEY, 3)
    both = ChainSet(np.concatenate([alternating.transition, rest.transition]))
    context = jnp.array([[0, 1, 0, 1, 1, 0]])
    with_it, without = (memorising(c, points=2)(context)[0] for c in (both, rest))
    assert (with_it[3] != without[3]).all()
    np.testing.assert_allclose(with_it[4:], without[4:], atol=1e-6)


def test_nan_where_no_chain_can_produce_the_context():
    walk = birth_death([0.5, 0.5], [0.5, 1.0])
    context = jnp.array([[0, 1, 2, 0, 1], [0, 1, 2, 1, 0]])
    predicted = memorising(walk, points=2)(context)
    assert jnp.isnan(predicted[0, 3:]).all()
    assert not jnp.isnan(predicted[0, :3]).any()
    assert not jnp.isnan(predicted[1]).any()
    # What the chain cannot do has probability 0, and logarithm -inf rather than NaN.
    np.testing.assert_array_equal(predicted[1, 2], jnp.log(jnp.array([0.0, 1.0, 0.0])))


@pytest.mark.parametrize("states", [2, 5])
def test_periodic_chains_are_recognised(states):
    forth, back = cyclic(states).transition, cyclic(states).transition.swapaxes(1, 2)
    noise = np.full((1, states, states), 1 / states)
    chains = ChainSet(np.concatenate([forth, back, noise]))
    context = jnp.arange(40)[None] % states
    predicted = np.exp(memorising(chains, points=2)(context))
    assert predicted[0, -1, 40 % states] == pytest.approx(1, abs=1e-6)


def test_one_chain_is_its_own_prediction():
    chains = ChainPrior(5).sample(KEY, 1)
    context, _ = chains.sample(KEY, 8, 30)
    rows = chains.transition[0][np.asarray(context)]
    for points in (1, 2):
        np.testing.assert_allclose(
            memorising(chains, points=points)(context), np.log(rows), rtol=1e-5, atol=1e-6
        )


def test_weights_are_the_prior_of_the_posterior(chains, context):
    weights = np.arange(20.0)
    weighted = ChainSet(chains.transition, weights)
    repeated = ChainSet(np.repeat(chains.transition, np.arange(20), axis=0))
    for points in (1, 2):
        predicted = memorising(weighted, points=points)(context)
        np.testing.assert_allclose(
            predicted, memorising(repeated, points=points)(context), atol=1e-4
        )
        expected = by_enumeration(context, weighted, points)
        np.testing.assert_allclose(np.exp(predicted), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("chunk", "positions"), [(1, 24), (7, 50), (20, 1), (64, 10_000)])
@pytest.mark.parametrize("zeros", [False, True])
def test_chunks_do_not_change_the_prediction(monkeypatch, chains, context, chunk, positions, zeros):
    transition = chains.transition.copy()
    if zeros:  # as many chains cannot go from 0 to 1 as can
        transition[::2, 0] = [0.5, 0, 0.25, 0.25]
    chains = ChainSet(transition)
    whole = [memorising(chains, points=points)(context) for points in (1, 2)]
    monkeypatch.setattr(predictors, "CHAIN_CHUNK", chunk)
    monkeypatch.setattr(predictors, "POSITION_CHUNK", positions)
    for points, expected in zip((1, 2), whole, strict=True):
        np.testing.assert_allclose(memorising(chains, points=points)(context), expected, atol=2e-5)


def test_long_contexts_stay_accurate_in_float32():
    # Two chains so alike that the posterior stays open: log-likelihoods of 1000 nats cancel.
    first = ChainPrior(5).sample(KEY, 1).transition
    second = 0.98 * first + 0.02 * ChainPrior(5).sample(jax.random.key(1), 1).transition
    chains = ChainSet(np.concatenate([first, second]))
    context, _ = chains.sample(KEY, 4, 1000)
    log_row, x = np.log(chains.transition), np.asarray(context)
    steps = np.cumsum(log_row[:, x[:, :-1], x[:, 1:]], axis=-1)
    score = np.log(chains.stationary)[:, x[:, 0], None] + steps
    weight = np.exp(score - np.logaddexp.reduce(score, axis=0))
    assert 0.01 < weight[0].min(initial=1, where=weight[0] > 0.01) < 0.99
    expected = np.einsum("ksn,ksnb->snb", weight, chains.transition[:, x[:, 1:]])
    predicted = memorising(chains, points=2)(context)[:, 1:]
    np.testing.assert_allclose(predicted, np.log(expected), atol=2e-5)


# All four


def test_references_by_name(chains):
    prior = ChainPrior(4)
    assert tuple(reference_predictors(chains, prior)) == PREDICTORS
    assert tuple(reference_predictors(None, prior)) == ("1-Gen", "2-Gen")


@pytest.mark.parametrize("name", PREDICTORS)
def test_references_are_normalised_causal_and_compilable(chains, context, name):
    predictor = reference_predictors(chains, ChainPrior(4))[name]
    predicted = predictor(context)
    assert predicted.shape == (32, 24, 4)
    assert predicted.dtype == jnp.float32
    np.testing.assert_allclose(jnp.sum(jnp.exp(predicted), -1), 1, atol=1e-5)
    changed = predictor(context.at[:, 15:].set(0))
    np.testing.assert_array_equal(changed[:, :15], predicted[:, :15])
    assert (changed[:, 15:] != predicted[:, 15:]).any()
    np.testing.assert_allclose(jax.jit(predictor)(context), predicted, atol=1e-5)
    # A sequence's prediction does not depend on the others in the batch.
    np.testing.assert_allclose(predictor(context[5:6]), predicted[5:6], atol=1e-5)


def test_sets_of_one_shape_share_a_compilation(chains, context):
    memorising(chains, points=2)(context)
    compiled = predictors._memorise._cache_size()
    memorising(ChainPrior(4).sample(jax.random.key(5), 20), points=2)(context)
    assert predictors._memorise._cache_size() == compiled


@pytest.mark.slow
def test_2_mem_approaches_2_gen_as_the_set_grows():
    # 2-Mem also learns from what x_0 says of the chain.  Weights 1 / pi(0) undo that for contexts
    # that begin with 0, and then it is a Monte Carlo estimate of 2-Gen: KL falls as 1 / K.
    prior = ChainPrior(2)
    context = prior.draw(KEY, 200, 24)[0].at[:, 0].set(0)
    general = generalising(2, points=2, pseudo_count=1.0)(context)
    kl = []
    for count in (32, 512, 8192, 131_072):
        drawn = prior.sample(jax.random.key(1), count)
        chains = ChainSet(drawn.transition, weights=1 / drawn.stationary[:, 0])
        kl.append(mean_kl(general, memorising(chains, points=2)(context)))
    slope = np.polyfit(np.log([32, 512, 8192, 131_072]), np.log(kl), 1)[0]
    assert slope == pytest.approx(-1, abs=0.25)
    assert kl[-1] < 1e-4


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint32, np.int64])
def test_states_may_be_integers_of_any_type(dtype):
    prior = ChainPrior(16)
    chains = prior.sample(KEY, 4)
    states = np.asarray(chains.sample(KEY, 3, 12)[0])
    for predictor in reference_predictors(chains, prior).values():
        np.testing.assert_array_equal(predictor(states.astype(dtype)), predictor(states))
    with pytest.raises(ValueError, match="expected integers"):
        check_states(states.astype(float), 16)


@pytest.mark.slow
def test_2_mem_knows_the_frequencies_that_1_mem_knows_and_more(chains):
    # Each reference in its place: on long sequences of the set 2-Mem finds the chain's own row.
    context, transition = chains.draw(jax.random.key(3), 200, 200)
    row = jnp.log(jnp.take_along_axis(transition, context[:, -1:, None], axis=1)[:, 0])
    references = reference_predictors(chains, ChainPrior(4))
    distance = {name: mean_kl(row, f(context)[:, -1]) for name, f in references.items()}
    assert distance["2-Mem"] < 1e-3
    assert distance["2-Mem"] < distance["1-Mem"] < distance["1-Gen"]
    assert distance["2-Mem"] < distance["2-Gen"] < distance["1-Gen"]


@pytest.mark.slow
@settings(deadline=None, max_examples=20)
@example(1, 0, 0.25, 3)
@given(st.sampled_from([1, 2, 5]), st.integers(0, 1000), st.floats(1e-3, 1), st.integers(0, 3))
def test_no_predictor_has_a_smaller_expected_loss_than_2_mem(count, seed, change, other):
    """Expected loss over every sequence of five states, each with its exact probability."""
    chains = ChainPrior(2).sample(jax.random.key(seed), count)
    sequences = all_sequences(2, 5)
    context, following = jnp.asarray(sequences[:, :-1]), sequences[:, 1:]
    steps = chains.transition[:, sequences[:, :-1], sequences[:, 1:]]
    probability = chains.weights @ (chains.stationary[:, sequences[:, 0]] * steps.prod(-1))
    assert probability.sum() == pytest.approx(1)

    def loss(log_probs):
        taken = np.take_along_axis(np.asarray(log_probs, float), following[..., None], -1)
        return -probability @ taken[..., 0].sum(1)

    references = reference_predictors(chains, ChainPrior(2))
    best = references["2-Mem"](context)
    assert all(loss(best) <= loss(f(context)) + 1e-5 for f in references.values())
    # A random predictor, which knows only its context: sequences are in lexicographic order.
    unknown = np.arange(4)[::-1] + 1
    numbers = np.arange(len(sequences))[:, None] >> unknown << unknown
    arbitrary = np.random.default_rng(seed).dirichlet([1, 1], best.shape[:-1])
    arbitrary = np.log(arbitrary[numbers, np.arange(4)])
    elsewhere = [*(f(context) for f in list(references.values())[:3]), arbitrary][other]
    mixture = (1 - change) * np.exp(best) + change * np.exp(elsewhere)
    assert loss(best) <= loss(np.log(mixture)) + 1e-5
    # It is the entropy of the sequences, but for that of their first states.
    first = np.bincount(sequences[:, 0], probability)
    entropy = -probability @ np.log(probability) + first @ np.log(first)
    assert loss(best) == pytest.approx(entropy, abs=1e-5)


@pytest.mark.slow
def test_2_mem_has_the_least_loss_on_sampled_sequences(chains):
    states, transition = chains.draw(jax.random.key(2), 2000, 32)
    target = jnp.take_along_axis(transition, states[..., None], axis=1)
    loss = {
        name: -jnp.sum(target * predictor(states), axis=(1, 2)) / 32
        for name, predictor in reference_predictors(chains, ChainPrior(4)).items()
    }
    for name in ("1-Gen", "2-Gen", "1-Mem"):
        excess = loss[name] - loss["2-Mem"]
        assert excess.mean() > 5 * excess.std() / np.sqrt(excess.size)


@pytest.mark.slow
def test_a_hundred_thousand_chains_fit_in_two_gibibytes():
    script = """
from pathlib import Path
import jax
from iclens.chains import ChainPrior
from iclens.predictors import reference_predictors

prior = ChainPrior(10)
chains = prior.sample(jax.random.key(0), 100_000)
states, _ = chains.sample(jax.random.key(1), 256, 128)
for predictor in reference_predictors(chains, prior).values():
    predictor(states).block_until_ready()
print(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
"""  # not ru_maxrss, which starts at the size of the process that started this one
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 2 * 2**20  # KiB


# Bad input


@pytest.mark.parametrize("state", [-1, 2])
@pytest.mark.parametrize("name", PREDICTORS)
def test_states_out_of_range_are_refused(name, state):
    predictor = reference_predictors(two_state(0.2, 0.3), ChainPrior(2))[name]
    message = f"state at position 2 of sequence 1: expected 0 to 1, got {state}"
    with pytest.raises(ValueError, match=re.escape(message)):
        predictor(jnp.array([[0, 1, 0], [0, 1, state]]))


@pytest.mark.parametrize(
    "context",
    [jnp.zeros(3, int), jnp.zeros((2, 3)), jnp.zeros((0, 3), int), jnp.zeros((3, 0), int)],
)
def test_contexts_of_the_wrong_kind_are_refused(context):
    with pytest.raises(ValueError, match=re.escape("expected integers (batch, position)")):
        check_states(context, 2)


@pytest.mark.parametrize("pseudo_count", [0.0, -1.0, np.nan, np.inf])
def test_bad_pseudo_counts_are_refused(pseudo_count):
    with pytest.raises(ValueError, match=f"expected a positive number, got {pseudo_count}"):
        generalising(3, points=1, pseudo_count=pseudo_count)


def test_chains_and_prior_must_agree(chains):
    with pytest.raises(ValueError, match="expected chains of 5 states, as the prior has, got 4"):
        reference_predictors(chains, ChainPrior(5))

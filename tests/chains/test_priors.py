"""Structured priors: their chains, and the references that know them."""

from __future__ import annotations

import itertools
import re

import equinox as eqx
import jax
import numpy as np
import pytest

from iclens.chains import ChainSet, DirichletRows, DoublyStochasticPrior, SparsePrior
from iclens.chains.fit import fit_dirichlet
from iclens.predictors import generalising, reference_predictors, uniform

KEY = jax.random.key(3)
PRIORS = {
    "blocks": DirichletRows.blocks(5, 2, outside=0.2),
    "cyclic": DirichletRows.cyclic(4),
    "sparse": SparsePrior(4, 2),
    "doubly stochastic": DoublyStochasticPrior(4, 3),
}
FAST = ("sparse", "doubly stochastic")
EXACT = [name for name in PRIORS if name != "doubly stochastic"]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name not in FAST)) for name in PRIORS],
)
def test_set_and_fresh_chains_are_alike_and_start_in_their_laws(name) -> None:
    prior, count = PRIORS[name], 4000
    chains = prior.sample(KEY, count)
    states, fresh = map(np.asarray, eqx.filter_jit(lambda key: prior.draw(key, count, 2))(KEY))
    np.testing.assert_allclose(fresh.sum(-1), 1, rtol=1e-5)
    both = np.stack([chains.transition, fresh.astype(float)])
    error = np.sqrt(2 * both.var(1).mean(0) / count)
    assert (abs(both[0].mean(0) - both[1].mean(0)) < 5 * error).all()
    np.testing.assert_allclose(both[0].var(0), both[1].var(0), atol=0.02)
    # P(x_0 = a, x_1 = b) = E[pi_a T_ab], of a law that other code computes from the same matrix.
    laws = ChainSet(fresh.astype(float)).stationary
    expected = laws[:, :, None] * fresh
    pairs = np.zeros_like(expected)
    pairs[np.arange(count), states[:, 0], states[:, 1]] = 1
    deviation = np.sqrt((expected * (1 - expected)).sum(0))
    assert (abs((pairs - expected).sum(0)) <= 5 * deviation).all()


@pytest.mark.slow
def test_the_structure_is_there() -> None:
    sparse = PRIORS["sparse"].sample(KEY, 500)
    assert ((sparse.transition > 0).sum(-1) == 2).all()
    pairs = {tuple(np.flatnonzero(row)) for row in sparse.transition[:, 0]}
    assert pairs == set(itertools.combinations(range(4), 2))
    mixed = PRIORS["doubly stochastic"].sample(KEY, 500)
    np.testing.assert_allclose(mixed.transition.sum(1), 1)
    np.testing.assert_allclose(mixed.stationary, 1 / 4)
    inside = DirichletRows.blocks(5, 2, outside=0.2).pseudo_counts == 1
    assert inside.astype(int).tolist() == np.kron(np.eye(2), np.ones((3, 3)))[:5, :5].tolist()
    drift = DirichletRows.cyclic(4).pseudo_counts
    assert np.argwhere(drift == 5).tolist() == [[0, 1], [1, 2], [2, 3], [3, 0]]


@pytest.mark.slow
def test_chains_of_several_closed_classes_are_few_and_drawn_again() -> None:
    # {a, b} and {c, d} are both closed for 3 of the splits, each of 4 rows with chance 1/6.
    rng = np.random.default_rng(0)
    chosen = rng.random((50_000, 4, 4)).argsort(-1).argsort(-1) < 2
    closed = sum(
        (~chosen[:, split][:, :, [s for s in range(4) if s not in split]]).all((1, 2))
        & (~chosen[:, [s for s in range(4) if s not in split]][:, :, split]).all((1, 2))
        for split in ([0, 1], [0, 2], [0, 3])
    )
    assert closed.mean() == pytest.approx(3 / 6**4, rel=0.4)
    SparsePrior(4, 2).sample(KEY, 4000)  # of which 9 would have been refused
    states, transition = SparsePrior(4, 2).draw(KEY, 4000, 3)
    assert np.isfinite(transition).all()
    taken = np.take_along_axis(np.asarray(transition), np.asarray(states)[:, :-1, None], axis=1)
    assert (np.take_along_axis(taken, np.asarray(states)[:, 1:, None], axis=2) > 0).all()


def posterior_row(prior, context, count) -> tuple[np.ndarray, np.ndarray]:
    """The mean of the current row given the transitions, by a large draw of chains; its error."""
    transition = prior.sample(jax.random.key(11), count).transition
    weights = transition[:, context[:-1], context[1:]].prod(-1)
    rows = transition[:, context[-1]]
    mean = weights @ rows / weights.sum()
    error = np.sqrt((weights**2) @ (rows - mean) ** 2) / weights.sum()
    return mean, error


CONTEXTS = [[0, 1, 0, 1, 0, 2, 0, 1, 0], [3, 3, 3, 0, 3], [2]]


@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT)
def test_2_gen_is_the_posterior_mean(name) -> None:
    prior = PRIORS[name]
    predictor = reference_predictors(None, prior)["2-Gen"]
    for context in CONTEXTS:
        mean, error = posterior_row(prior, context, 20_000)
        predicted = np.exp(np.asarray(predictor(np.array([context]))))[0, -1]
        # What is drawn again shifts the sparse priors' means by a part in a hundred at most.
        slack = 0.01 * mean if name == "sparse" else 0
        assert (abs(predicted - mean) < 5 * error + slack + 1e-6).all(), context


@pytest.mark.slow
def test_2_gen_is_near_the_posterior_mean_where_it_only_approximates() -> None:
    prior = PRIORS["doubly stochastic"]
    assert "only approximates" in prior.two_gen
    predictor = reference_predictors(None, prior)["2-Gen"]
    kl = []
    for context in np.asarray(prior.draw(jax.random.key(5), 30, 8)[0]):
        mean, _ = posterior_row(prior, context, 20_000)
        predicted = np.exp(np.asarray(predictor(context[None])))[0, -1]
        kl.append((mean * np.log(np.maximum(mean, 1e-12) / predicted)).sum())
    assert 0.02 < np.mean(kl) < 0.15  # nats: an approximation


@pytest.mark.slow
def test_moments_of_doubly_stochastic_rows_are_those_of_their_pseudo_counts() -> None:
    for prior in (DoublyStochasticPrior(4, 3), DoublyStochasticPrior(3, 2, 2.0)):
        row = prior.sample(KEY, 20_000).transition[:, 1]
        alpha = prior.pseudo_counts[1]
        mean = alpha / alpha.sum()
        np.testing.assert_allclose(row.mean(0), mean, atol=0.015)
        expected = (mean * (1 - mean)).sum() / (alpha.sum() + 1)
        assert row.var(0).sum() == pytest.approx(expected, rel=0.03)


def test_sparse_rows_are_as_enumeration_says() -> None:
    # alpha = 1 and 3 successors of 4: the integrals over each support are ratios of factorials.
    predictor = generalising(4, points=2, pseudo_count=1.0, successors=3)
    counts = np.array([2, 1, 0, 0])  # from state 0: to 0 twice, to 1 once; then at 0
    mean = np.zeros(4)
    supports = [s for s in itertools.combinations(range(4), 3) if {0, 1} <= set(s)]
    for support in supports:  # each is as likely, before and after
        for b in support:
            mean[b] += (counts[b] + 1) / (3 + 3) / len(supports)
    context = np.array([[0, 0, 0, 1, 2, 0]])
    np.testing.assert_allclose(np.exp(predictor(context))[0, -1], mean, rtol=1e-5)
    with_all = np.array([[0, 0, 1, 0, 2, 0, 3, 0]])
    assert np.isnan(predictor(with_all)[0, -1]).all()  # four successors: there is no such chain
    assert np.asarray(predictor(with_all)[0, -3])[3] == -np.inf  # with three the fourth is out


@pytest.mark.slow
def test_1_gen_has_the_moments_of_stationary_laws() -> None:
    prior = DirichletRows([[1.0, 2.0, 0.5], [0.5, 0.5, 0.5], [3.0, 1.0, 1.0]])
    pseudo = prior.one_point_pseudo_counts
    laws = prior.sample(KEY, 20_000).stationary
    mean = pseudo / pseudo.sum()
    np.testing.assert_allclose(laws.mean(0), mean, atol=0.01)
    expected = (mean * (1 - mean)).sum() / (pseudo.sum() + 1)
    assert laws.var(0).sum() == pytest.approx(expected, rel=0.05)
    predicted = reference_predictors(None, prior)["1-Gen"](np.array([[0, 0, 2]]))
    np.testing.assert_allclose(
        np.exp(predicted)[0, -1], (np.array([2, 0, 1]) + pseudo) / (3 + pseudo.sum()), rtol=1e-5
    )


def test_1_gen_is_uniform_where_every_law_is() -> None:
    predictor = reference_predictors(None, DoublyStochasticPrior(4))["1-Gen"]
    np.testing.assert_allclose(np.exp(predictor(np.array([[0, 0, 1]]))), 1 / 4, rtol=1e-6)
    with pytest.raises(ValueError, match="expected 0 to 3, got 4"):
        predictor(np.array([[4]]))
    assert uniform(3)(np.zeros((1, 2), int)).shape == (1, 2, 3)


def test_equal_pseudo_counts_are_the_usual_prior() -> None:
    context = np.random.default_rng(0).integers(0, 3, (4, 20))
    one, each = (
        generalising(3, points=2, pseudo_count=count)(context)
        for count in (0.7, np.full((3, 3), 0.7))
    )
    np.testing.assert_array_equal(one, each)


def test_a_fit_finds_the_pseudo_counts_of_many_chains_and_the_best_of_few() -> None:
    alpha = np.array([[0.5, 2.0, 1.0], [4.0, 0.3, 0.3], [1.0, 1.0, 6.0]])
    rng = np.random.default_rng(0)
    chains = np.stack([rng.dirichlet(row, 20_000) for row in alpha], axis=1)
    np.testing.assert_allclose(
        DirichletRows.fitted(ChainSet(chains)).pseudo_counts, alpha, rtol=0.05
    )
    few = chains[:5]
    found = fit_dirichlet(few)

    def log_likelihood(pseudo: np.ndarray) -> float:
        from scipy.stats import dirichlet

        return sum(
            dirichlet.logpdf(chain[a] / chain[a].sum(), pseudo[a])
            for chain in few
            for a in range(3)
        )

    best = log_likelihood(found)
    for _ in range(20):
        assert log_likelihood(found * np.exp(0.05 * rng.standard_normal((3, 3)))) < best


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: DirichletRows(np.ones((2, 3))), "expected pseudo-counts (state, state) of at"),
        (
            lambda: DirichletRows([[1, 1], [0, 1]]),
            "positive pseudo-count at row 1, column 0, got 0",
        ),
        (lambda: DirichletRows.blocks(4, 1), "expected 2 to 4 blocks, got 1"),
        (lambda: DirichletRows.blocks(4, 2, outside=0.0), "positive number as the concentration"),
        (lambda: DirichletRows.cyclic(1), "expected at least 2 states, got 1"),
        (lambda: SparsePrior(4, 1), "expected 2 to 4 successors, got 1"),
        (lambda: DoublyStochasticPrior(4, 1), "expected at least 2 permutations, got 1"),
        (lambda: SparsePrior(4).sample(KEY, 0), "expected at least 1 chain to draw, got 0"),
        (lambda: fit_dirichlet(np.full((1, 2, 2), 0.5)), "expected at least 2 chains, got 1"),
        (
            lambda: fit_dirichlet(np.full((3, 2, 2), 0.5)),
            "row 0 is nearly the same in all 3 chains",
        ),
        (
            lambda: fit_dirichlet(np.array([np.eye(2), np.full((2, 2), 0.5)])),
            "got 0 at row 0, column 1 of chain 0",
        ),
        (
            lambda: generalising(3, points=1, pseudo_count=np.ones((3, 3))),
            "expected one, or one for each of 3 states, got shape (3, 3)",
        ),
        (
            lambda: generalising(3, points=2, pseudo_count=1.0, successors=4),
            "successors: expected 1 to 3, got 4",
        ),
    ],
)
def test_what_is_out_of_range_is_refused(build, message) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        build()

"""Of which order sequences are: counts of words of two and three states, and tests on them.

With n successive pairs or triples of a group, likelihood ratios of nested models are, where each
context was seen often, distributed as chi-square (Bartlett 1951, Anderson and Goodman 1957):

    first against zeroth order    G = 2 sum_ab n_ab log(n_ab n / (n_a. n_.b))
    second against first order    G = 2 sum_abc n_abc log(n_abc n_.b. / (n_ab. n_.bc))

with as many degrees of freedom as the larger model has parameters more, for what was seen.  BIC is
-2 log L + (parameters) log n of each order on the same triples (Katz 1981); the least is the best.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import chdtrc, xlogy

CHUNK = 2**20
"""Rows that are worked on together."""
DENSE = 2**25
"""Possible triples up to which they are counted in a table of all, if rows are not far fewer."""


@dataclass(frozen=True)
class Test:
    """A likelihood ratio test; `p` is None where nothing was seen that could tell."""

    __test__ = False  # not one of pytest's

    statistic: float
    """G, twice the logarithm of the likelihood ratio."""
    degrees: int
    p: float | None

    @classmethod
    def of(cls, statistic: Any, degrees: Any) -> Test:
        statistic = max(0.0, float(statistic))  # rounding
        p = float(chdtrc(degrees, statistic)) if degrees > 0 else None
        return cls(statistic, int(degrees), p)


@dataclass(frozen=True)
class Orders:
    """Which order fits a group, or all of them, each with parameters of its own."""

    first: Test
    """First order against zeroth."""
    second: Test
    """Second order against first."""
    bic: tuple[float, float, float]
    """Of orders 0, 1 and 2."""

    @property
    def best(self) -> int | None:
        """The order of least BIC; None where nothing was seen that could tell."""
        return int(np.argmin(self.bic)) if any(self.bic) else None


@dataclass(frozen=True)
class Counts:
    """What was counted in each group."""

    pairs: np.ndarray
    """(group, state, next)."""
    triple: np.ndarray
    """Triples that occur, as numbers ((group C + a) C + b) C + c."""
    triples: np.ndarray
    """How often each of them occurs."""
    sequences: np.ndarray
    """Unbroken sequences (group,)."""
    single: np.ndarray
    """Those of them that are of a single state."""
    gaps: np.ndarray

    @property
    def states(self) -> int:
        return int(self.pairs.shape[-1])


def count_words(
    group: np.ndarray, order: np.ndarray, state: np.ndarray, groups: int, states: int
) -> Counts:
    """Count pairs and triples of rows that are sorted by group and order."""
    pairs = np.zeros(groups * states**2, np.int64)
    dense = groups * states**3 <= min(DENSE, max(2**16, 4 * len(group)))
    table = np.zeros(groups * states**3 if dense else 0, np.int64)
    sparse: list[np.ndarray] = []
    sequences = np.zeros(groups, np.int64)
    single, gaps = np.zeros_like(sequences), np.zeros_like(sequences)
    for first in range(0, len(group), CHUNK):
        # With two rows before and one after, which tell where sequences begin and end.
        low, high = max(0, first - 2), min(len(group), first + CHUNK + 1)
        own = slice(first - low, min(first + CHUNK, len(group)) - low)
        g, o = group[low:high].astype(np.int64), order[low:high]
        s = state[low:high].astype(np.int64)
        same = np.concatenate([[False], g[1:] == g[:-1]])
        follows = same & np.concatenate([[False], o[1:] == o[:-1] + 1])
        goes_on = np.concatenate([follows[1:], [False]])
        begins = ~follows[own]
        sequences += np.bincount(g[own], begins, groups).astype(np.int64)
        single += np.bincount(g[own], begins & ~goes_on[own], groups).astype(np.int64)
        gaps += np.bincount(g[own], (same & ~follows)[own], groups).astype(np.int64)
        at = np.flatnonzero(follows)
        at = at[(at >= own.start) & (at < own.stop)]
        word = (g[at] * states + s[at - 1]) * states + s[at]
        pairs += np.bincount(word, minlength=len(pairs))
        at = at[follows[at - 1]]
        word = ((g[at] * states + s[at - 2]) * states + s[at - 1]) * states + s[at]
        if dense:
            table += np.bincount(word, minlength=len(table))
        else:
            sparse.append(np.stack(np.unique(word, return_counts=True)))
    if dense:
        triple = np.flatnonzero(table)
        triples = table[triple]
    else:
        found, weights = np.concatenate(sparse, axis=1)
        triple, triples = _sum_by(found, weights)
    return Counts(pairs.reshape(groups, states, states), triple, triples, sequences, single, gaps)


def order_tests(counts: Counts, kept: np.ndarray) -> tuple[list[Orders], Orders]:
    """The tests of the groups `kept`, and of all of them together."""
    size, number = counts.states, len(counts.pairs)
    pairs = counts.pairs
    first = 2 * (
        xlogy(pairs, pairs).sum((1, 2))
        - _self_log(pairs.sum(2)).sum(1)
        - _self_log(pairs.sum(1)).sum(1)
        + _self_log(pairs.sum((1, 2)))
    )
    free_first = (_some(pairs.sum(2)).sum(1) - 1) * (_some(pairs.sum(1)).sum(1) - 1)

    def per_group(codes: np.ndarray, values: np.ndarray, digits: int) -> np.ndarray:
        return np.bincount(codes // size**digits, values, number)

    abc, n = counts.triple, counts.triples
    group, a, b, c = abc // size**3, abc // size**2 % size, abc // size % size, abc % size
    codes = {  # with the numbers of states of a word after that of the group
        "abc": (abc, 3),
        "ab": (abc // size, 2),
        "bc": ((group * size + b) * size + c, 2),
        "b": (group * size + b, 1),
        "c": (group * size + c, 1),
        "": (group, 0),
    }
    found = {name: (*_sum_by(code, n), digits) for name, (code, digits) in codes.items()}
    terms = {
        name: per_group(code, _self_log(values), digits)
        for name, (code, values, digits) in found.items()
    }
    second = 2 * (terms["abc"] - terms["ab"] - terms["bc"] + terms["b"])
    # For each middle state: how many came before it, and how many after.
    pairs_before = np.unique((group * size + b) * size + a) // size
    pairs_after = found["bc"][0] // size
    before, after = (np.bincount(p, minlength=number * size) for p in (pairs_before, pairs_after))
    free = np.maximum(before - 1, 0) * np.maximum(after - 1, 0)
    free_second = free.reshape(number, size).sum(1)

    likelihood = np.stack(
        [terms["c"] - terms[""], terms["bc"] - terms["b"], terms["abc"] - terms["ab"]]
    )
    contexts = np.stack(
        [
            np.ones(number),
            *(per_group(found[n][0], np.ones_like(found[n][1]), found[n][2]) for n in ("b", "ab")),
        ]
    )
    outcomes = per_group(found["c"][0], np.ones_like(found["c"][1]), 1)
    parameters = contexts * np.maximum(outcomes - 1, 0)
    total = np.bincount(group, n, number)
    bic = -2 * likelihood + parameters * np.log(np.maximum(total, 1))

    def orders(g1: Any, d1: Any, g2: Any, d2: Any, criterion: np.ndarray) -> Orders:
        zero, one, two = criterion.tolist()
        return Orders(Test.of(g1, d1), Test.of(g2, d2), (zero, one, two))

    each = [
        orders(first[k], max(0, free_first[k]), second[k], free_second[k], bic[:, k]) for k in kept
    ]
    together = -2 * likelihood[:, kept].sum(1) + parameters[:, kept].sum(1) * np.log(
        max(total[kept].sum(), 1)
    )
    pooled = orders(
        first[kept].sum(),
        np.maximum(free_first[kept], 0).sum(),
        second[kept].sum(),
        free_second[kept].sum(),
        together,
    )
    return each, pooled


def same_chain(pairs: np.ndarray) -> Test:
    """One first-order chain for all groups against one for each, from counts (group, a, b)."""
    whole = pairs.sum(0)
    rows, all_rows = pairs.sum(2), whole.sum(1)
    apart = _self_log(pairs).sum() - _self_log(rows).sum()
    together = _self_log(whole).sum() - _self_log(all_rows).sum()
    free = np.maximum(_some(rows).sum(0) - 1, 0) * np.maximum(_some(whole).sum(1) - 1, 0)
    return Test.of(2 * (apart - together), free.sum())


def _self_log(values: np.ndarray) -> np.ndarray:
    return np.asarray(xlogy(values, values))


def _some(values: np.ndarray) -> np.ndarray:
    return np.asarray(values > 0)


def _sum_by(codes: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The codes that occur, and the sum of the values of each."""
    found, place = np.unique(codes, return_inverse=True)
    return found, np.bincount(place, values, len(found)).astype(np.int64)

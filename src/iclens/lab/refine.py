"""Which K to train next, where a sweep looks for its thresholds instead of running a whole grid."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

from iclens.lab.recipe import Diversity
from iclens.phases import PhaseMap, float_diversity


def next_chains(
    known: Iterable[Diversity], found: PhaseMap, grid: Sequence[Diversity], ratio: float
) -> list[Diversity]:
    """The K that narrow the brackets of K1* and K2*: one for each that is too wide, or none.

    `known` are the K that were trained and `found` is their phase map.  A bracket is halved by the
    values of the grid that lie in it, from its middle, then by K between its neighbours, until none
    of these are more than a factor `ratio` apart.
    """
    tried = set(known)
    ordered = sorted(grid, key=float_diversity)
    if not tried:
        return [ordered[len(ordered) // 2]]
    wanted: list[Diversity] = []
    for threshold in found.thresholds.values():
        low, high = threshold["bracket"] or (None, None)
        bottom = 0.0 if low is None else float_diversity(low)
        top = math.inf if high is None else float_diversity(high)
        inside = [
            chains
            for chains in ordered
            if bottom <= float_diversity(chains) <= top and chains not in tried
        ]
        if inside:
            wanted.append(inside[len(inside) // 2])
        elif low is not None and high is not None:
            wanted += _between(sorted(tried, key=float_diversity), bottom, top, ratio)
    return list(dict.fromkeys(chains for chains in wanted if chains not in tried))


def _between(tried: list[Diversity], bottom: float, top: float, ratio: float) -> list[Diversity]:
    """A whole number in the widest gap of a bracket, its geometric mean; none if it is narrow."""
    stretch = [c for c in tried if c != "infinite" and bottom <= c <= top]
    gaps = list(pairwise(stretch))
    if not gaps:
        return []
    low, high = max(gaps, key=lambda gap: gap[1] / gap[0])
    middle = min(max(round(math.sqrt(low * high)), low + 1), high - 1)
    return [middle] if high / low > ratio and low < middle < high else []

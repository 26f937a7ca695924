"""Which cells to train next, where a sweep looks for its thresholds instead of running a grid."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

from iclens.lab.recipe import Diversity
from iclens.phases import BEYOND, PhaseMap, float_diversity

Place = tuple[Diversity, int]
"""K and seed of a cell."""


def next_cells(
    tried: Iterable[Place],
    found: PhaseMap,
    grid: Sequence[Diversity],
    seeds: Sequence[int],
    ratio: float,
) -> list[Place]:
    """The cells that narrow the thresholds of each seed; none if they are narrow enough.

    `tried` are the cells that were trained, whatever came of them, and `found` is their phase map.
    A threshold of a seed lies between neighbours of different outcome: the gap between them is
    halved by the values of the grid in it, from the middle, then by whole numbers, until its ends
    are at most a factor `ratio` apart.  While all outcomes are alike the grid is halved towards the
    other side.
    """
    before = set(tried)
    wanted: list[Place] = []
    for seed in seeds:
        known = {float_diversity(chains) for chains, other in before if other == seed}
        for threshold in BEYOND:
            row = [(float_diversity(c), beyond) for c, beyond in found.outcomes(threshold, seed)]
            gaps = [(low, high) for (low, one), (high, other) in pairwise(row) if one != other]
            if not gaps:
                beyond = bool(row) and row[0][1]
                gaps = [(0.0, row[0][0]) if beyond else (row[-1][0] if row else 0.0, math.inf)]
            for low, high in gaps:
                chains = _between(low, high, grid, known, ratio)
                wanted += [] if chains is None else [(chains, seed)]
    return list(dict.fromkeys(wanted))


def _between(
    low: float, high: float, grid: Sequence[Diversity], known: set[float], ratio: float
) -> Diversity | None:
    """The K that halves a gap, whose ends are 0 and infinity where it has none."""
    inside = sorted(
        (c for c in grid if low < float_diversity(c) <= high and float_diversity(c) not in known),
        key=float_diversity,
    )
    if inside:
        return inside[len(inside) // 2]
    if low == 0 or math.isinf(high) or high / low <= ratio:
        return None
    middle = min(max(round(math.sqrt(low * high)), int(low) + 1), int(high) - 1)
    return middle if middle not in known and low < middle < high else None

"""What the results of the theory say of the paper's claims: a sentence and a verdict of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import combinations
from typing import Literal

import numpy as np
import xarray as xr

from iclens.report.theory import RACE_CRITERIA, describe_interval

Verdict = Literal["agrees", "disagrees", "open", "not measured"]
LAW, GAMMA = "N / ln N", 2.0
"""What the paper finds for the time to 2-Gen, and for the exponent of the switching times."""
SURE, POSSIBLE = 0.9, 0.05
"""Akaike weights beyond which a law counts as shown, and as not excluded."""


def counted(number: int, thing: str) -> str:
    """A number of things, in words."""
    return f"{number:,} {thing}{'s' * (number != 1)}"


def _switching(table: xr.Dataset) -> tuple[str, Verdict]:
    (k2, k2_low, k2_high), (gamma, low, high) = table.fit.values[:, :3].tolist()
    censored = int(np.isinf(table.time.values).sum())
    shows = (
        f"gamma = {describe_interval(gamma, low, high)}, "
        f"K2* = {describe_interval(k2, k2_low, k2_high)}; {censored} of {table.sizes['run']} cells "
        "had not turned by the end."
    )
    if low > GAMMA or high < GAMMA:
        return shows, "disagrees"
    # An interval that holds the half and the double as well tells nothing.
    return shows, "agrees" if low > GAMMA / 2 and high < 2 * GAMMA else "open"


def _race(result: xr.Dataset) -> tuple[str, Verdict]:
    told, verdicts = [], []
    observed = _threshold_of(result, "observed")
    for name in RACE_CRITERIA:
        here = _threshold_of(result, name)
        text = here if isinstance(here, str) else describe_interval(*here)
        if name == "observed":
            told.append(f"K1* of the whole model: {text}")
            continue
        right = int((result[f"visits: {name}"] == result["visits: observed"]).sum())
        told.append(
            f"predicted by {name}: {text}, right for {right} of {result.sizes['run']} models"
        )
        verdicts.append(_meet(here, observed))
    shows = "; ".join(told) + "."
    # The circuits race if one way of timing them foretells K1*.
    for verdict in ("agrees", "open"):
        if verdict in verdicts:
            return shows, verdict
    return shows, "disagrees"


def _threshold_of(result: xr.Dataset, criterion: str) -> str | tuple[float, float, float]:
    """K1* with its interval, or why there is none."""
    found = result.attrs.get(f"K1* {criterion}", "unknown")
    if isinstance(found, str):
        return found
    value, low, high = (float(part) for part in found)
    return value, low, high


def _meet(
    one: str | tuple[float, float, float], other: str | tuple[float, float, float]
) -> Verdict:
    """Whether two intervals overlap; an open end, or a value that is not there, leaves it open."""
    if isinstance(one, str) or isinstance(other, str):
        return "open"
    ends = [*one[1:], *other[1:]]
    low = max(-math.inf if math.isnan(end) else end for end in ends[::2])
    high = min(math.inf if math.isnan(end) else end for end in ends[1::2])
    if low > high:
        return "disagrees"
    return "agrees" if np.isfinite(ends).all() else "open"


def _growth(table: xr.Dataset) -> tuple[str, Verdict]:
    """By the Akaike weights of the laws, with or without a delay, whichever does better."""
    families = {
        prefix: float(table[f"{prefix}aic"].values.min())
        for prefix in ("", "delayed_")
        if f"{prefix}aic" in table
    }
    family = min(families, key=lambda prefix: families[prefix])
    laws = table.law.values.tolist()
    ours = laws.index(LAW)
    told = []
    for prefix in families:
        weights = table[f"{prefix}weight"].values
        best = int(weights.argmax())
        text = f"{'with' if prefix else 'without'} a delay {laws[best]} (weight {weights[best]:.2g}"
        told.append(text + (")" if best == ours else f"; {LAW}: {weights[ours]:.2g})"))
    a, error, delay, weight = (
        float(table[f"{family}{part}"].values[ours]) for part in ("a", "error", "delay", "weight")
    )
    contexts = table.context.values
    start = f"{delay:.3g} + " if family else ""
    shows = (
        f"{counted(len(contexts), 'time')} at N = {contexts.min()} to {contexts.max()}. Best of "
        f"{len(laws)} laws: {', '.join(told)}. Here {start}{a:.3g} ± {error:.2g} {LAW}."
    )
    if "counts" in table:
        late, lost = table.counts.sum("study").values[1:].tolist()
        if late or lost:
            shows += f" Left out: {late} models that came too late, {lost} lost."
    if weight > SURE and a > 2 * error:
        return shows, "agrees"
    return shows, "disagrees" if weight < POSSIBLE else "open"


def _memory(result: xr.Dataset) -> tuple[str, Verdict]:
    told = []
    rises, falls = [], 0
    for axis, symbol in (("width", "d"), ("hidden", "F")):
        rise = fall = undecided = 0
        for (low, high), (next_low, next_high) in _brackets_along(result, axis):
            if high <= next_low:
                rise += 1
            elif next_high <= low:
                fall += 1
            else:
                undecided += 1
        rises.append(rise)
        falls += fall
        told.append(
            f"with {symbol} it rises in {rise} of {counted(rise + fall + undecided, 'pair')} and "
            f"falls in {fall}"
        )
    known = np.isfinite(result.K2.values).any(0)
    shows = (
        f"K2* is bracketed at {known.sum()} of {known.size} pairs of d and F, after "
        f"{int(result.attrs['steps']):,} steps. Between two of them, {', '.join(told)}; in the "
        "others the brackets overlap."
    )
    if falls:
        return shows, "disagrees"
    return shows, "agrees" if all(rises) else "open"


def _brackets_along(
    result: xr.Dataset, axis: str
) -> Iterator[tuple[tuple[float, float], tuple[float, float]]]:
    """Brackets of K2* at a smaller and a larger size, all else equal; open ends are infinite."""
    table = result.K2.transpose(axis, ..., "end").sortby(axis).values
    for low_row, high_row in combinations(table, 2):
        for pair in zip(low_row.tolist(), high_row.tolist(), strict=True):
            if all(np.isfinite(bracket).any() for bracket in pair):
                (a, b), (c, d) = (
                    (
                        -math.inf if math.isnan(low) else low,
                        math.inf if math.isnan(high) else high,
                    )
                    for low, high in pair
                )
                yield (a, b), (c, d)


Judge = Callable[[xr.Dataset], tuple[str, Verdict]]
JUDGED: dict[str, tuple[str, Judge]] = {
    "switching": (
        "The steps from G2 to M2 diverge as (K2* - K)^-gamma with gamma = 2.",
        _switching,
    ),
    "race": (
        "K1* is a race: below it the recognition circuit is learned before the induction head "
        "has formed.",
        _race,
    ),
    "growth": (f"Reduced model: the time to 2-Gen grows with the context as {LAW}.", _growth),
    "context": (f"Transformer: the time to 2-Gen grows with the context as {LAW}.", _growth),
    "memory": (
        "K2* is a limit of capacity: it grows with the width d of the task vector and with "
        "that of the decoder, F.",
        _memory,
    ),
}
"""A claim of the paper, and what judges it, by the name of the result."""

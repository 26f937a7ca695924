"""What is said of chains that were estimated from sequences."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from iclens.chains.orders import Orders, Test

SHOWN = 30
"""Groups that are printed; JSON has all of them."""
_UNKNOWN = "nothing to tell by"


@dataclass(frozen=True)
class GroupReport:
    """One group, whose chain was estimated."""

    name: str
    rows: int
    sequences: int
    """Unbroken sequences."""
    gaps: int
    """Places where the order leaves out a number."""
    counts: list[list[int]]
    """`counts[a][b]`, how often b followed a."""
    never_seen: list[str]
    """States that do not occur."""
    orders: Orders

    @property
    def transitions(self) -> int:
        return sum(map(sum, self.counts))


@dataclass(frozen=True)
class SequenceReport:
    """All groups; print it to read it."""

    states: list[str]
    """Names of the states, in the order of their numbers."""
    smoothing: float
    rows: int
    single: int
    """Unbroken sequences of a single state, which have no transition."""
    left_out: list[str]
    """Groups without a transition, which have no chain."""
    groups: list[GroupReport]
    """In the order of the chains."""
    pooled: Orders
    """All groups together, each with a chain of its own."""
    same_chain: Test
    """One chain for all groups against one for each."""

    def to_json(self) -> dict[str, Any]:
        """Everything as plain data."""
        plain = dataclasses.asdict(self)
        for orders, found in (
            (self.pooled, plain["pooled"]),
            *((one.orders, other["orders"]) for one, other in zip(self.groups, plain["groups"])),  # noqa: B905
        ):
            found["best"] = orders.best
        return plain

    def __str__(self) -> str:
        transitions = sum(group.transitions for group in self.groups)
        sequences = sum(group.sequences for group in self.groups)
        gaps = sum(group.gaps for group in self.groups)
        lines = [
            f"{_counted(len(self.groups), 'chain')} of {len(self.states)} states from "
            f"{_counted(self.rows, 'row')}, smoothing {self.smoothing:g}",
            "states: " + ", ".join(f"{place} = {name}" for place, name in enumerate(self.states)),
            f"{_counted(transitions, 'transition')} in {_counted(sequences, 'unbroken sequence')}, "
            f"{_counted(gaps, 'gap')}, {self.single} of a single state",
        ]
        if self.left_out:
            lines.append(f"left out for want of a transition: {_listed(self.left_out)}")
        for state in self.states:
            without = [group.name for group in self.groups if state in group.never_seen]
            if without:
                lines.append(f"state {state} is never seen in {_listed(without)}")
        width = max(len("all groups"), *(len(group.name) for group in self.groups[:SHOWN]))
        lines.append(
            f"{'group':{width}} {'transitions':>11}  {'1st against 0th order':28}  "
            f"{'2nd against 1st order':28}  best by BIC"
        )
        lines += [
            _row(group.name, width, group.transitions, group.orders)
            for group in self.groups[:SHOWN]
        ]
        if len(self.groups) > SHOWN:
            lines.append(f"... and {len(self.groups) - SHOWN} more")
        lines.append(_row("all groups", width, transitions, self.pooled))
        if len(self.groups) > 1:
            lines.append(f"one chain for each group against one for all: {_test(self.same_chain)}")
        return "\n".join(lines)


def _row(name: str, width: int, transitions: int, orders: Orders) -> str:
    return (
        f"{name:{width}} {transitions:>11,}  {_test(orders.first):28}  {_test(orders.second):28}  "
        + (_UNKNOWN if orders.best is None else f"order {orders.best}")
    )


def _test(test: Test) -> str:
    if test.p is None:
        return _UNKNOWN
    p = "p < 1e-15" if test.p < 1e-15 else f"p = {test.p:.2g}"
    return f"G = {test.statistic:.1f}, df {test.degrees}, {p}"


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' * (count != 1)}"


def _listed(names: list[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more

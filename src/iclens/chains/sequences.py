"""Chains estimated from sequences of states, one for each group, and what can be said of them."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from iclens.chains.files import MOST_ENTRIES, MOST_STATES, in_order, labels_of, read_table
from iclens.chains.orders import Counts, count_words, order_tests, same_chain
from iclens.chains.report import GroupReport, SequenceReport
from iclens.chains.sets import ChainSet

COLUMNS = ("group", "order", "state")
LARGEST_SMOOTHING = 1e12
FARTHEST = 2**62
"""Largest order, so that differences of two are exact."""


def estimate_chains(source: Any, *, smoothing: float = 1.0) -> tuple[ChainSet, SequenceReport]:
    """One chain for each group of sequences, T[a, b] = (c_ab + alpha) / (c_a. + C alpha).

    `source` is a CSV file in UTF-8 or a table, with columns called `group`, `order` and `state`
    (others are not looked at), or a list of sequences, each a group of its own.  `order` is a whole
    number; rows may come in any order of their own.  Where it leaves out a number, a sequence ends
    and another one begins: no transition is counted across the gap.  `smoothing` is alpha, the
    pseudo-count of every transition.

    Chains are those of the groups, states the names that occur in any of them, both in alphabetical
    order, or by value where all names are whole numbers; states that are called 0 to C - 1 have no
    labels.  A group without a transition is left out, as the report says.

    16 bytes a row are kept, and at the peak, where a file that is not in order is sorted, 42: 10^7
    such rows took 570 MiB, 170 of which are Python and its libraries.

    Raises `OSError` if the file cannot be read, and `ValueError`, naming the line or row, for a
    table without these columns, an order that is no whole number, an order that a group has twice,
    a row without group or state, fewer than two states, no transition at all, more than 2^25
    probabilities, and a row of a chain without a count where `smoothing` is 0.
    """
    if not 0 <= smoothing <= LARGEST_SMOOTHING:
        raise ValueError(
            f"smoothing: expected a number from 0 to {LARGEST_SMOOTHING:g}, got {smoothing}"
        )
    if isinstance(source, (str, Path)):
        try:
            return _estimate(_read_file(Path(source)), smoothing)
        except ValueError as error:
            raise ValueError(f"sequences {str(source)!r}: {error}") from None
    table = _read_columns(source) if hasattr(source, "keys") else _read_lists(source)
    return _estimate(table, smoothing)


@dataclass
class _Table:
    """Rows as numbers: the group and the state of each by their place among the names."""

    groups: list[str]
    states: list[str]
    group: np.ndarray
    order: np.ndarray
    state: np.ndarray
    path: Path | None = None

    def place(self, row: int) -> str:
        """Where a row is: its line in the file, which is read again to find it."""
        if self.path is None or not self.path.is_file():  # a pipe is read once
            return f"row {row}"
        return f"line {next(islice(read_table(self.path, COLUMNS), row + 1, None))[0]}"

    def sort(self) -> None:
        """Sort by group and order.  Raises `ValueError` where a group has an order twice."""
        group, order = self.group, self.order
        ahead = (group[1:] > group[:-1]) | ((group[1:] == group[:-1]) & (order[1:] > order[:-1]))
        if ahead.all():
            return
        rows = np.lexsort((order, group))
        self.group, self.order, self.state = group[rows], order[rows], self.state[rows]
        twice = (self.group[1:] == self.group[:-1]) & (self.order[1:] == self.order[:-1])
        if twice.any():
            at = int(twice.argmax())
            one, other = sorted((int(rows[at]), int(rows[at + 1])))
            raise ValueError(
                f"{self.place(other)}: group {self.groups[self.group[at]]!r} has order "
                f"{self.order[at]} twice, first at {self.place(one)}"
            )


class _Coder:
    """Numbers names as they come."""

    def __init__(self) -> None:
        self.names: dict[str, int] = {}
        self.codes = array("i")

    def finish(self) -> tuple[list[str], np.ndarray]:
        """The names in order, and the place of each that came among them."""
        ordered = in_order(self.names)
        places = np.empty(len(ordered), np.int32)
        places[[self.names[name] for name in ordered]] = np.arange(len(ordered), dtype=np.int32)
        return ordered, places[np.frombuffer(self.codes, np.int32)]


def _coded(rows: Iterable[tuple[object, Any, int, Any]], path: Path | None = None) -> _Table:
    """A table from rows of a place, group, order and state."""
    groups, states, orders = _Coder(), _Coder(), array("q")
    group_names, state_names = groups.names, states.names
    for row, group, order, state in rows:
        if group is None or group == "" or group != group:
            raise ValueError(f"{row}: expected a group, got {group!r}")
        if state is None or state == "" or state != state:
            raise ValueError(f"{row}: expected a state, got {state!r}")
        if not -FARTHEST < order < FARTHEST:
            raise ValueError(f"{row}: expected an order within 2^62, got {order}")
        groups.codes.append(group_names.setdefault(str(group), len(group_names)))
        states.codes.append(state_names.setdefault(str(state), len(state_names)))
        orders.append(order)
        if len(state_names) > MOST_STATES:
            raise ValueError(
                f"{row}: expected at most {MOST_STATES} different states, got another one, "
                f"{str(state)[:40]!r}"
            )
    if not orders:
        raise ValueError("expected at least one row, got none")
    (group_list, group_codes), (state_list, state_codes) = groups.finish(), states.finish()
    ordered = np.frombuffer(orders, np.int64)
    return _Table(group_list, state_list, group_codes, ordered, state_codes, path)


def _read_file(path: Path) -> _Table:
    def rows() -> Iterator[tuple[object, Any, int, Any]]:
        for line, (group, order, state) in islice(read_table(path, COLUMNS), 1, None):
            try:
                number = int((order or "").replace("_", "?"))
            except ValueError:
                raise ValueError(
                    f"line {line}: expected a whole number in column order, got {order!r}"
                ) from None
            yield _Line(line), group, number, state

    return _coded(rows(), path)


class _Line(int):
    """The number of a line, which is a text only where it is told."""

    def __str__(self) -> str:
        return f"line {int(self)}"

    def __format__(self, spec: str) -> str:
        return str(self)


def _read_columns(source: Any) -> _Table:
    names = [str(name) for name in source.keys()]  # noqa: SIM118 - a data frame iterates so
    if missing := [name for name in COLUMNS if name not in names]:
        raise ValueError(
            f"expected columns {', '.join(COLUMNS)}, got {', '.join(names)[:80]!r}, without "
            f"{missing[0]}"
        )
    group, order, state = (np.atleast_1d(np.asarray(source[name])).tolist() for name in COLUMNS)
    if not len(group) == len(order) == len(state):
        raise ValueError(
            f"expected columns of one length, got {len(group)}, {len(order)} and {len(state)} rows"
        )
    if wrong := [row for row, number in enumerate(order) if type(number) is not int]:
        raise ValueError(
            f"row {wrong[0]}: expected a whole number in column order, got {order[wrong[0]]!r}"
        )
    return _coded(
        (f"row {row}", *values) for row, values in enumerate(zip(group, order, state, strict=True))
    )


def _read_lists(source: Any) -> _Table:
    return _coded(
        (f"position {place} of sequence {number}", number, place, state)
        for number, sequence in enumerate(source)
        for place, state in enumerate(
            sequence.tolist() if isinstance(sequence, np.ndarray) else sequence
        )
    )


def _estimate(table: _Table, smoothing: float) -> tuple[ChainSet, SequenceReport]:
    count, states = len(table.groups), len(table.states)
    if states < 2:
        raise ValueError(f"expected at least 2 different states, got only {table.states[0]!r}")
    if count * states**2 > MOST_ENTRIES:
        raise ValueError(
            f"{count} groups of {states} states are more than {MOST_ENTRIES} probabilities"
        )
    table.sort()
    counts = count_words(table.group, table.order, table.state, count, states)
    transitions = counts.pairs.sum((1, 2))
    kept = np.flatnonzero(transitions)
    if not len(kept):
        raise ValueError(
            "expected at least one transition, got none: no group has two successive orders"
        )
    chosen = counts.pairs[kept]
    if smoothing == 0 and (empty := chosen.sum(-1) == 0).any():
        which, state = np.argwhere(empty)[0].tolist()
        raise ValueError(
            f"state {table.states[state]!r} is never left in group "
            f"{table.groups[kept[which]]!r}: expected smoothing above 0, got 0"
        )
    smoothed = chosen + smoothing
    chains = ChainSet(smoothed / smoothed.sum(-1, keepdims=True), labels=labels_of(table.states))
    return chains, _report(table, counts, kept, smoothing)


def _report(table: _Table, counts: Counts, kept: np.ndarray, smoothing: float) -> SequenceReport:
    size = len(table.states)
    seen = np.zeros((len(table.groups), size), bool)
    seen[table.group, table.state] = True
    rows = np.bincount(table.group, minlength=len(table.groups))
    by_group, pooled = order_tests(counts, kept)
    groups = [
        GroupReport(
            name=table.groups[place],
            rows=int(rows[place]),
            sequences=int(counts.sequences[place]),
            gaps=int(counts.gaps[place]),
            counts=counts.pairs[place].astype(int).tolist(),
            never_seen=[table.states[state] for state in np.flatnonzero(~seen[place])],
            orders=orders,
        )
        for place, orders in zip(kept.tolist(), by_group, strict=True)
    ]
    return SequenceReport(
        states=table.states,
        smoothing=smoothing,
        rows=int(rows.sum()),
        single=int(counts.single.sum()),
        left_out=[table.groups[place] for place in np.flatnonzero(counts.pairs.sum((1, 2)) == 0)],
        groups=groups,
        pooled=pooled,
        same_chain=same_chain(counts.pairs[kept]),
    )

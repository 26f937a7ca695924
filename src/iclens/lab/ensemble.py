"""Ensembles: cells trained in one program, saved as cells that were trained alone are."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import numpy as np

from iclens.chains import ChainSet
from iclens.lab.cell import Cell, begin, finish, save_snapshot
from iclens.lab.work import Event, Teller, keep_error, prepare
from iclens.training import train_ensemble

GPU_MEMBERS = 64
"""Members that are trained together on a GPU."""


def default_members() -> int:
    """Members of an ensemble: on a CPU, where cells are better trained in processes, one."""
    return 1 if jax.default_backend() == "cpu" else GPU_MEMBERS


def run_ensembles(
    cells: Sequence[Cell], members: int, tell: Callable[[Event], None]
) -> dict[str, str]:
    """Do cells, up to `members` of them in one program; returns why those failed that did.

    In one program are cells that stand at the same step, of finitely many chains or of fresh ones:
    sets of fewer chains are filled up with chains that are never drawn.
    """
    failed: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        held = []
        for cell in cells:
            told = Teller(cell.name, tell)
            found = stack.enter_context(prepare(replace(cell), told))
            if found is None:
                tell(Event(cell.name, "done"))
            else:
                held.append((found, told))
        for group in _groups(held, members):
            failed |= _run_group(group, tell)
    return failed


def _groups(
    held: list[tuple[Cell, Teller]], members: int
) -> Iterable[list[tuple[Cell, Teller, Any]]]:
    ready: dict[tuple[bool, int], list[tuple[Cell, Teller, Any]]] = {}
    for cell, told in held:
        state = begin(cell)
        alike = cell.chains == "infinite", int(state.step)
        ready.setdefault(alike, []).append((cell, told, state))
    for group in ready.values():
        for first in range(0, len(group), members):
            yield group[first : first + members]


def _run_group(
    group: list[tuple[Cell, Teller, Any]], tell: Callable[[Event], None]
) -> dict[str, str]:
    failed: dict[str, str] = {}

    def fail(cell: Cell) -> None:
        failed[cell.name] = traceback.format_exc()
        keep_error(cell, failed[cell.name])
        tell(Event(cell.name, "fail", detail=failed[cell.name]))

    def on_steps(done: int) -> None:
        for _, told, _ in group:
            told.steps(done)

    most = max(getattr(cell.source, "count", 0) for cell, _, _ in group)
    snapshots = train_ensemble(
        [state for _, _, state in group],
        [padded(cell.source, most) for cell, _, _ in group],
        group[0][0].recipe.train,
        keys=[cell.key("batches") for cell, _, _ in group],
        on_steps=on_steps,
    )
    for point in snapshots:
        for (cell, told, _), snapshot in zip(group, point, strict=True):
            if snapshot is not None and cell.name not in failed:
                try:
                    told.phase(snapshot.step, save_snapshot(cell, snapshot))
                except Exception:
                    fail(cell)
    for cell, _, _ in group:
        if cell.name not in failed:
            try:
                finish(cell)
            except Exception:
                fail(cell)
            else:
                tell(Event(cell.name, "done"))
    return failed


def padded(source: Any, count: int) -> Any:
    """A chain set of `count` chains from which the same sequences are drawn; others as they are."""
    if not isinstance(source, ChainSet) or source.count == count:
        return source
    more = count - source.count
    size = source.states
    # A chain of weight 0 has an empty interval of the running sums.
    filled = (
        np.concatenate([source.transition, np.full((more, size, size), 1 / size)]),
        np.concatenate([source.stationary, np.full((more, size), 1 / size)]),
        np.concatenate([source.weights, np.zeros(more)]),
        np.concatenate([source.cumulative, np.full(more, 2**32 - 1, np.uint32)]),
    )
    found: ChainSet = eqx.tree_at(
        lambda s: (s.transition, s.stationary, s.weights, s.cumulative), source, filled
    )
    return found

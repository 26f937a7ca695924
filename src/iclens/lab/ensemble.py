"""Ensembles: cells trained in one program, saved as cells that were trained alone are."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import numpy as np

from iclens.chains import ChainSet
from iclens.lab.cell import Cell, begin, finish, save_snapshot
from iclens.lab.recipe import Recipe
from iclens.lab.work import Event, Teller, keep_error, prepare
from iclens.training import Snapshot, TrainingState, train_ensemble

MOST_MEMBERS = 64
"""Members that are trained together at most."""


def default_members(recipe: Recipe) -> int:
    """Members of an ensemble: on a CPU, where cells are better trained in processes, one.

    On a GPU as many as half of its memory holds, by what the activations of a step take.
    """
    device = jax.devices()[0]
    if device.platform == "cpu":
        return 1
    model, context = recipe.model, recipe.task.context
    floats = context * (12 * model.width + 3 * model.mlp_width) + 6 * model.heads * context**2
    member = 4 * recipe.train.batch * model.layers * floats
    free = (device.memory_stats() or {}).get("bytes_limit", 2**33) / 2
    return max(1, min(MOST_MEMBERS, int(free / member)))


def run_ensembles(
    cells: Sequence[Cell], members: int, tell: Callable[[Event], None]
) -> dict[str, str]:
    """Do cells, up to `members` of them in one program; returns why those failed that did.

    In one program are cells that stand at the same step, of finitely many chains or of fresh ones:
    sets of fewer chains are filled up with chains that are never drawn.  A member ends near the
    same cell alone: the rounding of matrix products differs, by 2e-4 in parameters of order 1 after
    100 steps in the tests, and grows along training as any rounding does.  For the same reason an
    ensemble that was killed between the savings of its members does not go on to the same bits.
    """
    failed: dict[str, str] = {}
    for first in range(0, len(cells), members):
        failed |= _run_some(cells[first : first + members], tell)
    return failed


Member = tuple[Cell, Teller, TrainingState]


def _run_some(cells: Sequence[Cell], tell: Callable[[Event], None]) -> dict[str, str]:
    """Do cells in as few programs as can be, holding them all."""
    failed: dict[str, str] = {}
    groups: dict[tuple[bool, int], list[Member]] = {}
    with contextlib.ExitStack() as stack:
        for cell in cells:
            told = Teller(cell.name, tell)
            try:
                wanting = stack.enter_context(prepare(replace(cell), told))
                if wanting is None:
                    told.ended(None)
                    continue
                state = begin(wanting)
            except Exception:
                failed[cell.name] = _fail(cell, told)
                continue
            alike = cell.chains == "infinite", int(state.step)
            groups.setdefault(alike, []).append((wanting, told, state))
        for group in groups.values():
            failed |= _run_group(group)
    return failed


def _run_group(group: list[Member]) -> dict[str, str]:
    """Train members that stand at one step, in halves where the device's memory does not do."""
    failed: dict[str, str] = {}
    try:
        for point in _snapshots(group):
            for (cell, told, _), snapshot in zip(group, point, strict=True):
                if snapshot is None or cell.name in failed:
                    continue
                try:
                    told.phase(snapshot.step, save_snapshot(cell, snapshot))
                except Exception:
                    failed[cell.name] = _fail(cell, told)
    except Exception as error:
        if "RESOURCE_EXHAUSTED" in str(error) and len(group) > 1 and not failed:
            middle = len(group) // 2
            return _again(group[:middle]) | _again(group[middle:])
        for cell, told, _ in group:
            if cell.name not in failed:
                failed[cell.name] = _fail(cell, told)
    for cell, told, _ in group:
        if cell.name not in failed:
            try:
                finish(cell)
                told.ended(None)
            except Exception:
                failed[cell.name] = _fail(cell, told)
    return failed


def _again(group: list[Member]) -> dict[str, str]:
    """Train members from where they stand on disk."""
    failed: dict[str, str] = {}
    members = []
    for cell, told, _ in group:
        cell = replace(cell)  # what was read before is not kept
        try:
            members.append((cell, told, begin(cell)))
        except Exception:
            failed[cell.name] = _fail(cell, told)
    return failed | _run_group(members) if members else failed


def _snapshots(group: list[Member]) -> Iterator[list[Snapshot | None]]:
    most = max(getattr(cell.source, "count", 0) for cell, _, _ in group)

    def on_steps(done: int) -> None:
        for _, told, _ in group:
            told.steps(done)

    return train_ensemble(
        [state for _, _, state in group],
        [padded(cell.source, most) for cell, _, _ in group],
        group[0][0].recipe.train,
        keys=[cell.key("batches") for cell, _, _ in group],
        on_steps=on_steps,
    )


def _fail(cell: Cell, told: Teller) -> str:
    """Keep and tell the error that is being handled; returns it."""
    reason = traceback.format_exc()
    keep_error(cell, reason)
    told.ended(reason)
    return reason


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

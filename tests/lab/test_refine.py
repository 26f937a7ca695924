"""Refinement: the brackets of a whole grid from a part of its cells."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iclens.lab.recipe import SweepConfig, load_recipe
from iclens.lab.refine import next_cells
from iclens.lab.store import create_run, open_run
from iclens.lab.sweep import run_sweep
from iclens.phases import PhaseMap


def outcome(chains: int, first: float, second: float) -> dict:
    """What a cell does where K1* = first and K2* = second."""
    phases = ["M1", *(["G2"] if chains > first else []), *(["M2"] if chains < second else [])]
    return {"chains": chains, "seed": 0, "phases": phases, "outcome": "finished"}


def search(grid, thresholds, ratio: float) -> PhaseMap:
    """Refine until nothing is wanted; `thresholds` are K1* and K2* of each seed."""
    cells: dict[tuple[int, int], dict] = {}
    while wanted := next_cells(
        list(cells), PhaseMap(ordered(cells)), grid, range(len(thresholds)), ratio
    ):
        assert not set(cells) & set(wanted)
        for chains, seed in wanted:
            cells[chains, seed] = outcome(chains, *thresholds[seed]) | {"seed": seed}
    return PhaseMap(ordered(cells))


def ordered(cells) -> list[dict]:
    return sorted(cells.values(), key=lambda cell: (cell["chains"], cell["seed"]))


GRIDS = st.lists(st.integers(1, 3000), min_size=1, max_size=30, unique=True)
PAIRS = st.tuples(st.floats(0.5, 4000), st.floats(0.5, 4000)).map(sorted)


@given(GRIDS, st.lists(PAIRS, min_size=1, max_size=3))
def test_refinement_finds_the_brackets_of_the_grid(grid, thresholds) -> None:
    whole = PhaseMap(
        [
            outcome(chains, *pair) | {"seed": seed}
            for chains in sorted(grid)
            for seed, pair in enumerate(thresholds)
        ]
    ).thresholds
    found = search(grid, thresholds, ratio=math.inf)
    assert {cell["chains"] for cell in found.cells} <= set(grid)
    for name, threshold in whole.items():
        assert found.thresholds[name]["bracket"] == threshold["bracket"]
        assert found.thresholds[name]["per_seed"] == threshold["per_seed"]
    each = 2 * math.ceil(math.log2(len(grid) + 1)) + 1
    assert len(found.cells) <= each * len(thresholds)


@given(
    st.lists(
        st.tuples(st.floats(2.5, 900), st.floats(2.5, 900)).map(sorted), min_size=1, max_size=3
    ),
    st.floats(1.05, 4),
)
def test_refinement_goes_on_between_the_values_of_the_grid(thresholds, ratio) -> None:
    found = search([2, 1000], thresholds, ratio).thresholds
    for name, place in (("K1*", 0), ("K2*", 1)):
        for seed, entry in enumerate(found[name]["per_seed"]):
            low, high = entry["low"], entry["high"]
            assert low <= thresholds[seed][place] <= high
            assert high / low <= ratio or high - low == 1


@given(st.lists(st.booleans(), min_size=8, max_size=8))
def test_outcomes_that_are_not_monotone_come_to_an_end(visits) -> None:
    grid = [2, 4, 8, 16, 32, 64, 128, 512]
    cells: dict[tuple[int, int], dict] = {}
    while wanted := next_cells(list(cells), PhaseMap(ordered(cells)), grid, [0], 1.25):
        assert not set(cells) & set(wanted)
        for chains, seed in wanted:
            nearest = min(range(8), key=lambda place: abs(grid[place] - chains))
            cells[chains, seed] = outcome(chains, 0 if visits[nearest] else 4000, 50)
    assert len(cells) < 60


def test_a_cell_without_outcome_is_not_tried_again() -> None:
    wanted = next_cells([(8, 0)], PhaseMap([]), [2, 8], [0], 2.0)
    assert wanted == [(2, 0)]


@pytest.mark.slow
def test_a_refined_run_trains_what_it_needs_and_goes_on(tmp_path) -> None:
    tiny = load_recipe("tiny")
    recipe = dataclasses.replace(
        tiny,
        train=dataclasses.replace(tiny.train, steps=20, evaluations=2),
        evaluation=dataclasses.replace(tiny.evaluation, sequences=16),
        sweep=SweepConfig(chains=(2, 8), refine=True, ratio=4.0),
    )
    run = create_run(tmp_path / "run", recipe)
    assert [cell.chains for cell in run.cells] == [8]
    events = []
    assert run_sweep(run, on_event=events.append) == {}
    trained = [event.cell for event in events if event.kind == "start"]
    assert trained[0] == "chains=8,seed=0"
    again = open_run(run.path)
    assert sorted(trained) == sorted(cell.name for cell in again.cells)
    assert all(cell.status == "done" for cell in again.cells)
    found = PhaseMap.from_curves(cell.curves for cell in again.cells)
    assert next_cells([(c.chains, c.seed) for c in again.cells], found, (2, 8), (0,), 4.0) == []

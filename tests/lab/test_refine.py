"""Refinement: the brackets of a whole grid from a part of its cells."""

from __future__ import annotations

import dataclasses
import math

from hypothesis import given
from hypothesis import strategies as st

from iclens.lab.recipe import SweepConfig, load_recipe
from iclens.lab.refine import next_chains
from iclens.lab.store import create_run, open_run
from iclens.lab.sweep import run_sweep
from iclens.phases import PhaseMap


def outcome(chains: int, first: float, second: float) -> dict:
    """What a cell does where K1* = first and K2* = second."""
    phases = ["M1", *(["G2"] if chains > first else []), *(["M2"] if chains < second else [])]
    return {"chains": chains, "seed": 0, "phases": phases, "outcome": "finished"}


def search(grid, first: float, second: float, ratio: float) -> PhaseMap:
    """Refine until nothing is wanted."""
    found = PhaseMap([])
    while wanted := next_chains([c["chains"] for c in found.cells], found, grid, ratio):
        assert not {c["chains"] for c in found.cells} & set(wanted)
        cells = [*found.cells, *(outcome(chains, first, second) for chains in wanted)]
        found = PhaseMap(sorted(cells, key=lambda cell: cell["chains"]))
    return found


GRIDS = st.lists(st.integers(1, 3000), min_size=1, max_size=30, unique=True)


@given(GRIDS, st.floats(0.5, 4000), st.floats(0.5, 4000))
def test_refinement_finds_the_brackets_of_the_grid(grid, one, other) -> None:
    first, second = sorted((one, other))
    whole = PhaseMap([outcome(chains, first, second) for chains in sorted(grid)]).thresholds
    found = search(grid, first, second, ratio=math.inf)
    assert {c["chains"] for c in found.cells} <= set(grid)
    for name, threshold in whole.items():
        assert found.thresholds[name]["bracket"] == threshold["bracket"]
    assert len(found.cells) <= 2 * math.ceil(math.log2(len(grid) + 1)) + 1


@given(st.floats(2.5, 900), st.floats(2.5, 900), st.floats(1.05, 4))
def test_refinement_goes_on_between_the_values_of_the_grid(one, other, ratio) -> None:
    first, second = sorted((one, other))
    found = search([2, 1000], first, second, ratio).thresholds
    for name, value in (("K1*", first), ("K2*", second)):
        low, high = found[name]["bracket"]
        assert low <= value <= high
        assert high / low <= ratio or high - low == 1


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
    assert next_chains([c.chains for c in again.cells], found, (2, 8), 4.0) == []

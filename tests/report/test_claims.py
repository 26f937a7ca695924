"""What a run shows of the paper's claims: every verdict of every row, from made-up results."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr

from conftest import write_run
from iclens.lab.fits import fit_dataset, growth_dataset
from iclens.lab.recipe import Diversity
from iclens.lab.store import open_run
from iclens.phases import PhaseMap
from iclens.report.claims import Finding, findings
from iclens.report.reading import Reading
from iclens.theory.fits import Fit, Parameter
from iclens.transformer import TransformerConfig

ROWS = (
    "passage",
    "K1*",
    "K2*",
    "order",
    "switching",
    "race",
    "growth",
    "context",
    "memory",
    "induction",
    "recognition",
)
OPEN, NAN = math.inf, math.nan
EXPECTED = {
    2: ["M1", "M2"],
    8: ["G1", "M1", "M2"],
    16: ["M1", "G2", "M2"],
    32: ["G1", "G2"],
    128: ["G1", "G2"],
}
"""Phases of cells that do as the paper says."""

Reader = Callable[..., Reading]


@pytest.fixture
def reader(tmp_path: Path) -> Reader:
    def reader(
        paths: dict[Any, list[str]] = EXPECTED, *more: dict[Any, list[str]], ends: str = "finished"
    ) -> Reading:
        """A reading of a run without curves whose cells, for each seed, go through `paths`."""
        seeds = range(1 + len(more))
        missing = {(chains, seed): "missing" for chains in paths for seed in seeds}
        run = open_run(write_run(tmp_path / "a run", tuple(paths), tuple(seeds), missing))
        cells = [
            {
                "chains": chains,
                "seed": seed,
                "phases": phases,
                "steps": list(range(len(phases))),
                "final_step": 6000,
                "outcome": ends,
            }
            for seed, each in enumerate((paths, *more))
            for chains, phases in each.items()
        ]
        run.__dict__["phase_map"] = PhaseMap(cells)
        return Reading(run)

    return reader


def row(name: str, reading: Reading, theory: Any = None, traces: Sequence[Any] = ()) -> Finding:
    found = findings(reading, theory or {}, traces)
    assert len(found) == len(ROWS)
    return found[ROWS.index(name)]


# --- the cells


@pytest.mark.parametrize(
    ("paths", "verdict"),
    [
        (EXPECTED, "agrees"),
        ({**EXPECTED, 64: ["G1", "G2", "G1"]}, "disagrees"),
        ({**EXPECTED, 64: ["M2", "M1", "M2"]}, "disagrees"),
        ({**EXPECTED, 64: ["G1"]}, "open"),
        ({32: ["G1", "G2"], 64: ["G1", "G2"]}, "open"),
        ({32: [], 64: []}, "not measured"),
    ],
)
def test_models_pass_through_four_phases(reader: Reader, paths: Any, verdict: str) -> None:
    assert row("passage", reader(paths)).verdict == verdict


def test_the_passage_is_told_with_its_numbers(reader: Reader) -> None:
    found = row("passage", reader({**EXPECTED, 64: ["G2", "G1"]}))
    assert "6 finished cells" in found.shows
    assert "G1 → G2 (2)" in found.shows
    assert "5 went from one-point" in found.shows
    assert "1 from a two-point phase back" in found.shows


@pytest.mark.parametrize("name", ["passage", "K1*", "K2*", "order"])
def test_an_unfinished_run_shows_nothing_yet(reader: Reader, name: str) -> None:
    reading = reader(ends="unfinished")
    found = row(name, reading)
    assert (found.verdict, found.command) == ("not measured", reading.run.resume_command)


@pytest.mark.parametrize(
    ("paths", "verdict", "text"),
    [
        (EXPECTED, "agrees", "8 < K1* ≤ 16."),
        ({**EXPECTED, 8: ["G1"]}, "open", "1 of 2 end in M2"),
        ({2: ["M2"], 8: ["M1", "M2"]}, "open", "K1* > 8."),
        ({2: ["M2"], "infinite": ["G1", "G2"]}, "open", "2 < K1* ≤ ∞."),
        ({2: ["G1", "G2"], 8: ["M1", "M2"]}, "disagrees", "No K brackets K1*."),
        ({2: ["M2"], 8: ["G2"], 16: ["M2"], 32: ["G2"]}, "open", "not monotone in K for seed 0."),
    ],
)
def test_k1(reader: Reader, paths: Any, verdict: str, text: str) -> None:
    found = row("K1*", reader(paths))
    assert found.verdict == verdict
    assert text in found.shows


@pytest.mark.parametrize(
    ("paths", "verdict", "text"),
    [
        (EXPECTED, "agrees", "16 < K2* ≤ 32."),
        ({**EXPECTED, 128: ["G1"]}, "open", "1 of 2 end in G2"),
        ({32: ["G1", "G2"], 64: ["G1", "G2"]}, "open", "K2* ≤ 32."),
        ({2: ["M2"], "infinite": ["G2"]}, "open", "2 < K2* ≤ ∞."),
        ({2: ["G2"], 8: ["M2"]}, "disagrees", "No K brackets K2*."),
    ],
)
def test_k2(reader: Reader, paths: Any, verdict: str, text: str) -> None:
    found = row("K2*", reader(paths))
    assert found.verdict == verdict
    assert text in found.shows
    assert "after 6,000 steps" in found.shows


@pytest.mark.parametrize(
    ("paths", "verdict"),
    [
        ([EXPECTED], "agrees"),
        ([EXPECTED, EXPECTED], "agrees"),
        ([{2: ["M2"], 8: ["G2"]}], "open"),
        ([EXPECTED, {2: ["M2"], 8: ["G2"]}], "open"),
        ([EXPECTED, {2: ["M2"], 8: ["G1"], 16: ["G1"], 32: ["G2"]}], "open"),  # not yet there
    ],
)
def test_k1_is_below_k2(reader: Reader, paths: Any, verdict: str) -> None:
    assert row("order", reader(*paths)).verdict == verdict


def fit(parameters: dict[str, tuple[float, float, float]], chains: Sequence[int]) -> xr.Dataset:
    """A fit as `iclens theory fits` saves it; an open end is infinite."""
    count = len(chains)
    table = fit_dataset(
        Fit(
            {name: Parameter(value, (None, None)) for name, (value, *_) in parameters.items()},
            {
                "chains": np.array(chains, float),
                "time": np.where(np.arange(count) < 2, np.inf, 500.0),
                "seed": np.zeros(count, int),
            },
            {"chains": np.ones(3)},
            {"log_likelihood": -1.0},
        )
    )
    table.fit.values[:, :3] = list(parameters.values())
    return table


def test_the_fits_of_thresholds_are_told(reader: Reader) -> None:
    theory = {
        "K1": fit({"threshold": (11.5, 8.5, OPEN)}, [2, 8, 16]),
        "K2": fit({"threshold": (27.0, 20.0, 31.0)}, [2, 8, 99]),
    }
    reading = reader()
    assert "Fitted to 3 cells: 11.5 (8.5 to open)." in row("K1*", reading, theory).shows
    assert "3 cells (not all of this run): 27 (20 to 31)." in row("K2*", reading, theory).shows


def test_a_damaged_fit_of_a_threshold_leaves_the_bracket(reader: Reader) -> None:
    reading = reader()
    found = row("K1*", reading, {"K1": "K1.nc is damaged"})
    assert found.verdict == "agrees"
    assert "cannot be read: K1.nc is damaged." in found.shows
    assert found.command == f"iclens theory fits {shlex.quote(str(reading.run.path))}"


# --- results of the theory


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("switching", "fits {run}"),
        ("race", "race --out {out}"),
        ("growth", "induction --out {out}"),
        ("context", "context --out {out}"),
        ("memory", "memory --beside {run} --out {out}"),
    ],
)
def test_what_is_not_computed_or_damaged_has_its_command(
    reader: Reader, name: str, command: str
) -> None:
    reading = reader()
    path = reading.run.path
    command = command.format(run=shlex.quote(str(path)), out=shlex.quote(str(path / "theory")))
    for theory in ({}, {name: "x.nc is damaged: <b>"}):
        found = row(name, reading, theory)
        assert (found.verdict, found.command) == ("not measured", f"iclens theory {command}")
    assert found.shows == "The result cannot be read: x.nc is damaged: <b>."


@pytest.mark.parametrize(
    ("interval", "verdict"),
    [
        ((1.5, 2.5), "agrees"),
        ((1.5, OPEN), "open"),
        ((0.0, 2.5), "open"),
        ((2.1, OPEN), "disagrees"),
        ((0.0, 1.9), "disagrees"),
        ((NAN, NAN), "open"),
    ],
)
def test_switching(reader: Reader, interval: tuple[float, float], verdict: str) -> None:
    table = fit({"K2*": (30.0, 25.0, OPEN), "gamma": (1.8, *interval)}, [8, 16, 16, 32])
    found = row("switching", reader(), {"switching": table})
    assert found.verdict == verdict
    assert "K2* = 30 (25 to open)" in found.shows
    assert "2 of 4 cells had not turned" in found.shows


@pytest.mark.parametrize(
    ("observed", "at_tau", "equal", "verdict"),
    [
        ([10, 8, 12], [11, 9, 14], [4, NAN, 5], "agrees"),
        ([10, 8, 12], [20, 15, 24], [10, 8, 12], "agrees"),
        ([10, 8, 12], [20, 15, 24], [4, NAN, 5], "disagrees"),
        ([10, 8, 12], [20, 15, NAN], [4, 3, 5], "disagrees"),
        ([10, 8, 12], [20, 15, 24], [4, NAN, 9], "open"),
        ([10, 8, 12], "refused: no crossing", [4, 3, 5], "open"),
        ("refused: no crossing", [11, 9, 14], [4, 3, 5], "open"),
    ],
)
def test_race(reader: Reader, observed: Any, at_tau: Any, equal: Any, verdict: str) -> None:
    result = xr.Dataset(
        {
            "visits: observed": ("run", [False, False, True, True]),
            "visits: loss at tau": ("run", [False, False, True, True]),
            "visits: equal times": ("run", [False, True, True, True]),
        },
        attrs={"K1* observed": observed, "K1* loss at tau": at_tau, "K1* equal times": equal},
    )
    found = row("race", reader(), {"race": result})
    assert found.verdict == verdict
    assert "right for 4 of 4 models" in found.shows
    assert "right for 3 of 4 models" in found.shows


@pytest.mark.parametrize("name", ["growth", "context"])
@pytest.mark.parametrize(
    ("law", "noise", "verdict"),
    [
        (lambda n: 100 + 15 * n / np.log(n), 0.002, "agrees"),
        (lambda n: 15 * n / np.log(n), 0.01, "agrees"),
        (lambda n: 100 + 15 * n / np.log(n), 0.3, "open"),
        (lambda n: 50 + 3 * np.sqrt(n), 0.002, "disagrees"),
    ],
)
def test_growth(reader: Reader, name: str, law: Any, noise: float, verdict: str) -> None:
    context = np.array([16, 32, 64, 128, 256, 512, 1024, 2048])
    wobble = np.exp(noise * np.random.default_rng(1).standard_normal(len(context)))
    table = growth_dataset(context, law(context) * wobble)
    found = row(name, reader(), {name: table})
    assert found.verdict == verdict
    assert "8 times at N = 16 to 2048" in found.shows


def test_growth_without_laws_with_a_delay_and_with_models_left_out(reader: Reader) -> None:
    context = np.array([16, 64, 1024, 16, 64, 1024])
    wobble = [1.01, 0.99, 1.01, 0.99, 1.01, 0.99]
    table = growth_dataset(context, 15 * context / np.log(context) * wobble)
    assert "delayed_aic" not in table
    table["counts"] = (("study", "count"), [[3, 1, 0], [3, 1, 1]])
    found = row("context", reader(), {"context": table})
    assert found.verdict == "agrees"
    assert "Left out: 2 models that came too late, 1 lost." in found.shows


def memory(brackets: Sequence[Sequence[tuple[float, float]]]) -> xr.Dataset:
    """Brackets of K2* over (width, hidden); an end is NaN where no K lies on that side."""
    return xr.Dataset(
        {"K2": (("width", "hidden", "end"), np.array(brackets, float))},
        coords={"width": [1, 4, 16][: len(brackets)], "hidden": [16, 64]},
        attrs={"steps": 16000},
    ).transpose("end", "width", "hidden")


@pytest.mark.parametrize(
    ("brackets", "verdict", "text"),
    [
        ([[(NAN, 8), (8, 12)], [(8, 12), (24, NAN)]], "agrees", "with d it rises in 2 of 2 pairs"),
        ([[(NAN, 8), (NAN, 8)], [(8, 12), (8, 12)]], "open", "with F it rises in 0 of 2 pairs"),
        ([[(NAN, NAN), (8, 12)], [(8, 12), (24, NAN)]], "agrees", "3 of 4 pairs of d and F"),
        ([[(16, 24), (NAN, 8)], [(24, 32), (48, NAN)]], "disagrees", "with F it rises in 1 of 2"),
        ([[(12, NAN), (24, NAN)], [(8, 12), (32, 48)]], "disagrees", "and falls in 1"),
    ],
)
def test_memory(reader: Reader, brackets: Any, verdict: str, text: str) -> None:
    reading = reader()
    for result in (memory(brackets), memory(brackets).isel(width=slice(None, None, -1))):
        found = row("memory", reading, {"memory": result})
        assert found.verdict == verdict
        assert text in found.shows


# --- traces

CRITERIA = (
    "statistical induction head: attends",
    "statistical induction head: is needed",
    "task recognition head: encodes pairs",
    "task recognition head: pools",
)


def trace(chains: Diversity, checkpoints: dict[int, tuple[str, bool, str]]) -> xr.Dataset:
    """For each step phase, whether it is clear, and the criteria that hold: `yyny`."""
    phases, clear, holds = zip(*checkpoints.values(), strict=True)
    return xr.Dataset(
        {
            "phase": ("step", list(phases)),
            "clear": ("step", list(clear)),
            "criterion_holds": (("step", "criterion"), [[c == "y" for c in h] for h in holds]),
        },
        coords={"step": list(checkpoints), "criterion": list(CRITERIA)},
        attrs={"chains": chains, "seed": 0, "baseline": "resample"},
    )


@pytest.mark.parametrize(
    ("name", "phase", "passing", "failing"),
    [("induction", "G2", "yynn", "ynyy"), ("recognition", "M2", "nnyy", "yyyn")],
)
def test_mechanisms(reader: Reader, name: str, phase: str, passing: str, failing: str) -> None:
    reading = reader()
    first = trace(8, {0: ("none", True, "nnnn"), 60: (phase, False, failing)})
    good, bad = (
        trace(8, {90: (phase, True, passing)}),
        trace("infinite", {90: (phase, True, failing)}),
    )
    found = row(name, reading, traces=[first, good, good])
    assert (found.verdict, found.command) == ("agrees", "")
    assert f"passes at 1 of 1 traced checkpoint in {phase}, of 1 model; at 0 of 2" in found.shows
    found = row(name, reading, traces=[first, good, bad])
    assert found.verdict == "open"
    assert f"passes at 1 of 2 traced checkpoints in {phase}, of 2 models" in found.shows
    wanting = {"induction": "is needed", "recognition": "pools"}[name]
    assert f'wanting (1): "{wanting}".' in found.shows
    assert row(name, reading, traces=[bad]).verdict == "disagrees"
    assert row(name, reading, traces=[first]).verdict == "not measured"
    assert row(name, reading, traces=[good.drop_vars(["phase", "clear"])]).verdict == "not measured"


def test_what_to_trace(reader: Reader) -> None:
    reading = reader()
    start = ["iclens", "trace", str(reading.run.path), "--chains"]
    rest = ["--seed", "0", "--step", "all"]
    found = row("induction", reading)
    assert found.verdict == "not measured"
    assert shlex.split(found.command) == [*start, "128", *rest]
    # The largest K whose memory was not first a count.
    found = row("recognition", reading)
    assert shlex.split(found.command) == [*start, "8", *rest]


def test_a_phase_that_is_only_visited_can_be_traced(reader: Reader) -> None:
    found = row("induction", reader({2: ["M2"], 8: ["G2", "M2"]}))
    assert "--chains 8" in found.command


def test_a_run_without_the_phase_has_nothing_to_trace(reader: Reader) -> None:
    reading = reader({2: ["G1"]})
    found = row("recognition", reading)
    assert (found.verdict, found.command) == ("not measured", reading.run.resume_command)
    assert "clearly in M2" in found.shows


def test_a_model_without_these_circuits_is_not_sent_to_be_traced(reader: Reader) -> None:
    reading = reader()
    recipe = reading.run.recipe
    for phase, model, shows in (
        ("induction", TransformerConfig(layers=1), "Roles need a model of at least two layers."),
        ("recognition", TransformerConfig(attention_only=True), "These models have no MLPs"),
    ):
        reading.run.__dict__["recipe"] = replace(recipe, model=model)
        found = row(phase, reading)
        assert (found.verdict, found.command) == ("not measured", "")
        assert found.shows.startswith(shows)


def test_a_saved_run(saved_run: Path) -> None:
    """With curves: cells of few chains remember at once, those of many never."""
    found = findings(Reading(open_run(saved_run)), {}, [])
    assert [finding.verdict for finding in found] == ["agrees"] * 4 + ["not measured"] * 7
    assert all(finding.command for finding in found[4:])

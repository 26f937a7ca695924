"""The main job, really run: `quick` shows all four phases and both thresholds."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from blocks import PAGES, needs, run_page
from iclens.lab.refine import next_cells
from iclens.lab.store import open_run
from iclens.phases import PhaseMap

pytestmark = pytest.mark.slow


MINUTES = {"s": 1 / 60, "min": 1, "h": 60}


ICLENS = [sys.executable, "-m", "iclens.cli"]


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    """The run, as planned and within its eight minutes."""
    out: Path = tmp_path_factory.mktemp("runs") / "quick"
    planned = subprocess.run(
        [*ICLENS, "run", "quick", "--plan"], capture_output=True, text=True, check=True
    )
    number, unit = re.search(r"time +about (\S+) (s|min|h)", planned.stdout).groups()
    start = time.monotonic()
    done = subprocess.run([*ICLENS, "run", "quick", "--out", out], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    minutes = (time.monotonic() - start) / 60
    assert minutes < 8
    assert 1 / 3 < minutes / (float(number) * MINUTES[unit]) < 3
    assert (out / "report.html").exists()
    return out


@pytest.fixture(scope="module")
def paths(out) -> dict[int, list[str]]:
    """Successive phases by K, through the command line."""
    shown = subprocess.run(
        [*ICLENS, "phases", out, "--json"], capture_output=True, text=True, check=True
    )
    cells = json.loads(shown.stdout)["cells"]
    return {cell["chains"]: cell["phases"] for cell in cells}


@pytest.mark.parametrize("chains", [2, 4])
def test_few_chains_are_memorised_without_a_visit_to_g2(paths, chains) -> None:
    assert "G2" not in paths[chains]
    assert paths[chains][-2:] == ["M1", "M2"]


def test_between_the_thresholds_g2_comes_first_and_gives_way_to_m2(paths) -> None:
    assert paths[16][-2:] == ["G2", "M2"]


@pytest.mark.parametrize("chains", [128, 512])
def test_many_chains_are_generalised_to_the_end(paths, chains) -> None:
    assert paths[chains][-2:] == ["G1", "G2"]
    assert "M2" not in paths[chains]


def test_refinement_finds_both_brackets_with_three_fifths_of_the_steps(out) -> None:
    """On what this run did: a refined sweep trains the same cells, only fewer of them."""
    whole = open_run(out).phase_map
    grid = [cell["chains"] for cell in whole.cells]
    found = PhaseMap([])
    known: set[int] = set()
    while wanted := next_cells([(k, 0) for k in known], found, grid, [0], ratio=2.0):
        known |= {chains for chains, _ in wanted}
        found = PhaseMap([cell for cell in whole.cells if cell["chains"] in known])
    assert {n: t["bracket"] for n, t in found.thresholds.items()} == {
        n: t["bracket"] for n, t in whole.thresholds.items()
    }
    assert len(found.cells) <= 0.6 * len(grid)


def traced(out: Path, chains: int, step: str) -> dict:
    shown = subprocess.run(
        [*ICLENS, "trace", out, "--chains", str(chains), "--step", step, "--json"],
        capture_output=True,
        text=True,
    )
    assert shown.returncode == 0, shown.stderr
    return json.loads(shown.stdout)


@pytest.mark.parametrize(
    ("chains", "step", "phase", "induction", "recognition"),
    [
        (512, "last", "G2", "pass", "fail"),
        (8, "last", "M2", "fail", "pass"),
        (512, "112", "G1", "fail", "fail"),
        (8, "291", "M1", "fail", "fail"),
    ],
)
def test_each_phase_has_its_mechanism(out, chains, step, phase, induction, recognition) -> None:
    found = traced(out, chains, step)
    assert found["phase"] == phase
    assert found["hypotheses"]["statistical induction head"]["verdict"] == induction
    assert found["hypotheses"]["task recognition head"]["verdict"] == recognition
    assert found["faithfulness"] >= 0.9
    if phase != "G1":  # of which a random set of edges keeps much, for it needs no path in order
        assert found["faithfulness"] > found["random_faithfulness"] + 0.2
    assert (found["shuffle_loss_change"] > 0.05) == (phase in ("G2", "M2"))


@pytest.mark.parametrize(
    "page", [page for page in PAGES if "quick" in needs(page)], ids=lambda page: page.name
)
def test_pages_that_start_with_the_run_are_true(page: Path, out: Path, tmp_path: Path) -> None:
    assert list(run_page(page, tmp_path, {"quick": out}))

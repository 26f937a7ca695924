"""The main job, really run: `quick` shows all four phases and both thresholds."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.slow


MINUTES = {"s": 1 / 60, "min": 1, "h": 60}


@pytest.fixture(scope="module")
def paths(tmp_path_factory) -> dict[int, list[str]]:
    """Successive phases by K, through the command line, as planned and within its eight minutes."""
    out = tmp_path_factory.mktemp("runs") / "quick"
    iclens = [sys.executable, "-m", "iclens.cli"]
    planned = subprocess.run(
        [*iclens, "run", "quick", "--plan"], capture_output=True, text=True, check=True
    )
    number, unit = re.search(r"time +about (\S+) (s|min|h)", planned.stdout).groups()
    start = time.monotonic()
    done = subprocess.run([*iclens, "run", "quick", "--out", out], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    minutes = (time.monotonic() - start) / 60
    assert minutes < 8
    assert 1 / 3 < minutes / (float(number) * MINUTES[unit]) < 3
    assert (out / "report.html").exists()
    shown = subprocess.run(
        [*iclens, "phases", out, "--json"], capture_output=True, text=True, check=True
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

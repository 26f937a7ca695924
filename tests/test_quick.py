"""The main job, really run: `quick` shows all four phases and both thresholds."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def paths(tmp_path_factory) -> dict[int, list[str]]:
    """Successive phases by K, through the command line."""
    out = tmp_path_factory.mktemp("runs") / "quick"
    iclens = [sys.executable, "-m", "iclens.cli"]
    done = subprocess.run([*iclens, "run", "quick", "--out", out], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
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

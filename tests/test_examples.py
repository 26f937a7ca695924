"""The example on names: what the how-to says of it is what its commands give."""

from __future__ import annotations

import re
import runpy
import shutil
import tomllib
from pathlib import Path

import numpy as np
import pytest

from iclens import cli
from iclens.chains import ChainSet
from iclens.lab.recipe import load_recipe
from iclens.lab.store import open_run

ROOT = Path(__file__).parents[1]
NAMES = ROOT / "examples" / "names"
PAGE = (ROOT / "docs" / "how-to" / "own-chains.md").read_text("utf-8")


@pytest.fixture
def folder(tmp_path) -> Path:
    """A copy of the example, with its sequences."""
    shutil.copytree(NAMES, tmp_path / "names", ignore=shutil.ignore_patterns("runs", "*.npz"))
    runpy.run_path(str(tmp_path / "names" / "sequences.py"), run_name="__main__")
    return tmp_path / "names"


def test_its_sequences_give_the_chains_that_the_page_tells_of(folder) -> None:
    chains, report = ChainSet.from_sequences(folder / "sequences.csv")
    assert chains.labels == ("end", "fricative", "liquid", "stop", "vowel")
    printed = [re.sub(r"\s+", " ", line) for line in str(report).splitlines()]
    told = re.search(r"```text\n(34 chains.*?)```", PAGE, re.S)
    assert told is not None
    lines = [
        line for line in told[1].splitlines() if line and line not in ("...", "wrote   chains.npz")
    ]
    assert len(lines) > 4
    for line in lines:
        assert re.sub(r"\s+", " ", line) in printed
    recipe = load_recipe(folder / "names.toml")
    assert recipe.task.states == chains.states
    assert max(recipe.sweep.chains) == chains.count
    assert np.isfinite(chains.transition).all()


@pytest.mark.slow
def test_it_goes_from_its_sequences_to_a_phase_map(folder) -> None:
    commands = [
        ["chains", str(folder / "sequences.csv"), "--out", str(folder / "chains.npz")],
        [
            "run", str(folder / "names.toml"), "--out", str(folder / "run"), "--workers", "0",
            "--train.steps", "300", "--train.evaluations", "4", "--sweep.chains", "2", "34",
        ],
    ]  # fmt: skip
    for command in commands:
        assert cli.dispatch(command) == 0
    run = open_run(folder / "run")
    assert [cell["chains"] for cell in run.phase_map.cells] == [2, 34]
    assert (run.path / "report.html").exists()
    assert tomllib.loads(run.recipe_text)["prior"]["kind"] == "fitted"

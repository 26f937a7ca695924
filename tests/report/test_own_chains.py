"""The page of a run whose chains come from a file, under a prior that is not the usual one."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest
from test_inside import agrees, at

from conftest import Open
from iclens.chains import ChainSet, SparsePrior
from iclens.lab.recipe import load_recipe
from iclens.lab.store import create_run, open_run
from iclens.lab.sweep import run_sweep
from iclens.report import write_report

RECIPE = """
[task]
states = 4
context = 16
chains = "own.npz"
[prior]
kind = "sparse"
[model]
width = 8
[train]
steps = 60
evaluations = 2
[evaluation]
sequences = 8
[sweep]
chains = [3, "infinite"]
"""


@pytest.mark.slow
def test_the_page_shows_labels_and_the_references_of_the_prior(
    tmp_path: Path, open_page: Open
) -> None:
    drawn = SparsePrior(4).sample(jax.random.key(0), 5)
    chains = ChainSet(drawn.transition, [1, 2, 3, 4, 5], ("<b>", "é", "火", "d"))
    (tmp_path / "own.npz").write_bytes(chains.to_npz())
    (tmp_path / "own.toml").write_text(RECIPE)
    run = create_run(tmp_path / "run", load_recipe(tmp_path / "own.toml"))
    assert run_sweep(run) == {}
    run = open_run(run.path)
    text = write_report(run).read_text()
    assert "Training chains are from a file of 5 chains." in text
    assert "2-Gen is exact but for the few chains in 1000" in text
    assert np.isfinite(run.cell(3).curves.distance).all()  # type: ignore[union-attr]
    for shown in (3, "infinite"):
        page = at(open_page, run, shown, 60)
        agrees(page, run, shown, 60)
        heads = page.locator("#predictions thead th").all_inner_texts()
        assert heads[:4] == ["0 <b>", "1 é", "2 火", "3 d"]
    assert "States: 0 = <b>, 1 = é" in page.locator("header").inner_text()
    link = page.locator("a[download^=chains-]")
    assert (run.path / str(link.get_attribute("download"))).exists()

"""The page of scores, as a browser shows it."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np
import pytest
import xarray as xr
from test_accessibility import findings

from conftest import Open
from iclens.chains import ChainPrior
from iclens.predictors import reference_predictors
from iclens.report import write_scores
from iclens.report.scores import render_scores, score_plates
from iclens.scoring import score_contexts

HOSTILE = "</script><img src=x onerror=alert(1)>"
PRIOR = ChainPrior(3)
CHAINS = PRIOR.sample(jax.random.key(0), 4)


@pytest.fixture(scope="module")
def scores() -> xr.Dataset:
    """Of a model that is 2-Mem in one order of its states, at three context lengths."""
    model = reference_predictors(CHAINS, PRIOR)["2-Mem"]
    found = score_contexts(
        model, CHAINS, PRIOR, (4, 8, 16), sequences=64, shuffles=3, key=jax.random.key(0)
    )
    found["token_mass"] = ("context", [0.25, 0.5, 0.75])
    return found.assign_coords(
        token=("state", ["5 ' a'", "6 ' b'", f"7 {HOSTILE!r}"])
    ).assign_attrs(
        model=HOSTILE,
        kind="Hugging Face causal language model",
        facts=json.dumps({"architecture": "GPT2LMHeadModel"}),
        chain_source="chains & more.npz",
        draw=0,
        command=f"iclens score '{HOSTILE}'",
    )


@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), [(400, "light"), (400, "dark"), (1600, "dark")])
def test_the_page_shows_all_and_nothing_is_wrong_with_it(
    open_page: Open, scores: xr.Dataset, tmp_path: Path, width: int, scheme: str
) -> None:
    paths = write_scores(scores, tmp_path / "out")
    assert all(path.is_file() for path in paths)
    page = open_page(tmp_path / "out" / "score.html", width, scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator("h1").inner_text() == HOSTILE
    rows = page.locator("[aria-labelledby=phase-title] tbody tr").all_inner_texts()
    for row, context in zip(rows, (4, 8, 16), strict=True):
        here = scores.sel(context=context)
        n, phase, margin, *_ = row.split("\t")
        assert n == str(context)
        assert phase.split()[0] == here.phase.item().replace("none", "no")
        assert ("unclear" in phase) == (here.phase != "none" and not here.clear)
        assert margin == f"{here.margin.item():.3f} ± {here.margin_error.item():.3f}"
    distances = page.locator("[aria-labelledby=distances-title] tbody tr").all_inner_texts()
    assert len(distances) == 6
    assert f"{scores.distance[0, 0, 0].item():.4f} ±" in distances[0]
    assert page.locator(".plots img").count() == 6
    for image in page.locator(".plots img").all():
        assert image.evaluate("e => e.complete && e.naturalWidth > 0")
    told = page.locator("main").inner_text()
    for text in ("5 ' a'", HOSTILE, "50.00%", "chains & more.npz", "GPT2LMHeadModel", "0 1 2"):
        assert text in told
    assert page.locator(".command code").inner_text() == scores.attrs["command"]
    assert findings(page) == []


@pytest.mark.slow
def test_figures_in_the_page_have_its_colours(scores: xr.Dataset) -> None:
    plate = score_plates(scores)["distances_id"]
    from iclens.report.style import DARK, LIGHT

    pictures = [plate.image(colours) for colours in (LIGHT, DARK, LIGHT)]
    assert pictures[0] == pictures[2] != pictures[1]


@pytest.mark.slow
def test_scores_of_a_program_and_of_few_things_have_a_page(open_page: Open, tmp_path: Path) -> None:
    def model(states: np.ndarray) -> np.ndarray:
        return np.full((*states.shape, 3), -np.log(3))

    found = score_contexts(model, None, PRIOR, (2,), sequences=8, key=jax.random.key(0))
    write_scores(found, tmp_path)
    page = open_page(tmp_path / "score.html")
    told = page.locator("body").inner_text()
    assert "no phase" in told
    assert "score_contexts" in told
    assert "1-Mem" not in page.locator("[aria-labelledby=distances-title]").inner_text()
    assert render_scores(xr.load_dataset(tmp_path / "score.nc"), score_plates(found)) == (
        tmp_path / "score.html"
    ).read_text("utf-8")

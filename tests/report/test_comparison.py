"""Runs side by side: one scale, what differs, in a page as safe as the others."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from conftest import Open, write_run
from iclens.cli import dispatch
from iclens.lab.store import open_run
from iclens.report import compare
from iclens.report.reading import StepAxis

HOSTILE = "</script><img src=x onerror=alert(1)>"


@pytest.fixture(scope="session")
def comparison(saved_run: Path, first_release: object, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("compared")
    other = write_run(
        folder / "img src=x onerror=alert(1)", (8, 32, "infinite"), (0,), {(32, 0): "missing"}
    )
    out = folder / "comparison.html"
    runs = [str(saved_run), str(other), str(first_release.path)]
    assert dispatch(["report", *runs, "--out", str(out)]) == 0
    return out


def test_maps_have_one_scale(open_page: Open, comparison: Path) -> None:
    page = open_page(comparison, 1600)
    assert page.locator(".map").count() == 3
    heights, places = [], []
    for place in range(3):
        labels = page.locator(f"#map-{place} > svg > g:first-of-type text").all()
        heights.append(
            {
                label.inner_html(): label.evaluate("e => e.getBoundingClientRect().y")
                - page.locator(f"#map-{place} > svg").bounding_box()["y"]
                for label in labels
            }
        )
        axis = page.locator(f"#map-{place} .axis text").all_inner_texts()
        places.append(axis)
    heights[0].pop("seed")
    assert set(heights[0]) == set(heights[1])
    assert "∞" in heights[0]
    assert places[0] == places[1] == places[2]


def test_thresholds_and_what_differs(open_page: Open, comparison: Path) -> None:
    page = open_page(comparison)
    table = page.locator("[aria-labelledby=thresholds-title] tbody tr").all_inner_texts()
    table = [row.replace("\N{NO-BREAK SPACE}", " ") for row in table]
    assert table[0].split("\t") == ["demo", "8 < K1* ≤ 16", "32 < K2* ≤ 64"]
    assert table[1].split("\t")[1:] == ["8 < K1* ≤ ∞", "8 < K2* ≤ ∞"]
    rows = page.locator("[aria-labelledby=differences-title] tbody tr").all_inner_texts()
    keys = {row.split("\t")[0]: row.split("\t")[1:] for row in rows}
    assert keys["task.states"] == ["4", "4", "3"]
    assert keys["sweep.chains"][1] == "8, 32, infinite"
    assert "train.learning_rate" not in keys


def test_a_place_is_told_below_its_map(open_page: Open, comparison: Path) -> None:
    page = open_page(comparison)
    before = page.locator("#now-0").inner_text()
    page.locator('#map-1-row-0 .heat[data-step="20"]').click()
    assert page.locator("#now-0").inner_text() == before
    told = page.locator("#now-1").inner_text()
    page.locator("#map-1 svg").press("ArrowLeft")
    assert page.locator("#now-1").inner_text() != told


def test_arrows_stay_where_a_cell_has_been(open_page: Open, tmp_path: Path) -> None:
    statuses = {(8, 0): "unfinished", (32, 0): "missing"}
    run = open_run(write_run(tmp_path / "run", (2, 8, 32), (0,), statuses))
    page = open_page(compare([run, run], tmp_path / "c.html"))
    page.locator("#map-0-row-0 .heat").last.click()
    for key, told in (("ArrowUp", "K = 8"), ("ArrowUp", ""), ("ArrowDown", "K = 8")):
        page.locator("#map-0 svg").press(key)
        assert told in page.locator("#now-0").inner_text()
    saved = run.cell(8, 0).curves
    page.locator("#map-0 svg").press("ArrowRight")
    assert f"step {int(saved.step[-1]):,}" in page.locator("#now-0").inner_text()


@pytest.mark.parametrize("width", [400, 1600])
def test_comparison_is_not_wider_than_the_window(
    open_page: Open, comparison: Path, width: int
) -> None:
    page = open_page(comparison, width, "dark")
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_runs_of_one_name_are_told_apart_and_recipes_may_agree(
    open_page: Open, tmp_path: Path
) -> None:
    runs = [str(write_run(tmp_path / place / "run", (8,), (0,))) for place in "ab"]
    assert dispatch(["report", *runs, "--out", str(tmp_path / "c.html")]) == 0
    page = open_page(tmp_path / "c.html")
    assert page.locator("h3 bdi").all_inner_texts() == runs
    assert "Their recipes are the same." in page.locator("main").inner_text()


def test_bad_requests_are_one_message(
    saved_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, message in (
        (["report"], "expected the folder of a run"),
        (["report", str(saved_run), "--out", "x.html"], "--out: expected several runs"),
        (["report", str(saved_run), str(tmp_path)], "no run at"),
        (
            ["report", str(saved_run), str(saved_run), "--out", str(tmp_path / "no" / "x")],
            "No such",
        ),
    ):
        assert dispatch(arguments) == 2
        assert message in capsys.readouterr().err


def test_axes_on_one_scale_share_ends_and_ticks() -> None:
    scale = StepAxis((0, 3, 10, 30, 100, 600))
    one = StepAxis((0, 10, 100), scale)
    assert one.range == scale.range
    assert one.ticks == scale.ticks
    assert one.edges[0] == scale.edges[0]
    assert one.position(10) == scale.position(10)
    for left, right in pairwise(one.edges.values()):
        assert left[1] <= right[0]

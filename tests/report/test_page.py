"""The page in a real browser, opened as a file, without a network."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Page

from conftest import Open, until, write_run
from iclens.lab.store import Run, open_run
from iclens.report import write_report
from iclens.report.page import write_page
from iclens.report.reading import Reading

HOSTILE = "<img src=x onerror=alert(1)>\N{RIGHT-TO-LEFT OVERRIDE}名前 " + "long" * 30


@pytest.fixture(scope="session")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run with every kind of cell."""
    statuses = {
        (2, 0): "diverged",
        (8, 0): "unfinished",
        (8, 1): "missing",
        (32, 0): "failed",
        (32, 1): "damaged",
    }
    path = tmp_path_factory.mktemp("runs") / "broken"
    return open_run(write_run(path, (2, 8, 32, "infinite"), (0, 1), statuses))


@pytest.fixture(scope="session")
def broken_report(broken: Run) -> Path:
    return write_page(Reading(broken))


def evaluations(run: Run) -> int:
    return sum(cell.curves.sizes["step"] for cell in run.cells if cell.curves is not None)


def curves(page: Page, chart: str) -> list[dict[str, Any]]:
    page.wait_for_selector(f"#{chart} .scatterlayer", state="attached")
    found: list[dict[str, Any]] = page.evaluate(
        f"document.getElementById('{chart}').data.map(({{name, y}}) => ({{name, y: [...y]}}))"
    )
    return found


def test_map_has_a_cell_for_each_evaluation(open_page: Open, report: Path, saved_run: Path) -> None:
    page = open_page(report)
    run = open_run(saved_run)
    assert page.locator("#map .heat").count() == evaluations(run)
    assert page.locator("#map .row").count() == len(run.cells)
    starts = sum(len(cell["phases"]) for cell in run.phase_map.cells)
    assert page.locator("#map .boundary").count() == starts
    labels = page.locator("#map .bracket text").all_text_contents()
    assert labels == ["K1*", "K2*"]


def test_the_page_of_a_real_run(open_page: Open, first_release: Run, tmp_path: Path) -> None:
    shutil.copytree(first_release.path, tmp_path / "real")
    run = open_run(tmp_path / "real")
    page = open_page(write_report(run))
    assert page.locator("#map .heat").count() == evaluations(run)
    for chart in ("losses", "distances"):
        assert any(None not in curve["y"] for curve in curves(page, chart))
    provenance = page.locator(".provenance").first.inner_text()
    assert "revision" in provenance
    assert "[train]" not in provenance  # the recipe, which is shown beside it
    shown = page.locator("#cells table").inner_text()
    for cell in run.phase_map.cells:
        for phase, step in zip(cell["phases"], cell["steps"], strict=True):
            assert f"{phase} {step:,}" in " ".join(shown.split())


def test_page_is_small_and_soon_there(open_page: Open, report: Path) -> None:
    assert report.stat().st_size < 12e6
    page = open_page(report)
    page.wait_for_selector("#losses .scatterlayer", state="attached")
    # Two seconds are the aim on a free machine; a shared one gets some more.
    assert (
        page.evaluate("performance.timing.domComplete - performance.timing.navigationStart") < 6e3
    )


def test_curves_are_the_saved_ones(open_page: Open, report: Path, saved_run: Path) -> None:
    page = open_page(report)
    page.locator("#choose-chains").select_option("128")
    saved = open_run(saved_run).cell(128, 0).curves
    assert saved is not None
    shown = {curve["name"]: curve["y"] for curve in curves(page, "distances")}
    assert len(shown) == 8
    expected = saved.distance.sel(set="ood", predictor="2-Gen").values.tolist()
    assert shown["2-Gen, OOD"] == pytest.approx(expected, rel=1e-4)
    shown = {curve["name"]: curve["y"] for curve in curves(page, "losses")}
    assert shown["model, ID"] == pytest.approx(saved.loss.sel(set="id").values.tolist(), rel=1e-4)
    level = float(saved.reference_loss.sel(set="id", predictor="2-Mem"))
    assert shown["2-Mem, ID"] == pytest.approx([level] * len(expected), rel=1e-4)


def test_choosing_a_model_changes_the_curves(open_page: Open, report: Path) -> None:
    page = open_page(report)
    before = curves(page, "distances")
    page.locator('#map-row-0 .heat[data-step="20"]').click()
    assert page.locator("#story b").inner_text() == "K = 2, seed 0"
    clicked = curves(page, "distances")
    assert clicked != before
    page.locator("#choose-chains").select_option("512")
    page.locator("#choose-seed").select_option("1")
    assert page.locator("#story b").inner_text() == "K = 512, seed 1"
    chosen = curves(page, "distances")
    assert chosen != clicked
    page.locator("#map > svg").focus()
    page.keyboard.press("ArrowUp")
    assert page.locator("#story b").inner_text() == "K = 512, seed 0"
    assert page.locator('#map [aria-selected="true"]').get_attribute("aria-label") == (
        "K = 512, seed 0: " + page.locator("#story").inner_text().partition(": ")[2]
    )
    assert curves(page, "distances") != chosen


def test_hovering_and_arrow_keys_tell_what_a_cell_is(
    open_page: Open, report: Path, saved_run: Path
) -> None:
    page = open_page(report)
    saved = open_run(saved_run).cell(2, 0).curves
    assert saved is not None
    page.locator('#map-row-0 .heat[data-step="30"]').hover()
    tip = page.locator("#tip").inner_text()
    step = int(saved.step[30])
    assert f"K = 2, seed 0, step {step:,}" in tip
    assert tip.startswith(str(saved.phase.values[30]))
    assert f"{100 * float(saved.composition[30].max()):.0f} %" in tip
    page.locator('#map-row-0 .heat[data-step="10"]').click()
    page.locator("#map > svg").focus()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    step = int(saved.step[8])
    assert f"step {step:,}" in page.locator("#tip").inner_text()
    page.keyboard.press("Escape")
    assert page.locator("#tip").is_hidden()


def marker(page: Page, chart: str) -> float:
    """Where the line of the step that is looked at stands."""
    page.wait_for_selector(f"#{chart} .scatterlayer", state="attached")
    found: float = page.evaluate(f"document.getElementById('{chart}').layout.shapes.at(-1).x0")
    return found


def test_a_step_is_followed_by_everything(open_page: Open, report: Path, saved_run: Path) -> None:
    page = open_page(report)
    saved = open_run(saved_run).cell(32, 1).curves
    page.locator("#choose-chains").select_option("32")
    page.locator("#choose-seed").select_option("1")
    for place in (20, 5):
        page.locator("#choose-step").fill(str(place))
        step = int(saved.step[place])
        now = page.locator("#now").inner_text()
        assert f"K = 32, seed 1, step {step:,}" in now
        assert f"{100 * float(saved.composition[place].max()):.0f} %" in now
        assert page.locator("#shown-step").inner_text() == f"{step:,}"
        for chart in ("losses", "distances"):
            assert marker(page, chart) == pytest.approx(np.log10(step))
        cursor, heat = (
            page.locator(which).bounding_box()
            for which in (".cursor", f'.row[aria-selected="true"] .heat[data-step="{place}"]')
        )
        assert cursor["x"] < heat["x"] < cursor["x"] + cursor["width"]
        assert page.url.endswith(f"#K=32&seed=1&step={step}")
    page.locator("#choose-chains").select_option("512")  # the step stays
    assert page.url.endswith(f"#K=512&seed=1&step={step}")


def test_the_address_links_a_view(open_page: Open, report: Path, saved_run: Path) -> None:
    step = int(open_run(saved_run).cell(64, 1).curves.step[12])
    page = open_page(report, view=f"#K=64&seed=1&step={step}")
    assert f"K = 64, seed 1, step {step:,}" in page.locator("#now").inner_text()
    page.evaluate("location.hash = '#K=8&seed=0'")
    until(page, "document.querySelector('#story b').textContent === 'K = 8, seed 0'")
    assert "step 6,000" in page.locator("#now").inner_text()
    for nonsense in ("#K=7&seed=<img src=x onerror=alert(1)>", "#K=8&step=x"):
        page = open_page(report, view=nonsense)
        assert page.locator("#story b").count() == 1


def test_training_is_played(open_page: Open, report: Path) -> None:
    page = open_page(report, view="#K=2&seed=0&step=6000")
    page.locator("#play").click()
    assert page.locator("#play").inner_text() == "Pause"
    until(page, "+document.getElementById('choose-step').value >= 3")
    page.locator("#play").click()
    at = page.locator("#choose-step").input_value()
    page.wait_for_timeout(400)
    assert page.locator("#choose-step").input_value() == at
    assert page.locator("#play").inner_text() == "Play"


@pytest.mark.parametrize(
    ("which", "width"), [("complete", 400), ("complete", 1600), ("broken", 400)]
)
def test_nothing_is_wider_than_the_window(
    open_page: Open, report: Path, broken_report: Path, which: str, width: int
) -> None:
    page = open_page({"complete": report, "broken": broken_report}[which], width)
    page.wait_for_selector("#losses .scatterlayer", state="attached")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("document.getElementById('cells').scrollWidth") <= width
    boxes = (
        "[...document.querySelectorAll('#map *, .chart svg')].map(e => e.getBoundingClientRect())"
    )
    assert page.evaluate(f"Math.max(...{boxes}.map(box => box.right))") <= width


def test_map_follows_the_window(open_page: Open, report: Path) -> None:
    page = open_page(report, 1600)
    page.set_viewport_size({"width": 500, "height": 900})
    until(
        page,
        "document.querySelector('#map-row-0').getBoundingClientRect().right < 500",
    )


@pytest.mark.slow
def test_dark_mode(open_page: Open, report: Path) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    light, dark = (open_page(report, scheme=scheme) for scheme in ("light", "dark"))
    assert light.evaluate(background) == "rgb(255, 255, 255)"
    assert dark.evaluate(background) == "rgb(17, 20, 24)"
    ink = "document.getElementById('losses').data.at(-1).line.color"
    for page in (light, dark):
        page.wait_for_selector("#losses .scatterlayer", state="attached")
    assert light.evaluate(ink) != dark.evaluate(ink)
    light.emulate_media(color_scheme="dark")
    until(light, f"{ink} === '{dark.evaluate(ink)}'")
    # What is printed from a dark screen is dark on paper.
    dark.emulate_media(media="print")
    until(dark, f"{ink} === '#1b1f24'")
    assert dark.evaluate(background) == "rgb(255, 255, 255)"
    # The phases keep their colours.
    fill = "document.querySelector('#map-row-0 .heat:last-of-type').getAttribute('fill')"
    assert light.evaluate(fill) == dark.evaluate(fill)


def test_hostile_names_are_text(open_page: Open, tmp_path: Path) -> None:
    path = tmp_path / "</script><script>alert(2)<" / HOSTILE
    write_run(path, (8,), (0, 1), {(8, 1): "missing"})
    provenance = {"invocations": [{"device": "</dl><script>alert(3)</script>"}]}
    (path / "provenance.json").write_text(json.dumps(provenance), "utf-8")
    page = open_page(write_page(Reading(open_run(path))), 400)
    page.wait_for_selector("#losses .scatterlayer", state="attached")
    assert page.locator("h1").inner_text() == HOSTILE
    assert page.title() == f"{HOSTILE} · iclens"
    assert page.locator("body img").count() == 0
    assert page.locator(".notice code").inner_text().count("</script>") == 2
    assert "<script>alert(3)" in page.locator(".provenance dd").inner_text()
    assert page.evaluate("document.documentElement.scrollWidth") <= 400


def test_names_that_are_no_text_are_shown_with_question_marks(tmp_path: Path) -> None:
    path = write_run(tmp_path / "caf\udce9", (8,), (0,))
    assert "<bdi>caf?</bdi>" in write_page(Reading(open_run(path))).read_text("utf-8")


def test_page_says_what_is_missing_and_how_to_get_it(
    open_page: Open, broken: Run, broken_report: Path
) -> None:
    page = open_page(broken_report)
    assert page.locator("#map .heat").count() == evaluations(broken)
    counts = page.locator(".counts li").all_inner_texts()
    assert counts == [
        "4 of 8 cells done",
        "1 of them diverged",
        "1 unfinished",
        "1 failed",
        "1 damaged",
        "1 missing",
    ]
    notice = page.locator(".notice").inner_text()
    assert "K = 8, seed 1: missing" in notice
    assert "K = 32, seed 0: failed (MemoryError: 12 GiB <asked> for)" in notice
    assert "does not match its checksum" in notice
    command = page.locator(".notice code").inner_text()
    assert command == f"iclens run {broken.path}/recipe.toml --out {broken.path}"
    assert "diverged at step 645" in page.locator("#cells table").inner_text()
    page.locator("#choose-chains").select_option("32")
    assert page.locator("#story").inner_text() == "K = 32, seed 0: failed"
    assert page.locator("#curves").is_hidden()


def test_infinite_chains_have_no_memorising_references(
    open_page: Open, broken_report: Path
) -> None:
    page = open_page(broken_report)
    page.locator("#choose-chains").select_option("∞")
    names = {curve["name"] for curve in curves(page, "distances")}
    assert names == {"1-Gen, ID", "1-Gen, OOD", "2-Gen, ID", "2-Gen, OOD"}


@pytest.mark.parametrize("status", ["done", "missing"])
def test_run_of_one_cell(open_page: Open, tmp_path: Path, status: str) -> None:
    run = open_run(write_run(tmp_path / "one", (16,), (3,), {(16, 3): status}))
    page = open_page(write_page(Reading(run)))
    assert page.locator("#map .row").count() == 1
    assert page.locator("#map .heat").count() == evaluations(run)
    assert page.locator("#seed-label").is_hidden()
    assert page.locator(".notice").count() == (status == "missing")


def test_page_needs_nothing_from_outside(report: Path) -> None:
    text = report.read_text("utf-8")
    own = text[: text.rindex("<script>")]
    assert not re.search(r'(?:src|href)="(?!data:|#)', own)
    assert not re.search(r"@import|url\((?!#)", own)


def test_recipe_can_be_saved_and_run_again(open_page: Open, report: Path, saved_run: Path) -> None:
    page = open_page(report)
    with page.expect_download() as download:
        page.locator("a[download]").click()
    assert Path(download.value.path()).read_text("utf-8") == open_run(saved_run).recipe_text
    assert page.locator(".command").last.inner_text() == "iclens run recipe.toml --out demo"

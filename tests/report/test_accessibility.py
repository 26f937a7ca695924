"""Readers who do not see, or use no pointer: axe-core finds nothing in the pages."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import pytest
from playwright.sync_api import Page

from conftest import Open, write_run
from iclens.lab.store import Run, open_run
from iclens.report import compare
from iclens.report.page import write_page
from iclens.report.reading import Reading


def findings(page: Page) -> list[str]:
    """What axe-core objects to, with the first place of each."""
    page.evaluate((resources.files("axe_playwright_python") / "axe.min.js").read_text("utf-8"))
    violations = page.evaluate("axe.run().then((found) => found.violations)")
    return [
        f"{found['impact']}: {found['id']}: {found['nodes'][0]['html'][:200]}"
        for found in violations
    ]


@pytest.mark.parametrize(("width", "scheme"), [(400, "light"), (1280, "dark")])
def test_the_page_has_no_findings(
    open_page: Open, first_release: Run, width: int, scheme: str
) -> None:
    page = open_page(first_release.path / "report.html", width, scheme, "#K=2&seed=0&step=600")
    page.wait_for_selector("#losses .scatterlayer", state="attached")
    page.wait_for_selector("#plane .point", state="attached")
    assert findings(page) == []


@pytest.mark.slow
def test_what_is_missing_and_comparisons_have_none_either(open_page: Open, tmp_path: Path) -> None:
    statuses = {(8, 0): "failed", (32, 0): "unfinished"}
    run = open_run(write_run(tmp_path / "run", (8, 32), (0,), statuses))
    page = open_page(write_page(Reading(run)))
    page.wait_for_selector("#predictions tbody tr")
    assert findings(page) == []
    assert findings(open_page(compare([run, run], tmp_path / "c.html"))) == []


def test_axe_finds_what_is_wrong(open_page: Open, tmp_path: Path) -> None:
    path = tmp_path / "bad.html"
    path.write_text("<!doctype html><html><title>x</title><body><img src='data:,'></body></html>")
    assert any("image-alt" in finding for finding in findings(open_page(path)))


def test_the_keyboard_reaches_all_that_can_be_done(open_page: Open, first_release: Run) -> None:
    page = open_page(first_release.path / "report.html", view="#K=2&seed=0&step=600")
    page.wait_for_selector("#predictions tbody tr")
    reached = []
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
    for name in ("svg", "choose-chains", "choose-step", "play", "choose-sequence", "states"):
        assert name in reached

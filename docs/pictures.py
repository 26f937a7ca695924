"""Take the pictures of the README and the gallery from the page of a run.

    python docs/pictures.py [RUN]

`runs/quick` by default, made by the commands in docs/gallery.md.  A browser (chromium) must be on
the path.  Every picture is a part of the page as a reader sees it, where its address leads.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Literal

from playwright.sync_api import sync_playwright

FOLDER = Path(__file__).parent / "pictures"
Scheme = Literal["light", "dark"]
PICTURES: dict[str, tuple[str, str, int, Scheme]] = {
    # file: part of the page, place that is looked at, width of the window, colour scheme
    "task": (".task", "", 1120, "light"),
    "map": ("#map", "K=16&seed=0", 1120, "light"),
    "phases": (".phases", "", 1120, "light"),
    "model": ("#curves", "K=16&seed=0&step=1040", 1120, "light"),
    "inside": ("#inside", "K=512&seed=0&step=6000", 1120, "light"),
    "circuit": ("#traced", "K=16&seed=0&step=6000", 1120, "light"),
    "claims": (".claims", "", 1120, "light"),
    "phone": ("#curves", "K=16&seed=0&step=6000", 400, "dark"),
}
AROUND = 16
"""Pixels of the page around a part."""


def main() -> None:
    run = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/quick")
    page_path = (run / "report.html").resolve()
    if not page_path.is_file():
        sys.exit(f"{page_path} is not there: make it with `iclens report {run}`")
    executable = shutil.which("chromium") or shutil.which("google-chrome")
    if executable is None:
        sys.exit("no browser: neither chromium nor google-chrome is on the path")
    FOLDER.mkdir(exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        for name, (part, place, width, scheme) in PICTURES.items():
            page = browser.new_page(
                viewport={"width": width, "height": 4000},  # so that nothing is stuck to its top
                color_scheme=scheme,
                reduced_motion="reduce",
            )
            page.goto(f"{page_path.as_uri()}#{place}")
            page.wait_for_selector("#losses .scatterlayer", state="attached")
            page.wait_for_selector("#plane .point", state="attached")
            box = page.locator(part).bounding_box()
            assert box is not None
            left, top = max(0, box["x"] - AROUND), box["y"] - AROUND
            clip = {
                "x": left,
                "y": top,
                "width": min(width - left, box["width"] + 2 * AROUND),
                "height": box["height"] + 2 * AROUND,
            }
            page.screenshot(path=FOLDER / f"{name}.png", clip=clip, full_page=True)
            print(FOLDER / f"{name}.png")
            page.close()
        browser.close()


if __name__ == "__main__":
    main()

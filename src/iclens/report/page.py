"""`report.html`: one offline file that explains a run.

The words and tables are written in `sections`, the map, the curves and the inside of the models
drawn by the scripts in `assets` from the data of `payload`.
"""

from __future__ import annotations

import gzip
import json
import shlex
from base64 import b64encode
from collections.abc import Sequence
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any
from urllib.parse import quote

from plotly.offline import get_plotlyjs

from iclens import __version__
from iclens.lab.files import write_file
from iclens.report import sections
from iclens.report.blocks import cell_blocks
from iclens.report.payload import model_data, run_data
from iclens.report.pictures import task_picture
from iclens.report.reading import REFERENCES, Reading
from iclens.report.style import DARK, LIGHT, PHASE_COLOURS

SCRIPTS = ("core", "map", "curves", "model", "patterns", "circuit", "inside", "page")


def write_page(reading: Reading) -> Path:
    """Write `report.html` into the run's folder and return its path."""
    path = reading.run.path / "report.html"
    # A folder's name may hold bytes that are no text; they become question marks.
    write_file(path, render_page(reading).encode("utf-8", "replace"))
    return path


def render_page(reading: Reading) -> str:
    """The page as HTML."""
    run = reading.run
    blocks = [*cell_blocks(reading), b64encode(gzip.compress(get_plotlyjs().encode())).decode()]
    names = [*(f"cell-{place}" for place in range(len(run.cells))), "plotly"]
    return Template(asset("page.html")).substitute(
        version=escape(__version__),
        name=escape(run.name),
        variables=variables(),
        css=asset("page.css") + asset("pictures.css"),
        lead=escape(sections.lead(run)),
        facts=escape(sections.facts(run)),
        counts=sections.counts(reading),
        task=task_picture(reading),
        missing=sections.missing(reading),
        legend=sections.legend(),
        brackets=sections.brackets(reading),
        keys="".join(
            f'<li><i class="line" style="border-color: var(--{phase})"></i>{reference}</li>'
            for reference, phase in REFERENCES.items()
        ),
        thresholds=sections.thresholds(reading),
        circuits=sections.circuits(reading),
        claims=sections.claims(reading),
        theory=sections.theory(run.path / "theory"),
        table="".join(sections.row(reading, cell) for cell in run.cells),
        download=f"data:text/plain;charset=utf-8,{quote(run.recipe_text)}",
        chains=sections.chains_file(run),
        reproduce=escape(shlex.join(["iclens", "run", "recipe.toml", "--out", run.name])),
        recipe=escape(run.recipe_text),
        provenance=sections.provenance(run.provenance),
        data=embedded({"run": run_data(reading), "model": model_data(reading)}),
        script=script(SCRIPTS),
        blocks="".join(
            f'<script type="application/gzip" id="{name}">{block}</script>\n'
            for name, block in zip(names, blocks, strict=True)
        ),
    )


def asset(name: str) -> str:
    """A file of the page by its name."""
    return resources.files("iclens.report").joinpath("assets", name).read_text("utf-8")


def script(names: Sequence[str]) -> str:
    """Scripts as one, whose names nothing outside can see."""
    return '"use strict";\n(() => {\n' + "\n".join(asset(f"{name}.js") for name in names) + "})();"


def embedded(data: dict[str, Any]) -> str:
    """Elements with data as JSON, in which a string may hold </script> or <!--."""
    return "".join(
        f'<script type="application/json" id="{name}">'
        f"{json.dumps(content, allow_nan=False).replace('<', chr(92) + 'u003c')}</script>\n"
        for name, content in data.items()
    )


def variables() -> str:
    """The colours as CSS variables, for light and dark."""

    def block(colours: dict[str, str]) -> str:
        return "; ".join(f"--{name}: {colour}" for name, colour in colours.items())

    return (
        f":root {{ {block({**LIGHT, **PHASE_COLOURS})} }}\n"
        f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {block(DARK)} }} }}"
    )

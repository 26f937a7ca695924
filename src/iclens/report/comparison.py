"""`comparison.html`: runs side by side, their maps on a common scale, in one offline file."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from iclens import __version__
from iclens.lab.files import write_file
from iclens.lab.store import Run
from iclens.phases import float_diversity
from iclens.report import sections
from iclens.report.page import asset, embedded, script, variables
from iclens.report.payload import run_data
from iclens.report.reading import Reading, StepAxis, diversity_text


def write_comparison(runs: Sequence[Run], path: Path) -> Path:
    """Write the comparison of runs to `path` and return it."""
    write_file(path, render_comparison(runs).encode("utf-8", "replace"))
    return path


def render_comparison(runs: Sequence[Run]) -> str:
    """The comparison as HTML.

    Rows of all maps are the K of any of the runs, and all have one axis of steps.
    """
    readings = [Reading(run) for run in runs]
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        names = [str(run.path) for run in runs]
    steps = {step for reading in readings for step in reading.axis.steps}
    scale = StepAxis(tuple(sorted(steps)))
    diversities = {cell.chains for run in runs for cell in run.cells}
    shown = [diversity_text(chains) for chains in sorted(diversities, key=float_diversity)]
    data = [
        {
            **run_data(reading, StepAxis(reading.axis.steps, scale)),
            "diversities": shown,
        }
        for reading in readings
    ]
    return Template(asset("comparison.html")).substitute(
        version=escape(__version__),
        variables=variables(),
        css=asset("page.css") + asset("pictures.css"),
        count=len(runs),
        maps="".join(
            f'<div class="run"><h3><bdi>{escape(name)}</bdi></h3>'
            f'<p class="facts">{escape(sections.facts(reading.run))}</p>'
            f'<ul class="counts" aria-label="Cells of the run">{sections.counts(reading)}</ul>'
            f'<div id="map-{place}" class="map"></div>'
            f'<div id="now-{place}" class="now"></div></div>'
            for place, (name, reading) in enumerate(zip(names, readings, strict=True))
        ),
        legend=sections.legend(),
        thresholds="".join(
            f'<tr><th scope="row"><bdi>{escape(name)}</bdi></th>{_thresholds(reading)}</tr>'
            for name, reading in zip(names, readings, strict=True)
        ),
        symbols="".join(f'<th scope="col">{sections.symbol(n)}</th>' for n in sections.THRESHOLDS),
        differences=_differences(names, runs),
        data=embedded({"runs": data}),
        script=script(("core", "map", "comparison")),
    )


def _thresholds(reading: Reading) -> str:
    """The brackets of a run, and what was fitted, as cells of a table."""
    cells = []
    for name, threshold in reading.run.phase_map.thresholds.items():
        text = "not known"
        if threshold["bracket"] is not None:
            text = sections.bracket(name, *threshold["bracket"])
        cells.append(f"<td>{text}{sections.fitted(reading, name)}</td>")
    return "".join(cells)


def _differences(names: Sequence[str], runs: Sequence[Run]) -> str:
    """A table of the keys in which the recipes differ."""
    recipes = [_keys(run) for run in runs]
    keys = dict.fromkeys(key for recipe in recipes for key in recipe)
    differing = [key for key in keys if len({str(recipe.get(key)) for recipe in recipes}) > 1]
    if not differing:
        return "<p>Their recipes are the same.</p>"
    heads = "".join(f'<th scope="col"><bdi>{escape(name)}</bdi></th>' for name in names)
    rows = "".join(
        f'<tr><th scope="row"><code>{escape(key)}</code></th>'
        + "".join(f"<td>{escape(_value(recipe.get(key)))}</td>" for recipe in recipes)
        + "</tr>"
        for key in differing
    )
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="What differs in the recipes">'
        f'<table class="compared"><thead><tr><th scope="col">Key</th>{heads}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _keys(run: Run) -> dict[str, Any]:
    """A recipe as `section.key`, but for where it was done."""
    tables = tomllib.loads(run.recipe.to_toml())
    return {
        f"{section}.{key}": value
        for section, table in tables.items()
        for key, value in table.items()
        if section != "cluster"
    }


def _value(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value).lower()

"""`report.html`: one offline file that explains a run.

The words and tables are written here, the map and the curves drawn by `page.js` from the data that
this module embeds.  Whatever comes from the run is escaped: names are text everywhere.
"""

from __future__ import annotations

import json
import shlex
from base64 import b64encode
from collections import Counter
from collections.abc import Iterable
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any
from urllib.parse import quote

import numpy as np
import xarray as xr
from plotly.offline import get_plotlyjs

from iclens import __version__
from iclens.lab.cell import Cell
from iclens.lab.files import write_file
from iclens.lab.recipe import Diversity, Recipe
from iclens.lab.store import Run
from iclens.report.reading import REFERENCES, Reading, diversity_text
from iclens.report.style import DARK, LIGHT, PHASE_COLOURS, blend, contrast
from iclens.report.theory import DRAWINGS, read_results

NO_BREAK = "\N{NO-BREAK SPACE}"
MEANINGS = {
    "G1": "predicts each state as often as it has occurred in the context, whatever the current "
    "state: it generalises from one-point statistics.",
    "G2": "predicts what has followed the current state so far in the context: it generalises from "
    "two-point statistics.",
    "M1": "recognises which training chain it sees by how often each state occurs, then uses that "
    "chain's transitions: it memorises, from one-point statistics.",
    "M2": "recognises which training chain it sees by what follows what, then uses that chain's "
    "transitions: it memorises, from two-point statistics. Nothing does better on these chains.",
}
THRESHOLDS = {
    "K1*": "Where training begins to visit G2 on the way.",
    "K2*": "Where training no longer ends in M2.",
}


def write_page(reading: Reading) -> Path:
    """Write `report.html` into the run's folder and return its path."""
    path = reading.run.path / "report.html"
    # A folder's name may hold bytes that are no text; they become question marks.
    write_file(path, render_page(reading).encode("utf-8", "replace"))
    return path


def render_page(reading: Reading) -> str:
    """The page as HTML."""
    run = reading.run
    asset = {
        name: resources.files("iclens.report").joinpath(f"page.{name}").read_text("utf-8")
        for name in ("html", "css", "js")
    }
    return Template(asset["html"]).substitute(
        version=escape(__version__),
        name=escape(run.name),
        variables=_variables(),
        css=asset["css"],
        lead=escape(_lead(run.recipe)),
        facts=escape(_facts(run)),
        counts=_counts(reading),
        missing=_missing(reading),
        legend=_legend(),
        brackets=_brackets(reading),
        keys="".join(
            f'<li><i class="line" style="border-color: var(--{phase})"></i>{reference}</li>'
            for reference, phase in REFERENCES.items()
        ),
        thresholds=_thresholds(reading),
        theory=_theory(run.path / "theory"),
        table="".join(_row(reading, cell) for cell in reading.run.cells),
        download=f"data:text/plain;charset=utf-8,{quote(run.recipe_text)}",
        reproduce=escape(shlex.join(["iclens", "run", "recipe.toml", "--out", run.name])),
        recipe=escape(run.recipe_text),
        provenance=_provenance(run.provenance),
        # JSON may hold </script> or <!-- in a string, which would end the element.
        data=json.dumps(_data(reading), allow_nan=False).replace("<", "\\u003c"),
        script=asset["js"],
        plotly=get_plotlyjs(),
    )


def _variables() -> str:
    def block(colours: dict[str, str]) -> str:
        return "; ".join(f"--{name}: {colour}" for name, colour in colours.items())

    return (
        f":root {{ {block({**LIGHT, **PHASE_COLOURS})} }}\n"
        f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {block(DARK)} }} }}"
    )


def _on(phase: str) -> str:
    """The colour of text on a phase's colour."""
    colours = (LIGHT["surface"], LIGHT["ink"])
    return max(colours, key=lambda colour: contrast(colour, PHASE_COLOURS[phase]))


def _chip(phase: str) -> str:
    style = f"background: {PHASE_COLOURS[phase]}; color: {_on(phase)}"
    return f'<span class="chip" style="{style}">{phase}</span>'


def _lead(recipe: Recipe) -> str:
    """What was trained, in a sentence."""
    model, task, chains = recipe.model, recipe.task, recipe.sweep.chains
    block = f"{model.heads} attention head{'s' * (model.heads > 1)}"
    block += "" if model.attention_only else " and an MLP"
    finite = sorted(count for count in chains if count != "infinite")
    seen = ["fresh chains without end"] if "infinite" in chains else []
    if finite:
        span = f"K = {diversity_text(finite[0])}".replace(" ", NO_BREAK)
        span += f" to {diversity_text(finite[-1])}" if len(finite) > 1 else ""
        seen.insert(0, f"sequences of a fixed set of K chains ({span})")
    return (
        f"Transformers of {model.layers} layer{'s' * (model.layers > 1)}, each with {block}, and "
        f"width {model.width} learn to predict the next state of Markov chains with {task.states} "
        f"states, from up to {task.context} states of context; each model trains on "
        f"{' or on '.join(seen)}."
    )


def _facts(run: Run) -> str:
    train, cells = run.recipe.train, run.cells
    name = {"adam": "Adam", "adamw": "AdamW", "sgd": "SGD"}[train.optimizer]
    diversities, seeds = {cell.chains for cell in cells}, {cell.seed for cell in cells}
    models = f"{len(cells)} models: {len(diversities)} values of K"
    if run.recipe.sweep.refine:
        models += ", chosen to find the thresholds"
    else:
        models += f" with {len(seeds)} seed{'s' * (len(seeds) > 1)} each"
    return (
        f"{'1 model' if len(cells) == 1 else models}; {train.steps:,} optimizer steps of "
        f"{name} at learning rate {train.learning_rate:g}"
        f"{'' if train.schedule == 'constant' else ' (cosine schedule)'}, "
        f"{train.batch} sequences a step."
    )


def _counts(reading: Reading) -> str:
    diverged = [reading.outcome(cell).startswith("diverged") for cell in reading.run.cells]
    statuses = Counter(cell.status for cell in reading.run.cells)
    entries = [f"<li>{statuses['done']} of {len(diverged)} cells done</li>"]
    if any(diverged):
        entries.append(f'<li class="wanting">{sum(diverged)} of them diverged</li>')
    for status in ("unfinished", "failed", "damaged", "missing"):
        if statuses[status]:
            entries.append(f'<li class="wanting">{statuses[status]} {status}</li>')
    return "".join(entries)


def _missing(reading: Reading) -> str:
    """What is not there and the command that gets it; empty where nothing is missing."""
    cells = [cell for cell in reading.run.cells if cell.status != "done"]
    if not cells:
        return ""
    items = []
    for cell in cells:
        text = f"K = {diversity_text(cell.chains)}, seed {cell.seed}: {reading.outcome(cell)}"
        lines = (cell.error or "").strip().splitlines()
        # The last line of a traceback names the error.
        items.append(f"<li>{escape(text + (f' ({lines[-1]})' if lines else ''))}</li>")
    return (
        '<aside class="notice" aria-label="What is missing">'
        f"<h2>{len(cells)} of {len(reading.run.cells)} cells are not done</h2>"
        f"<ul>{''.join(items)}</ul>"
        "<p>This command computes what is missing and goes on with what was stopped; "
        "cells that are done are kept:</p>"
        f'<pre class="command"><code>{escape(reading.run.resume_command)}</code></pre></aside>'
    )


def _legend() -> str:
    return "".join(
        f"<div><dt>{_chip(phase)}</dt><dd><b>{reference}</b> {MEANINGS[phase]}</dd></div>"
        for reference, phase in REFERENCES.items()
    )


def _symbol(name: str) -> str:
    return f"{name[0]}<sub>{name[1]}</sub>{name[2]}"


def _symbols(text: str) -> str:
    """A text of ours in which the names of thresholds and exponents become symbols."""
    for name in THRESHOLDS:
        text = text.replace(name, _symbol(name))
    return text.replace("^-gamma", "<sup>&minus;&#947;</sup>").replace("gamma", "&#947;")


def _brackets(reading: Reading) -> str:
    shown = " and ".join(_symbol(bracket.name) for bracket in reading.brackets)
    return shown and f"Brackets on the right: the K between which {shown} must lie."


def _thresholds(reading: Reading) -> str:
    """Both thresholds as a list: between which K each lies, and for each seed if seeds differ."""
    entries = []
    for name, threshold in reading.run.phase_map.thresholds.items():
        head = f"{_symbol(name)} is not known"
        seeds = ""
        if threshold["bracket"] is not None:
            head = _between(name, *threshold["bracket"])
            each = {e["seed"]: _between(name, e["low"], e["high"]) for e in threshold["per_seed"]}
            if set(each.values()) != {head}:
                seeds = "; ".join(f"seed {seed}: {text}" for seed, text in each.items())
                seeds = f"By seed: {seeds}."
        note = escape(threshold["note"])
        entries.append(
            f"<div><dt>{head}</dt><dd>{THRESHOLDS[name]} "
            f"{note[:1].upper()}{note[1:]}. {seeds}</dd></div>"
        )
    return f'<dl class="thresholds">{"".join(entries)}</dl>'


def _between(name: str, low: Diversity | None, high: Diversity | None) -> str:
    if low is None:
        text = "not known" if high is None else f"{_symbol(name)} ≤ {diversity_text(high)}"
    elif high is None:
        text = f"{_symbol(name)} &gt; {diversity_text(low)}"
    else:
        text = f"{diversity_text(low)} &lt; {_symbol(name)} ≤ {diversity_text(high)}"
    return text.replace(" ", NO_BREAK)


def _row(reading: Reading, cell: Cell) -> str:
    phases = "".join(
        f'<span class="phase-step">{_chip(phase)} {step:,}</span>'
        for phase, step in reading.begins(cell)
    )
    empty = "" if cell.curves is None else "no phase yet"
    return (
        f'<tr><td class="number">{diversity_text(cell.chains)}</td>'
        f'<td class="number">{cell.seed}</td>'
        f"<td>{phases or empty}</td><td>{escape(reading.outcome(cell))}</td></tr>"
    )


def _theory(folder: Path) -> str:
    """The results of the theory that a run has, and the commands that make the others."""
    results = read_results(folder)
    shown: list[str] = []
    wanting: dict[str, list[str]] = {}
    for name, drawing in DRAWINGS.items():
        result = results.get(name, "")
        if isinstance(result, str):
            command = drawing.command.format(
                run=shlex.quote(str(folder.parent)), out=shlex.quote(str(folder))
            )
            title = f"{drawing.title} ({result})" if result else drawing.title
            wanting.setdefault(f"iclens theory {command}", []).append(title)
            continue
        image = b64encode((folder / "figures" / f"{name}.svg").read_bytes()).decode()
        caption = escape(drawing.caption(result))
        shown.append(
            f'<figure><img src="data:image/svg+xml;base64,{image}" alt="{caption}"><figcaption>'
            f"<b>{_symbols(drawing.title)}</b> {_symbols(caption)}</figcaption></figure>"
        )
    found = f'<div class="theory">{"".join(shown)}</div>' if shown else ""
    commands = "".join(
        f"<li>{_symbols(escape('; '.join(titles)))}: <code>{escape(command)}</code></li>"
        for command, titles in wanting.items()
    )
    return found + (
        f"<details{'' if shown else ' open'}><summary>Not computed for this run</summary>"
        f'<ul class="commands">{commands}</ul></details>'
        if commands
        else ""
    )


def _provenance(provenance: dict[str, Any]) -> str:
    """The latest invocation, earlier ones folded away; the recipe is shown beside it."""
    invocations = provenance.get("invocations") or [provenance]
    lists = [
        '<dl class="provenance">'
        + "".join(
            f"<dt>{escape(key)}</dt><dd>{escape(text)}</dd>"
            for key, text in _flat({key: entry[key] for key in entry if key != "recipe"})
        )
        + "</dl>"
        for entry in invocations
    ]
    if not any(invocations):
        return "<p>None was saved with this run.</p>"
    earlier = "".join(reversed(lists[:-1]))
    fold = f"<details><summary>{len(lists) - 1} earlier</summary>{earlier}</details>"
    return lists[-1] + (fold if earlier else "")


def _flat(value: Any, name: str = "") -> Iterable[tuple[str, str]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(inner, f"{name} {key}".strip().replace("_", " "))
    else:
        yield name, "not known" if value is None else str(value)


def _data(reading: Reading) -> dict[str, Any]:
    """What `page.js` draws."""
    axis = reading.axis
    labelled, small = axis.ticks
    return {
        "axis": {
            "steps": axis.steps,
            "at": [axis.position(step) for step in axis.steps],
            "left": [axis.edges[step][0] for step in axis.steps],
            "right": [axis.edges[step][1] for step in axis.steps],
            "range": axis.range,
            "ticks": [{"at": axis.position(step), "label": f"{step:,}"} for step in labelled],
            "small": [axis.position(step) for step in small],
        },
        "phases": {
            phase: {"reference": reference, "colour": PHASE_COLOURS[phase], "text": _on(phase)}
            for reference, phase in REFERENCES.items()
        },
        "cells": [_cell_data(reading, cell) for cell in reading.run.cells],
        "brackets": [
            {
                "name": bracket.name,
                "low": None if bracket.low is None else diversity_text(bracket.low),
                "high": None if bracket.high is None else diversity_text(bracket.high),
                "lane": bracket.lane,
            }
            for bracket in reading.brackets
        ],
        "uniform": float(np.log(reading.run.recipe.task.states)),
    }


def _cell_data(reading: Reading, cell: Cell) -> dict[str, Any]:
    curves = cell.curves
    data: dict[str, Any] = {
        "chains": diversity_text(cell.chains),
        "seed": cell.seed,
        "steps": 0 if curves is None else curves.sizes["step"],
        "complete": cell.status == "done" and reading.outcome(cell) == "finished",
        "outcome": reading.outcome(cell),
        "begins": reading.begins(cell),
    }
    if curves is None:
        return data
    known = np.isfinite(curves.residual.values)
    colours = blend(np.where(known[:, None], curves.composition.values, 0))
    return data | {
        "colours": [colour if ok else None for colour, ok in zip(colours, known, strict=True)],
        "phase": curves.phase.values.tolist(),
        "ood": curves.phase_ood.values.tolist(),
        "clear": curves.clear.values.astype(bool).tolist(),
        "margin": _numbers(curves.margin),
        "error": _numbers(curves.margin_error),
        "residual": _numbers(curves.residual),
        "composition": _numbers(curves.composition.transpose("predictor", "step")),
        "distance": _by_set(curves.distance.transpose(..., "predictor", "step")),
        "loss": _by_set(curves.loss),
        "reference": _by_set(curves.reference_loss),
    }


def _by_set(values: xr.DataArray) -> dict[str, Any]:
    return {kind: _numbers(values.sel(set=kind)) for kind in ("id", "ood")}


def _numbers(values: Any) -> Any:
    """Nested lists with five significant digits; what is not finite becomes null."""
    array = np.asarray(values, dtype=float)
    if array.ndim:
        return [_numbers(row) for row in array]
    return float(f"{array:.5g}") if np.isfinite(array) else None

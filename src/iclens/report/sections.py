"""The sections of the page, as HTML.

Whatever comes from the run is escaped: names are text everywhere.
"""

from __future__ import annotations

import shlex
from base64 import b64encode
from collections import Counter
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

import xarray as xr

from iclens.lab.cell import Cell
from iclens.lab.recipe import Diversity
from iclens.lab.source import chains_of
from iclens.lab.store import Run
from iclens.lab.trace import stretches
from iclens.report.claims import findings
from iclens.report.payload import trace_command
from iclens.report.pictures import phase_picture
from iclens.report.reading import REFERENCES, Reading, between, diversity_text
from iclens.report.style import PHASE_COLOURS, text_on
from iclens.report.theory import DRAWINGS, describe_interval, read_results
from iclens.report.verdicts import counted

LARGEST_LINK = 1_000_000
"""Bytes of a file of chains that the page can hold."""
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


def chip(phase: str) -> str:
    style = f"background: {PHASE_COLOURS[phase]}; color: {text_on(phase)}"
    return f'<span class="chip" style="{style}">{phase}</span>'


def lead(run: Run) -> str:
    """What was trained, in a sentence."""
    recipe = run.recipe
    model, task, chains = recipe.model, recipe.task, recipe.sweep.chains
    block = f"{model.heads} attention head{'s' * (model.heads > 1)}"
    block += "" if model.attention_only else " and an MLP"
    finite = sorted(count for count in chains if count != "infinite")
    seen = ["fresh chains without end"] if "infinite" in chains else []
    if finite:
        span = f"K = {diversity_text(finite[0])}".replace(" ", NO_BREAK)
        span += f" to {diversity_text(finite[-1])}" if len(finite) > 1 else ""
        seen.insert(0, f"sequences of a fixed set of K chains ({span})")
    which, learn, trains = (
        ("A transformer", ", trained elsewhere, predicts", "it is measured")
        if run.imported
        else ("Transformers", " learn to predict", "each model trains")
    )
    return (
        f"{which} of {model.layers} layer{'s' * (model.layers > 1)}, each with {block}, and "
        f"width {model.width}{learn} the next state of Markov chains with {task.states} "
        f"states, from up to {task.context} states of context; {trains} on "
        f"{' or on '.join(seen)}."
    )


def facts(run: Run) -> str:
    if source := run.imported:
        return (
            f"1 model, imported from {Path(source['file']).name} (SHA-256 "
            f"{source['sha256'][:12]}…), without a history of its training."
        )
    train, cells = run.recipe.train, run.cells
    name = {"adam": "Adam", "adamw": "AdamW", "sgd": "SGD"}[train.optimizer]
    diversities, seeds = {cell.chains for cell in cells}, {cell.seed for cell in cells}
    models = f"{counted(len(cells), 'model')}: {counted(len(diversities), 'value')} of K"
    if run.recipe.sweep.refine:
        models += ", chosen to find the thresholds"
    else:
        models += f" with {len(seeds)} seed{'s' * (len(seeds) > 1)} each"
    return (
        f"{'1 model' if len(cells) == 1 else models}; {train.steps:,} optimizer steps of "
        f"{name} at learning rate {train.learning_rate:g}"
        f"{'' if train.schedule == 'constant' else ' (cosine schedule)'}, "
        f"{train.batch} sequences a step. {_chains(run)}"
    )


def chains_file(run: Run) -> str:
    """A link with the chains of a run that has them from a file; they are beside its recipe."""
    if not run.recipe.task.chains:
        return ""
    path = Path(run.recipe.task.chains)
    name, content = escape(path.name), path.read_bytes()
    if len(content) > LARGEST_LINK:
        return f", and <code>{name}</code> from the folder of this run beside it"
    data = f"data:application/octet-stream;base64,{b64encode(content).decode()}"
    return f' and its chains as <a download="{name}" href="{data}">{name}</a> beside it'


def _chains(run: Run) -> str:
    """Where the chains come from, what their states are called, and what 2-Gen knows of them."""
    chains, note = chains_of(run.recipe), run.cells[0].prior.two_gen
    note = f"{note[0].upper()}{note[1:]}."
    if chains is None:
        return note
    names = ", ".join(f"{state} = {name}" for state, name in enumerate(chains.labels or ()))
    named = f" States: {names}." if names else ""
    source = f"Training chains are from a file of {counted(chains.count, 'chain')}."
    return f"{source}{named} {note}"


def counts(reading: Reading) -> str:
    diverged = [reading.outcome(cell).startswith("diverged") for cell in reading.run.cells]
    statuses = Counter(cell.status for cell in reading.run.cells)
    entries = [f"<li>{statuses['done']} of {len(diverged)} cells done</li>"]
    if any(diverged):
        entries.append(f'<li class="wanting">{sum(diverged)} of them diverged</li>')
    for status in ("unfinished", "failed", "damaged", "missing"):
        if statuses[status]:
            entries.append(f'<li class="wanting">{statuses[status]} {status}</li>')
    return "".join(entries)


def missing(reading: Reading) -> str:
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


def legend() -> str:
    """What each phase computes: a sentence and a picture."""
    return "".join(
        f"<div><dt>{chip(phase)}</dt><dd><b>{reference}</b> {MEANINGS[phase]} "
        f"{phase_picture(phase)}</dd></div>"
        for reference, phase in REFERENCES.items()
    )


def symbol(name: str) -> str:
    return f"{name[0]}<sub>{name[1]}</sub>{name[2]}"


def symbols(text: str) -> str:
    """A text of ours in which the names of thresholds and exponents become symbols."""
    for name in THRESHOLDS:
        text = text.replace(name, symbol(name))
    return text.replace("^-gamma", "<sup>&minus;&#947;</sup>").replace("gamma", "&#947;")


def brackets(reading: Reading) -> str:
    shown = " and ".join(symbol(bracket.name) for bracket in reading.brackets)
    fits = " Dots and bands: fitted values with their 95 % intervals." if reading.fits else ""
    return shown and f"Brackets on the right: the K between which {shown} must lie.{fits}"


def thresholds(reading: Reading) -> str:
    """Both thresholds as a list: between which K each lies, and for each seed if seeds differ."""
    entries = []
    for name, threshold in reading.run.phase_map.thresholds.items():
        head = f"{symbol(name)} is not known"
        seeds = ""
        if threshold["bracket"] is not None:
            head = bracket(name, *threshold["bracket"])
            each = {e["seed"]: bracket(name, e["low"], e["high"]) for e in threshold["per_seed"]}
            if set(each.values()) != {head}:
                seeds = "; ".join(f"seed {seed}: {text}" for seed, text in each.items())
                seeds = f"By seed: {seeds}."
        note = escape(threshold["note"])
        entries.append(
            f"<div><dt>{head}{fitted(reading, name)}</dt><dd>{THRESHOLDS[name]} "
            f"{note[:1].upper()}{note[1:]}. {seeds}</dd></div>"
        )
    return f'<dl class="thresholds">{"".join(entries)}</dl>'


def fitted(reading: Reading, name: str) -> str:
    """What was fitted to a threshold, if anything."""
    if name not in reading.fits:
        return ""
    return f" <small>fitted: {escape(describe_interval(*reading.fits[name]))}</small>"


def bracket(name: str, low: Diversity | None, high: Diversity | None) -> str:
    """The K between which a threshold lies."""
    return symbols(escape(between(name, low, high))).replace(" ", NO_BREAK)


def row(reading: Reading, cell: Cell) -> str:
    phases = "".join(
        f'<span class="phase-step">{chip(phase)} {step:,}</span>'
        for phase, step in reading.begins(cell)
    )
    empty = "" if cell.curves is None else "no phase yet"
    return (
        f'<tr><td class="number">{diversity_text(cell.chains)}</td>'
        f'<td class="number">{cell.seed}</td>'
        f"<td>{phases or empty}</td><td>{escape(reading.outcome(cell))}</td></tr>"
    )


def theory(folder: Path) -> str:
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
            f"<b>{symbols(drawing.title)}</b> {symbols(caption)}</figcaption></figure>"
        )
    found = f'<div class="theory">{"".join(shown)}</div>' if shown else ""
    commands = "".join(
        f"<li>{symbols(escape('; '.join(titles)))}: <code>{escape(command)}</code></li>"
        for command, titles in wanting.items()
    )
    return found + (
        f"<details{'' if shown else ' open'}><summary>Not computed for this run</summary>"
        f'<ul class="commands">{commands}</ul></details>'
        if commands
        else ""
    )


def circuits(reading: Reading) -> str:
    """When each mechanism was there, in the models that were traced; what is damaged."""
    rows = []
    for cell in reading.run.cells:
        if cell.name not in reading.traces:
            continue
        trace = reading.traces[cell.name]
        last = trace.isel(step=-1)
        passes = "".join(f"<td>{_passes(trace, name)}</td>" for name in MECHANISMS)
        rows.append(
            f'<tr><td class="number">{diversity_text(cell.chains)}</td>'
            f'<td class="number">{cell.seed}</td>{passes}'
            f"<td>{int(last.circuit.sum())} of {trace.sizes['edge']} edges keep "
            f"{100 * float(last.faithfulness):.0f} % at step {int(last.step):,}</td></tr>"
        )
    damaged = "".join(f"<li>{escape(fault)}</li>" for fault in reading.damaged_traces)
    faults = f'<ul class="commands">{damaged}</ul>' if damaged else ""
    if not rows:
        command = trace_command(reading)
        if not command:
            return faults + "<p>iclens traces models of at least two layers with MLPs only.</p>"
        return faults + (
            "<p>No model of this run was traced. This command does it for one:</p>"
            f'<pre class="command"><code>{escape(command)} --chains K --step all</code></pre>'
        )
    heads = "".join(
        f'<th scope="col">{name[0].upper()}{name[1:]} passes</th>' for name in MECHANISMS
    )
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="Circuits of traced models">'
        '<table><thead><tr><th scope="col" class="number">K</th>'
        f'<th scope="col" class="number">Seed</th>{heads}<th scope="col">Circuit</th></tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>{faults}"
    )


MECHANISMS = ("statistical induction head", "task recognition head")


def _passes(trace: xr.Dataset, mechanism: str) -> str:
    """The stretches of traced steps at which a mechanism passes, with the phases there."""
    if not any(name.startswith(mechanism) for name in trace.criterion.values.tolist()):
        return "not tested: it needs MLPs"
    texts = []
    for first, last in stretches(trace, mechanism):
        between = trace.sel(step=slice(first, last))
        phases = " ".join(
            chip(phase) if phase in MEANINGS else escape(phase)
            for phase in dict.fromkeys(between.phase.values.tolist())
        )
        steps = f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"
        texts.append(f"{steps} {phases}")
    traced = trace.sizes["step"]
    return "; ".join(texts) or f"at none of {traced} traced step{'s' * (traced > 1)}"


def claims(reading: Reading) -> str:
    """What the paper says beside what this run shows."""
    found = findings(reading, read_results(reading.run.path / "theory"), [*reading.traces.values()])
    rows = "".join(
        f"<tr><td>{symbols(escape(finding.claim))}</td><td>{symbols(escape(finding.shows))}"
        + (f" <code>{escape(finding.command)}</code>" if finding.command else "")
        + f'</td><td class="verdict {finding.verdict.split()[0]}">{finding.verdict}</td></tr>'
        for finding in found
    )
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="The paper and this run">'
        '<table class="claims"><thead><tr><th scope="col">The paper says</th>'
        f'<th scope="col">This run shows</th><th scope="col">Verdict</th></tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def provenance(provenance: dict[str, Any]) -> str:
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

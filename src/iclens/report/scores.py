"""Scores of any model: figures, and one offline page that needs no scripts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from html import escape
from pathlib import Path
from string import Template

import matplotlib
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from iclens import __version__
from iclens.lab.files import save_result, write_file
from iclens.phases import NO_PHASE
from iclens.report import sections
from iclens.report.page import asset, variables
from iclens.report.plates import COLUMN, Plate, save_plates
from iclens.report.reading import REFERENCES
from iclens.report.style import DARK, LIGHT, PHASE_COLOURS
from iclens.scoring import SETS

LINEAR_BELOW = 0.01
"""Nats below which the axis of distances is linear, so that 0 has a place on it."""


def save_scores(scores: xr.Dataset, folder: Path) -> list[Path]:
    """Write `score.nc`, the page and the figures into a folder; returns the paths."""
    paths = [save_result(folder, "score", scores)]
    plates = score_plates(scores)
    # The bytes of a folder's name that are no text become question marks.
    paths.append(folder / "score.html")
    write_file(paths[-1], render_scores(scores, plates).encode("utf-8", "replace"))
    return paths + save_plates(folder / "figures", plates)


# --- figures


def score_plates(scores: xr.Dataset) -> dict[str, Plate]:
    """`distances_id`, `distances_ood`, `composition`, and `positions_N` for each N."""

    def plate(draw: Callable[[], Figure], here: xr.Dataset, *names: str) -> Plate:
        return Plate(draw, lambda: here[list(names)].reset_coords(drop=True))

    plates = {"composition": plate(partial(composition, scores), scores, "composition", "residual")}
    for kind in SETS:
        here = scores.sel(set=kind)
        draw = partial(distances, here)
        plates[f"distances_{kind}"] = plate(draw, here, "distance", "distance_error")
    for context in scores.context.values.tolist():
        here = scores.sel(context=context)
        plates[f"positions_{context}"] = plate(partial(positions, here), here, "distance_binned")
    return plates


def distances(here: xr.Dataset) -> Figure:
    """Distance to each reference over N, with two standard errors; small dots are the shuffles."""
    figure, axes = _panel()
    place = np.arange(here.sizes["context"])
    for number, (reference, phase) in enumerate(REFERENCES.items()):
        row = here.sel(predictor=reference)
        aside = 0.06 * (number - 1.5)
        if "distance_by_shuffle" in here:
            dots = row.distance_by_shuffle.transpose("shuffle", "context").values
            for values in dots:
                axes.plot(
                    place + aside, _finite(values), ".", color=PHASE_COLOURS[phase], alpha=0.4, ms=3
                )
        axes.errorbar(
            place + aside,
            _finite(row.distance.values),
            2 * np.nan_to_num(row.distance_error.values),
            fmt="o-",
            color=PHASE_COLOURS[phase],
            markersize=3,
            linewidth=0.9,
            capsize=1.5,
        )
    _by_context(axes, here)
    _distance_axis(axes)
    return figure


def composition(scores: xr.Dataset) -> Figure:
    """The shares of the references over N, stacked."""
    figure, axes = _panel()
    place = np.arange(scores.sizes["context"])
    bottom = np.zeros(len(place))
    for reference, phase in REFERENCES.items():
        share = np.nan_to_num(scores.composition.sel(predictor=reference).values)
        axes.bar(place, share, 0.6, bottom, color=PHASE_COLOURS[phase])
        bottom += share
    axes.set_ylim(0, 1)
    axes.set_yticks([0, 0.5, 1], ["0 %", "50 %", "100 %"])
    _by_context(axes, scores)
    return figure


def positions(scores: xr.Dataset) -> Figure:
    """Distance to each reference along the context: ID filled and solid, OOD open and dotted."""
    figure, axes = _panel()
    context = int(scores.context)
    used = np.isfinite(scores.bin_end.values)
    start, end = scores.bin_start.values[used], scores.bin_end.values[used]
    at = np.sqrt((start + 1) * end)  # the geometric middle of positions 1, 2, ...
    for kind, line in {"ood": ":", "id": "-"}.items():
        for reference, phase in REFERENCES.items():
            values = scores.distance_binned.sel(set=kind, predictor=reference).values[used]
            axes.plot(
                at,
                _finite(values),
                f"o{line}",
                color=PHASE_COLOURS[phase],
                markersize=3,
                markerfacecolor="none" if kind == "ood" else None,
                linewidth=0.9,
            )
    axes.axvspan(context // 2 + 0.5, context + 0.5, color="#888888", alpha=0.15, linewidth=0)
    axes.set_xscale("log", base=2)
    axes.set_xticks(end.tolist(), [f"{int(tick)}" for tick in end])
    axes.minorticks_off()
    axes.set_xlabel(f"position, from 1 to N = {context}")
    _distance_axis(axes)
    ink = matplotlib.rcParams["text.color"]
    lines = [
        Line2D([], [], color=ink, linestyle="-", marker="o", markersize=3, label="ID"),
        Line2D([], [], color=ink, linestyle=":", marker="o", markersize=3, label="OOD"),
    ]
    lines[1].set_markerfacecolor("none")
    axes.legend(handles=lines, loc="best", handlelength=2.4)
    return figure


def _panel() -> tuple[Figure, Axes]:
    figure = Figure(figsize=(COLUMN, 2.3), layout="constrained")
    return figure, figure.add_subplot()


def _by_context(axes: Axes, scores: xr.Dataset) -> None:
    contexts = scores.context.values.tolist()
    axes.set_xticks(range(len(contexts)), [f"{context:,}" for context in contexts])
    axes.set_xlim(-0.5, len(contexts) - 0.5)
    axes.set_xlabel("context length N")


def _distance_axis(axes: Axes) -> None:
    """Logarithmic above 0.01 nats, and linear below where there is something."""
    values = np.concatenate([np.asarray(line.get_ydata(), float) for line in axes.lines])
    least = float(np.nanmin(values, initial=np.inf))
    top = max(2 * LINEAR_BELOW, axes.get_ylim()[1])
    if least < LINEAR_BELOW:
        axes.set_yscale("symlog", linthresh=LINEAR_BELOW, linscale=0.6)
        axes.set_ylim(-0.15 * LINEAR_BELOW, top)
    else:
        axes.set_yscale("log")
        axes.set_ylim(0.8 * least, 1.1 * top)
    bottom, top = axes.get_ylim()
    ticks = [t for t in (0, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100) if bottom <= t <= top]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_ylabel("KL(reference ‖ model), nats")


def _finite(values: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(values), values, np.nan)


# --- the page


def render_scores(scores: xr.Dataset, plates: Mapping[str, Plate]) -> str:
    """The page as HTML."""
    about = scores.attrs
    name = str(about.get("model", "a model"))
    alone = [n for n, p in REFERENCES.items() if scores.distance.sel(predictor=n).notnull().any()]
    shown = {
        "distances_id": "ID: sequences of the chains",
        "distances_ood": "OOD: sequences of fresh chains",
        "composition": "Composition, ID",
    }
    if "2-Mem" not in alone:
        shown["distances_id"] = "Sequences of fresh chains"
        shown["distances_ood"] = "Other sequences of fresh chains"
    command = str(about.get("command", ""))
    return Template(asset("score.html")).substitute(
        version=escape(__version__),
        name=escape(name),
        variables=variables(),
        css=asset("page.css") + asset("pictures.css"),
        lead=_lead(scores),
        facts=escape(_facts(scores)),
        phases="".join(_phase_row(scores, n) for n in scores.context.values.tolist()),
        keys="".join(
            f'<li><i class="line" style="border-color: var(--{phase})"></i>{reference}</li>'
            for reference, phase in REFERENCES.items()
            if reference in alone
        ),
        legend=sections.legend(),
        sets=escape(
            "ID: sequences of the chains that may be memorised; OOD: of fresh chains of the prior."
            if "2-Mem" in alone
            else "There are no chains that could be memorised: all sequences are of fresh chains, "
            "and only the generalising references exist."
        ),
        distances="".join(_figure(plates[n], caption) for n, caption in shown.items()),
        heads="".join(f'<th scope="col">{reference}</th>' for reference in alone),
        table="".join(
            _distance_row(scores.sel(context=n, set=kind, predictor=alone), n, kind)
            for n in scores.context.values.tolist()
            for kind in SETS
        ),
        positions="".join(
            _figure(plates[f"positions_{n}"], f"N = {n}") for n in scores.context.values.tolist()
        ),
        language=_orders(scores),
        how="The command, as it was given; paths in it are relative to the folder that it was "
        "given in. Another --draw gives other sequences."
        if command
        else "It was scored by a program, with iclens.score_contexts.",
        command=f'<pre class="command"><code>{escape(command)}</code></pre>' if command else "",
        given="".join(
            f"<dt>{escape(key)}</dt><dd>{escape(value)}</dd>" for key, value in _given(scores)
        ),
    )


def _lead(scores: xr.Dataset) -> str:
    """The labels in a sentence."""
    by_phase: dict[str, list[str]] = {}
    for n, phase in zip(scores.context.values.tolist(), scores.phase.values.tolist(), strict=True):
        by_phase.setdefault(phase, []).append(str(n))
    told = []
    for phase, contexts in by_phase.items():
        where = f"N&nbsp;= {', '.join(contexts)}"
        if phase == NO_PHASE:
            told.append(f"no phase at {where}: no reference is nearer to it than to uniform")
        else:
            reference = next(name for name, p in REFERENCES.items() if p == phase)
            told.append(f"{sections.chip(phase)} at {where} (nearest to {reference})")
    return f"This model is {'; '.join(told)}."


def _facts(scores: xr.Dataset) -> str:
    about = scores.attrs
    chains = "fresh chains" if about["chains"] == "infinite" else f"K = {about['chains']} chains"
    facts = (
        f"Scored on {about['sequences']} sequences of {chains} over C = {about['states']} states "
        f"and as many of fresh chains, at each of {scores.sizes['context']} context lengths."
    )
    if about["shuffles"] > 1:
        facts += f" Means over {about['shuffles']} orders of the states."
    return facts


def _phase_row(scores: xr.Dataset, context: int) -> str:
    here = scores.sel(context=context)
    phase, ood = here.phase.item(), here.phase_ood.item()
    sure = "" if phase == NO_PHASE or here.clear.item() else " <small>unclear</small>"
    shares = here.composition.fillna(0)
    bar = "".join(
        f'<i style="width: {100 * float(shares.sel(predictor=name)):.1f}%; '
        f'background: var(--{code})"></i>'
        for name, code in REFERENCES.items()
    )
    told = ", ".join(
        f"{name} {share:.0%}"
        for name, share in zip(here.predictor.values, shares.values, strict=True)
        if share >= 0.005
    )
    return (
        f'<tr><th scope="row" class="number">{context:,}</th><td>{_label(phase)}{sure}</td>'
        f"<td>{here.margin.item():.3f} ± {here.margin_error.item():.3f}</td>"
        f'<td><span class="shares" aria-hidden="true">{bar}</span>{escape(told)}</td>'
        f"<td>{here.residual.item():z.4f}</td><td>{_label(ood)}</td></tr>"
    )


def _label(phase: str) -> str:
    return "no phase" if phase == NO_PHASE else sections.chip(phase)


def _distance_row(here: xr.Dataset, context: int, kind: str) -> str:
    nearest = int(np.argmin(np.where(here.distance.isnull(), np.inf, here.distance)))
    cells = []
    pairs = zip(here.distance.values, here.distance_error.values, strict=True)
    for place, (distance, error) in enumerate(pairs):
        text = "infinite" if np.isinf(distance) else f"{distance:z.4f} ± {error:.4f}"
        cells.append(f"<td>{f'<b>{text}</b>' if place == nearest else text}</td>")
    loss, least = here.loss.item(), float(here.reference_loss.min())
    return (
        f'<tr><th scope="row" class="number">{context:,}</th><td>{kind.upper()}</td>'
        f"{''.join(cells)}<td>{loss:.4f}</td><td>{least:.4f}</td></tr>"
    )


def _figure(plate: Plate, caption: str) -> str:
    """A figure in the colours of the page, light or dark."""
    dark, light = plate.image(DARK), plate.image(LIGHT)
    return (
        "<figure><figcaption>"
        f"{escape(caption)}</figcaption><picture>"
        f'<source media="screen and (prefers-color-scheme: dark)" srcset="{dark}">'
        f'<img src="{light}" alt="{escape(caption)}; the numbers are in the tables of this page '
        'or beside it"></picture></figure>'
    )


def _orders(scores: xr.Dataset) -> str:
    """Tokens and the orders of states; empty where there is neither."""
    if "token" not in scores.coords and "order" not in scores.coords:
        return ""
    parts = []
    if "token" in scores.coords:
        tokens = "".join(
            f"<li>state {state}: <code>{escape(str(token))}</code></li>"
            for state, token in enumerate(scores.token.values)
        )
        mass = "".join(
            f'<tr><th scope="row" class="number">{n:,}</th><td>{share:.2%}</td></tr>'
            for n, share in zip(scores.context.values, scores.token_mass.values, strict=True)
        )
        parts.append(
            "<p>These tokens of the vocabulary stand for the states (number and text). What the "
            "model says of the next token is restricted to them and divided by the probability "
            "that they have together, which is a mean over late positions:</p>"
            f'<ul class="counts">{tokens}</ul>'
            '<table class="scores narrow"><thead><tr><th scope="col" class="number">N</th>'
            f'<th scope="col">Probability of the tokens</th></tr></thead><tbody>{mass}</tbody>'
            "</table>"
        )
    if "order" in scores.coords:
        heads = "".join(f'<th scope="col">N = {n:,}</th>' for n in scores.context.values)
        rows = []
        for place in range(scores.sizes["shuffle"]):
            here = scores.isel(shuffle=place)
            order = " ".join(map(str, here.order.values.tolist()))
            nearest = here.distance_by_shuffle.sel(set="id").min("predictor").values
            cells = "".join(
                f"<td>{_label(phase)} {distance:z.3f}</td>"
                for phase, distance in zip(here.phase_by_shuffle.values, nearest, strict=True)
            )
            rows.append(f'<tr><th scope="row"><code>{order}</code></th>{cells}</tr>')
        parts.append(
            "<h3>Orders of the states</h3><p>State s was given to the model as the one whose "
            "number stands at place s. Beside each phase: KL to its nearest reference, ID, in "
            "nats. Errors in this page hold the spread over these orders.</p>"
            '<div class="scroll" tabindex="0" role="region" aria-label="Phase in each order">'
            f'<table class="scores narrow"><thead><tr><th scope="col">Order</th>{heads}</tr>'
            f"</thead><tbody>{''.join(rows)}</tbody></table></div>"
        )
    title = "Tokens" if "token" in scores.coords else "Orders"
    return (
        f'<section aria-labelledby="orders-title"><h2 id="orders-title">{title}</h2>'
        f"{''.join(parts)}</section>\n"
    )


def _given(scores: xr.Dataset) -> list[tuple[str, str]]:
    """How the model and the chains were given."""
    about = {key: str(value) for key, value in scores.attrs.items()}
    facts = json.loads(about.get("facts", "{}")).items()
    keys = {"chain_source": "chains", "chains": "chains K", "states": "states C", "prior": "prior"}
    keys |= {"sequences": "sequences", "shuffles": "orders of states", "draw": "draw"}
    told = [(name, about[key]) for key, name in keys.items() if key in about]
    return [*((key, about[key]) for key in ("model", "kind") if key in about), *facts, *told]

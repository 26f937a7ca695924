"""Figures of a run: its phase map, distances to the references, losses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import NullFormatter

from iclens.lab.recipe import Diversity
from iclens.phases import NO_PHASE
from iclens.report.plates import COLUMN, PAGE, Plate
from iclens.report.reading import REFERENCES, Bracket, Reading, StepAxis, diversity_text
from iclens.report.style import LIGHT, PHASE_COLOURS, blend


def run_plates(reading: Reading) -> dict[str, Plate]:
    """`phase_map`, `distances` and `losses`; a run without any saved curve has only the map."""
    saved = {
        (cell.chains, cell.seed): cell.curves
        for cell in reading.run.cells
        if cell.curves is not None
    }

    def table(*names: str) -> Callable[[], xr.Dataset]:
        return lambda: _stack({place: curves[list(names)] for place, curves in saved.items()})

    if not saved:
        return {"phase_map": Plate(lambda: phase_map(reading), xr.Dataset)}
    return {
        "phase_map": Plate(
            lambda: phase_map(reading), table("phase", "clear", "composition", "residual")
        ),
        "distances": Plate(lambda: distances(reading), table("distance")),
        "losses": Plate(lambda: losses(reading), table("loss", "reference_loss")),
    }


def _stack(saved: Mapping[tuple[Diversity, int], xr.Dataset]) -> xr.Dataset:
    """Curves of cells along an axis of cells, each with its K and seed."""
    steps = [curves.reset_coords(drop=True) for curves in saved.values()]
    places = {
        "chains": ("cell", [str(chains) for chains, _ in saved]),
        "seed": ("cell", [seed for _, seed in saved]),
    }
    return (
        xr.concat(steps, "cell", join="outer").assign_coords(places).transpose("cell", "step", ...)
    )


def phase_map(reading: Reading) -> Figure:
    """The phase map, a column wide: K (one row for each seed) by training step.

    Colours are the phase colours mixed by composition; hatching marks labels within their error,
    grey a model without a phase, and lines the steps at which a new phase begins.
    """
    axis, cells = reading.axis, reading.run.cells
    diversities = list(dict.fromkeys(cell.chains for cell in cells))
    rows = [index + 0.35 * diversities.index(cell.chains) for index, cell in enumerate(cells)]
    centre = {
        diversity_text(chains): float(
            np.mean([rows[i] for i, cell in enumerate(cells) if cell.chains == chains])
        )
        for chains in diversities
    }
    height = min(max(0.11 * (rows[-1] + 1), 0.4), 5.5)
    figure = Figure(figsize=(COLUMN, height + 0.95), layout="constrained")
    axes = figure.add_subplot()
    for y, cell in zip(rows, cells, strict=True):
        if cell.curves is not None:
            _map_row(axes, axis, y, cell.curves, [step for _, step in reading.begins(cell)])
        reached = -1 if cell.curves is None else int(cell.curves.step[-1])
        if reached < axis.steps[-1]:
            left = axis.range[0] if reached < 0 else axis.edges[reached][1]
            middle = (left + axis.range[1]) / 2
            axes.text(middle, y, reading.outcome(cell), ha="center", va="center", fontsize=5)

    _step_axis(axes, axis)
    axes.set_ylim(-0.7, rows[-1] + 0.7)
    axes.set_yticks(list(centre.values()), list(centre))
    axes.tick_params(axis="y", length=0)
    axes.set_ylabel("chains $K$")
    for bracket in reading.brackets:
        _bracket(axes, bracket, centre)
    handles = [Patch(color=PHASE_COLOURS[p], label=f"{p} ({r})") for r, p in REFERENCES.items()]
    unclear = Patch(facecolor="white", edgecolor=LIGHT["muted"], hatch="//////", label="unclear")
    handles += [Patch(color=LIGHT["none"], label="no phase"), unclear]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, handlelength=1.2)
    return figure


def distances(reading: Reading) -> Figure:
    """Distances to the references, a panel for each K (its first seed): ID solid, OOD dotted."""

    def draw(axes: Axes, curves: xr.Dataset, axis: StepAxis) -> None:
        for kind, line in {"ood": ":", "id": "-"}.items():
            for reference, phase in REFERENCES.items():
                values = curves.distance.sel(set=kind, predictor=reference).values
                _curve(axes, axis, curves, values, line, color=PHASE_COLOURS[phase])
        axes.set_yscale("log")
        axes.yaxis.set_minor_formatter(NullFormatter())

    return _panels(reading, draw, "KL(reference ‖ model), nats", "-")


def losses(reading: Reading) -> Figure:
    """The loss, a panel for each K (its first seed), with that of the references on ID sequences.

    ID solid, OOD dotted; the references are horizontal lines.  The axis ends a little above ln C,
    the loss of the uniform prediction; OOD, a model that memorises is worse than that.
    """

    def draw(axes: Axes, curves: xr.Dataset, axis: StepAxis) -> None:
        for reference, phase in REFERENCES.items():
            level = float(curves.reference_loss.sel(set="id", predictor=reference))
            if np.isfinite(level):
                axes.axhline(level, color=PHASE_COLOURS[phase], linewidth=0.9, dashes=(5, 2))
        for kind, line in {"ood": ":", "id": "-"}.items():
            _curve(axes, axis, curves, curves.loss.sel(set=kind).values, line, color=LIGHT["ink"])

    figure = _panels(reading, draw, "cross-entropy, nats", (0, (5, 2)))
    figure.axes[0].set_ylim(top=1.08 * np.log(reading.run.recipe.task.states))
    return figure


def _map_row(axes: Axes, axis: StepAxis, y: float, curves: xr.Dataset, begins: list[int]) -> None:
    bottom = y - 0.46
    steps = curves.step.values.tolist()
    spans = [(axis.edges[step][0], axis.edges[step][1] - axis.edges[step][0]) for step in steps]
    colours = blend(curves.composition.values)
    phases = curves.phase.values.tolist()
    finite = np.isfinite(curves.residual.values)
    shown = [
        "white" if not known else LIGHT["none"] if phase == NO_PHASE else colour
        for known, phase, colour in zip(finite, phases, colours, strict=True)
    ]
    # An edge of its own colour closes the hairlines that viewers leave between touching cells.
    axes.broken_barh(spans, (bottom, 0.92), facecolors=shown, edgecolors=shown, linewidth=0.3)
    unclear = [
        span
        for span, phase, clear in zip(spans, phases, curves.clear.values, strict=True)
        if phase != NO_PHASE and not clear
    ]
    axes.broken_barh(
        unclear, (bottom, 0.92), facecolors="none", edgecolors="white", linewidth=0, hatch="//////"
    )
    at = [axis.edges[step][0] for step in begins]
    axes.vlines(at, bottom, bottom + 0.92, color=LIGHT["ink"], linewidth=0.8)


def _bracket(axes: Axes, bracket: Bracket, centre: dict[str, float]) -> None:
    """A threshold beside the map, from one row to another; an end without a tick is open."""
    bottom, top = axes.get_ylim()
    low = bottom if bracket.low is None else centre[diversity_text(bracket.low)]
    high = top if bracket.high is None else centre[diversity_text(bracket.high)]
    tip = 1.03 + 0.12 * bracket.lane
    spine = tip + 0.015
    from_x, to_x = (spine if end is None else tip for end in (bracket.low, bracket.high))
    beside = axes.get_yaxis_transform()
    axes.plot(
        [from_x, spine, spine, to_x],
        [low, low, high, high],
        transform=beside,
        clip_on=False,
        color=LIGHT["ink"],
        linewidth=0.8,
    )
    label = f"${bracket.name[0]}_{bracket.name[1]}^*$"
    axes.text(spine + 0.015, (low + high) / 2, label, transform=beside, va="center", fontsize=7)


def _panels(
    reading: Reading,
    draw: Callable[[Axes, xr.Dataset, StepAxis], None],
    label: str,
    reference_line: Any,
) -> Figure:
    """A grid, a page wide, with a panel for the first saved seed of each K."""
    axis = reading.axis
    saved: dict[Diversity, xr.Dataset] = {}
    for cell in reading.run.cells:
        if cell.curves is not None:
            saved.setdefault(cell.chains, cell.curves)
    columns = min(4, len(saved))
    rows = -(-len(saved) // columns)
    width = PAGE if columns > 2 else COLUMN
    figure = Figure(figsize=(width, 1.45 * rows + 0.6), layout="constrained")
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat
    for axes in grid[len(saved) :]:
        axes.set_visible(False)
    for panel, (axes, (chains, curves)) in enumerate(zip(grid, saved.items(), strict=False)):
        draw(axes, curves, axis)
        axes.set_title(f"$K$ = {diversity_text(chains)}", pad=2)
        _step_axis(axes, axis, label=False)
        axes.tick_params(labelbottom=panel + columns >= len(saved))
    figure.supxlabel("optimizer steps", fontsize=7)
    figure.supylabel(label, fontsize=7)
    handles = [
        Line2D([], [], color=PHASE_COLOURS[phase], linestyle=reference_line, label=reference)
        for reference, phase in REFERENCES.items()
    ]
    handles.append(Line2D([], [], color=LIGHT["ink"], linestyle="-", label="ID"))
    handles.append(Line2D([], [], color=LIGHT["ink"], linestyle=":", label="OOD"))
    figure.legend(handles=handles, loc="outside upper center", ncols=6 if columns > 2 else 3)
    return figure


def _curve(
    axes: Axes, axis: StepAxis, curves: xr.Dataset, values: np.ndarray, line: str, **style: Any
) -> None:
    at = [axis.position(step) for step in curves.step.values.tolist()]
    shown = np.where(np.isfinite(values), values, np.nan)
    axes.plot(at, shown, line, linewidth=0.9 if line == ":" else 1.1, **style)


def _step_axis(axes: Axes, axis: StepAxis, label: bool = True) -> None:
    labelled, small = axis.ticks
    if not label:
        # Panels are narrow: powers of ten only, where there are two.
        tens = [step for step in labelled[1:] if str(step).strip("0") == "1"]
        labelled = [0, *(tens if len(tens) > 1 else labelled[1:])]
    axes.set_xticks([axis.position(step) for step in labelled], [f"{step:,}" for step in labelled])
    axes.set_xticks([axis.position(step) for step in small], minor=True)
    axes.set_xlim(*axis.range)
    if label:
        axes.set_xlabel("optimizer steps")

"""What the page draws of a whole run: its map, curves, thresholds, and how to run its models."""

from __future__ import annotations

import shlex
from typing import Any

import numpy as np
import xarray as xr

from iclens.circuits.roles import check_roles
from iclens.lab.cell import Cell
from iclens.report.reading import REFERENCES, Reading, StepAxis, diversity_text
from iclens.report.style import PHASE_COLOURS, blend, text_on


def run_data(reading: Reading, axis: StepAxis | None = None) -> dict[str, Any]:
    """The map, the curves and the thresholds of a run, on its own axis of steps or another."""
    axis = axis or reading.axis
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
            phase: {"reference": reference, "colour": PHASE_COLOURS[phase], "text": text_on(phase)}
            for reference, phase in REFERENCES.items()
        },
        "cells": [_curves(reading, cell) for cell in reading.run.cells],
        "brackets": [
            {
                "name": bracket.name,
                "low": None if bracket.low is None else diversity_text(bracket.low),
                "high": None if bracket.high is None else diversity_text(bracket.high),
                "lane": bracket.lane,
                "fit": _numbers(reading.fits.get(bracket.name, [])),
            }
            for bracket in reading.brackets
        ],
        "uniform": float(np.log(reading.run.recipe.task.states)),
    }


def _curves(reading: Reading, cell: Cell) -> dict[str, Any]:
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


def model_data(reading: Reading) -> dict[str, Any]:
    """What the page needs to run the models and the references itself."""
    recipe = reading.run.recipe
    model = recipe.model
    prior, labels = reading.run.cells[0].prior, reading.labels
    one_point = prior.one_point_pseudo_counts
    return {
        "states": recipe.task.states,
        "context": recipe.task.context,
        "labels": labels,
        "onePoint": one_point.tolist() if np.isfinite(one_point).all() else None,
        "pseudoCounts": prior.pseudo_counts.ravel().tolist(),
        "successors": prior.successors,
        "config": {
            "width": model.width,
            "layers": model.layers,
            "heads": model.heads,
            "hidden": model.mlp_width,
            "activation": model.activation,
            "attention_only": model.attention_only,
            "norm": model.norm,
            "positions": model.positions,
            "circuit": model.circuit,
        },
        "senders": model.senders,
        "trace": trace_command(reading),
    }


def trace_command(reading: Reading) -> str:
    """The command that traces a cell of a run, but for which; empty if its models have no roles."""
    try:
        check_roles(reading.run.recipe.model)
    except ValueError:
        return ""
    return shlex.join(["iclens", "trace", str(reading.run.path)])

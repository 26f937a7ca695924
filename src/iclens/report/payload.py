"""What the page draws: of the whole run at once, and of each cell when it is looked at.

The first is JSON.  The second is one block of arrays for each cell, in the layout of safetensors,
compressed, which the page unpacks when the cell is chosen: parameters of some checkpoints in half
precision, the chain set, sequences, and what was traced.
"""

from __future__ import annotations

import gzip
import json
import shlex
from base64 import b64encode
from collections.abc import Mapping
from typing import Any

import numpy as np
import safetensors.numpy
import xarray as xr

from iclens.chains import ChainSet
from iclens.lab.cell import Cell
from iclens.report.reading import REFERENCES, Reading, StepAxis, diversity_text, walk
from iclens.report.style import PHASE_COLOURS, blend, text_on

WEIGHTS_BYTES = 5_000_000
WEIGHTS_BYTES_A_CELL = 90_000
WEIGHTS_BYTES_AT_MOST = 20_000_000
"""Room for parameters in a page that can be sent by mail; it grows with the number of cells."""
CHAINS_BYTES = 5_000_000
"""Room for chain sets; the largest are left out first."""
SHOWN_CHAINS, SHOWN_SEQUENCES = 8, 12
"""Chains of a cell whose sequences are in the page, and sequences of each."""


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
    prior = reading.run.cells[0].prior
    return {
        "states": recipe.task.states,
        "context": recipe.task.context,
        "pseudoCount": prior.one_point_concentration,
        "concentration": prior.concentration,
        "config": {
            "width": model.width,
            "layers": model.layers,
            "heads": model.heads,
            "hidden": model.mlp_width,
            "attention_only": model.attention_only,
            "norm": model.norm,
            "positions": model.positions,
            "circuit": model.circuit,
        },
        "senders": model.senders,
        "trace": shlex.join(["iclens", "trace", str(reading.run.path)]),
    }


def cell_blocks(reading: Reading) -> list[str]:
    """The block of each cell, in the order of the run's cells, as base64 of gzip."""
    kept = kept_steps(reading)
    room = CHAINS_BYTES
    with_chains = set()
    for cell in sorted(reading.run.cells, key=lambda c: 0 if c.chains == "infinite" else c.chains):
        if cell.chains != "infinite":
            room -= 4 * cell.chains * reading.run.recipe.task.states**2
            if room >= 0:
                with_chains.add(cell.name)
    blocks = []
    for cell in reading.run.cells:
        arrays: dict[str, np.ndarray] = {}
        if cell.curves is not None:
            arrays = _weights(cell, kept[cell.name]) | _sequences(cell, cell.name in with_chains)
        trace = reading.traces.get(cell.name)
        words = {} if trace is None else {"edges": trace.edge, "criteria": trace.criterion}
        metadata = {name: json.dumps(values.values.tolist()) for name, values in words.items()}
        if trace is not None:
            arrays |= _trace(trace)
        ordered = {name: np.asarray(array, order="C") for name, array in arrays.items()}
        content = safetensors.numpy.save(ordered, metadata or None)
        blocks.append(b64encode(gzip.compress(content, 6, mtime=0)).decode())
    return blocks


def kept_steps(reading: Reading) -> dict[str, list[int]]:
    """The checkpoints whose parameters fit into the page, by the name of the cell.

    Each cell has its last one, then the last of each of its phases, then those that are farthest,
    in evaluations, from the ones it has; cells take turns until the room is used up.
    """
    cells = [cell for cell in reading.run.cells if len(cell.checkpoints) > 1]
    room = min(max(WEIGHTS_BYTES, WEIGHTS_BYTES_A_CELL * len(cells)), WEIGHTS_BYTES_AT_MOST)
    wanted = {cell.name: _by_importance(reading, cell) for cell in cells}
    kept: dict[str, list[int]] = {cell.name: [] for cell in reading.run.cells}
    for turn in range(max(map(len, wanted.values()), default=0)):
        for cell in cells:
            if turn < len(wanted[cell.name]):
                room -= sum(2 * array[0].size for array in _parameters(cell).values())
                if room < 0:
                    return kept
                kept[cell.name].append(wanted[cell.name][turn])
    return kept


def _by_importance(reading: Reading, cell: Cell) -> list[int]:
    """Steps whose parameters half precision can hold, in the order that `kept_steps` tells."""
    largest = [np.abs(a).reshape(len(a), -1).max(1) for a in _parameters(cell).values()]
    within = np.max(largest, axis=0) < np.finfo(np.float16).max  # not of NaN
    steps = [step for step, fits in zip(cell.steps, within, strict=True) if fits]
    if not steps:
        return []
    begins = [steps.index(step) for _, step in reading.begins(cell)[1:] if step in steps]
    ends = (max(place - 1, 0) for place in reversed(begins))
    order = list(dict.fromkeys([len(steps) - 1, *ends]))
    while len(order) < len(steps):
        far = [min(abs(place - taken) for taken in order) for place in range(len(steps))]
        order.append(int(np.argmax(far)))
    return [steps[place] for place in order]


def _parameters(cell: Cell) -> Mapping[str, np.ndarray]:
    return {name: array for name, array in cell.checkpoints.items() if name != "step"}


def _weights(cell: Cell, steps: list[int]) -> dict[str, np.ndarray]:
    if not steps:
        return {}
    places = [cell.steps.index(step) for step in sorted(steps)]
    parameters = _parameters(cell).items()
    kept = {f"weights.{name}": array[places].astype(np.float16) for name, array in parameters}
    return {"steps": np.array(sorted(steps), np.int32), **kept}


def _sequences(cell: Cell, with_chains: bool) -> dict[str, np.ndarray]:
    """The chain set if there is room, sequences of its first chains, and of fresh ones.

    Where training chains are fresh ones, all sequences are.
    """
    rng = np.random.default_rng([cell.seed, 0 if cell.chains == "infinite" else cell.chains])
    states, context = cell.recipe.task.states, cell.recipe.task.context
    rows = rng.dirichlet(np.full(states, cell.prior.concentration), (SHOWN_CHAINS, states))
    fresh = ChainSet(np.maximum(rows, np.finfo(float).tiny))
    chains = cell.chain_set or fresh
    index = np.repeat(np.arange(min(chains.count, SHOWN_CHAINS)), SHOWN_SEQUENCES)
    found = {
        "sequences": walk(rng, chains, index, context),
        "sequence_chain": index.astype(np.int32),
        "fresh": walk(rng, fresh, np.arange(SHOWN_CHAINS), context),
    }
    if with_chains:
        found["transition"] = chains.transition.astype(np.float32)
        found["stationary"] = chains.stationary.astype(np.float32)
    return found


def _trace(trace: xr.Dataset) -> dict[str, np.ndarray]:
    kl = trace.edge_kl.transpose("set", "step", "edge")
    return {
        "trace.step": trace.step.values.astype(np.int32),
        "trace.kl": kl.values.astype(np.float32),
        "trace.circuit": trace.circuit.transpose("step", "edge").values.astype(np.uint8),
        "trace.faithfulness": trace.faithfulness.values.astype(np.float32),
        "trace.random": trace.random_faithfulness.max("sample").values.astype(np.float32),
        **{
            f"trace.{part}": trace[f"criterion_{part}"]
            .transpose("step", "criterion")
            .values.astype(np.uint8 if part == "holds" else np.float32)
            for part in ("holds", "value", "limit")
        },
    }

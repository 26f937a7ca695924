"""What the page holds of each cell, for when the cell is looked at.

One block of arrays for each cell, in the layout of safetensors, compressed, which the page unpacks
when the cell is chosen: parameters of some checkpoints in half precision, the chain set, sequences,
task vectors in two components, and what was traced.
"""

from __future__ import annotations

import gzip
import json
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
import xarray as xr
from jaxtyping import Array, Float

from iclens.lab.cell import Cell
from iclens.lab.files import arrays_to_tree
from iclens.predictors import States
from iclens.report.reading import Reading, walk
from iclens.transformer import Transformer, forward

WEIGHTS_BYTES = 5_000_000
WEIGHTS_BYTES_A_CELL = 90_000
WEIGHTS_BYTES_AT_MOST = 20_000_000
"""Room for parameters in a page that can be sent by mail; it grows with the number of cells."""
CHAINS_BYTES = 5_000_000
"""Room for chain sets; the largest are left out first."""
SHOWN_CHAINS, SHOWN_SEQUENCES = 8, 12
"""Chains of a cell whose task vectors are shown, and sequences of each."""
OFFERED = 2
"""Sequences of each of these chains that the reader can choose."""


def cell_blocks(reading: Reading) -> list[str]:
    """The block of each cell, in the order of the run's cells, as base64 of gzip."""
    kept, with_chains = kept_steps(reading), _cells_with_chains(reading)
    like = reading.run.cells[0].new_model() if any(kept.values()) else None
    blocks = []
    for cell in reading.run.cells:
        arrays: dict[str, np.ndarray] = {}
        metadata = {}
        if cell.curves is not None:
            arrays |= _cell_arrays(cell, sorted(kept[cell.name]), cell.name in with_chains, like)
        if cell.name in reading.traces:
            trace = reading.traces[cell.name]
            arrays |= _trace_arrays(trace)
            words = {"edges": trace.edge, "criteria": trace.criterion, "phases": trace.phase}
            metadata = {name: json.dumps(values.values.tolist()) for name, values in words.items()}
        ordered = {name: np.asarray(array, order="C") for name, array in arrays.items()}
        content = safetensors.numpy.save(ordered, metadata or None)
        blocks.append(b64encode(gzip.compress(content, 6, mtime=0)).decode())
    return blocks


def kept_steps(reading: Reading) -> dict[str, list[int]]:
    """The checkpoints whose parameters fit into the page, by the name of the cell.

    Each cell has its last one, then the last of each of its phases, then those that are farthest,
    in evaluations, from the ones it has; cells take turns until the room is used up.
    """
    kept: dict[str, list[int]] = {cell.name: [] for cell in reading.run.cells}
    wanted, size = {}, 0
    for cell in reading.run.cells:
        if parameters := _parameters(cell):
            wanted[cell.name] = _by_importance(reading, cell, parameters)
            size = sum(2 * array[0].size for array in parameters.values())
    room = min(max(WEIGHTS_BYTES, WEIGHTS_BYTES_A_CELL * len(wanted)), WEIGHTS_BYTES_AT_MOST)
    for turn in range(max(map(len, wanted.values()), default=0)):
        for name, steps in wanted.items():
            if turn < len(steps):
                room -= size
                if room < 0:
                    return kept
                kept[name].append(steps[turn])
    return kept


def _cells_with_chains(reading: Reading) -> set[str]:
    """Names of the cells whose chain sets fit into the page."""
    finite = [cell for cell in reading.run.cells if cell.chains != "infinite"]
    found, room = set(), CHAINS_BYTES
    for cell in sorted(finite, key=lambda cell: float(cell.chains)):
        room -= 4 * int(cell.chains) * reading.run.recipe.task.states**2
        if room < 0:
            break
        found.add(cell.name)
    return found


def _by_importance(reading: Reading, cell: Cell, parameters: Mapping[str, np.ndarray]) -> list[int]:
    """Steps whose parameters half precision can hold, in the order that `kept_steps` tells."""
    largest = [np.abs(array).reshape(len(array), -1).max(1) for array in parameters.values()]
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


def _parameters(cell: Cell) -> dict[str, np.ndarray]:
    """The parameters by name, over checkpoints; read anew, so that a run is never all in memory."""
    checkpoints = replace(cell).checkpoints
    return {name: array for name, array in checkpoints.items() if name != "step"}


def _cell_arrays(
    cell: Cell, steps: Sequence[int], with_chains: bool, like: Transformer | None
) -> dict[str, np.ndarray]:
    """Sequences of a cell's first chains and of fresh ones, parameters, and the chain set.

    Where training chains are fresh ones, all sequences are.
    """
    rng = np.random.default_rng([cell.seed, 0 if cell.chains == "infinite" else cell.chains])
    context = cell.recipe.task.context
    fresh = cell.prior.sample(jax.random.fold_in(cell.key("ood"), 1), SHOWN_CHAINS)
    chains = cell.chain_set or fresh
    index = np.repeat(np.arange(min(chains.count, SHOWN_CHAINS)), SHOWN_SEQUENCES)
    sequences = walk(rng, chains, index, context)
    offered = np.arange(len(index)) % SHOWN_SEQUENCES < OFFERED
    found = {
        "sequences": sequences[offered],
        "sequence_chain": index[offered].astype(np.int32),
        "fresh": walk(rng, fresh, np.arange(SHOWN_CHAINS // 2), context),
    }
    if with_chains:
        found["transition"] = chains.transition.astype(np.float32)
        found["stationary"] = chains.stationary.astype(np.float32)
        found["prior"] = chains.weights.astype(np.float32)
    if steps and like is not None:
        places = [replace(cell).steps.index(step) for step in steps]
        kept = {name: array[places] for name, array in _parameters(cell).items()}
        found |= {f"weights.{name}": array.astype(np.float16) for name, array in kept.items()}
        found["steps"] = np.array(steps, np.int32)
        vectors = [
            np.asarray(_task_vectors(arrays_to_tree(like, _at(kept, place)), sequences))
            for place in range(len(steps))
        ]
        found |= {f"plane.{name}": array for name, array in _planes(vectors).items()}
        found["plane.chain"] = index.astype(np.int32)
    return found


def _at(arrays: Mapping[str, np.ndarray], place: int) -> dict[str, np.ndarray]:
    return {name: array[place] for name, array in arrays.items()}


@eqx.filter_jit
def _task_vectors(model: Transformer, states: States) -> Float[Array, "batch width"]:
    """What the last layer's attention writes at the last position."""
    found = forward(model, jnp.asarray(states), since=states.shape[1] - 1).senders.values
    last = f"att{model.config.layers}."
    heads = [
        value[:, -1]
        for value, name in zip(found, model.config.senders, strict=True)
        if name.startswith(last)
    ]
    return sum(heads[1:], heads[0])


def _planes(vectors: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """Task vectors of successive checkpoints, each in its first two principal components.

    Every plane is turned, and mirrored if need be, so that its points come as near as possible to
    those of the last (orthogonal Procrustes), for the eye to follow.  `share` is the part of the
    variance along each of the two turned axes.
    """
    planes: dict[str, list[np.ndarray]] = {"points": [], "axes": [], "mean": [], "share": []}
    target = None
    for phi in reversed(vectors):
        mean = phi.mean(0)
        _, _, components = np.linalg.svd(phi - mean, full_matrices=False)
        axes = np.zeros((2, phi.shape[1]))
        axes[: min(2, len(components))] = components[:2]
        points = (phi - mean) @ axes.T
        if target is None:
            target = points
        left, _, right = np.linalg.svd(points.T @ target)
        turn = left @ right
        points, axes = points @ turn, turn.T @ axes
        total = max(float(((phi - mean) ** 2).sum()), np.finfo(float).tiny)
        for name, value in zip(
            planes, (points, axes, mean, (points**2).sum(0) / total), strict=True
        ):
            planes[name].append(value)
    return {name: np.stack(values[::-1]).astype(np.float32) for name, values in planes.items()}


def _trace_arrays(trace: xr.Dataset) -> dict[str, np.ndarray]:
    return {
        "trace.step": trace.step.values.astype(np.int32),
        "trace.kl": trace.edge_kl.sel(set="id").transpose("step", "edge").values.astype(np.float32),
        "trace.circuit": trace.circuit.transpose("step", "edge").values.astype(np.uint8),
        "trace.faithfulness": trace.faithfulness.values.astype(np.float32),
        "trace.random": trace.random_faithfulness.values.astype(np.float32),
        **{
            f"trace.{part}": trace[f"criterion_{part}"]
            .transpose("step", "criterion")
            .values.astype(np.uint8 if part == "holds" else np.float32)
            for part in ("holds", "value", "limit")
        },
    }

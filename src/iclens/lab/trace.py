"""Traces: the circuit of a cell at its checkpoints, beside its phases.

RUN/circuits/chains=K,seed=S,step=all.nc (or step=N for one checkpoint) holds everything that
`iclens.circuits` measures, over the step axis.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from scipy.stats import spearmanr

from iclens.circuits.graph import Graph
from iclens.circuits.interventions import (
    Contrast,
    attribution,
    contrast,
    edge_effects,
    mask_effects,
    node_masks,
    tabulate,
)
from iclens.circuits.roles import (
    Probe,
    Roles,
    check_roles,
    hypotheses,
    measure_roles,
    probe,
    showcase,
)
from iclens.circuits.search import check_epsilon, find_circuit
from iclens.lab.cell import Cell
from iclens.lab.files import write_dataset
from iclens.lab.store import Run
from iclens.transformer import Transformer

SEQUENCES = 128
"""Sequences of each contrast; effects of the strongest edges are then known to a few per cent."""
INTEGRATION_STEPS = 5
SHOWN = (0, 1, 2, 3)
"""Sequences of the probe whose attention patterns are kept, of the last checkpoint."""


@dataclass(frozen=True)
class TraceRequest:
    """Which cell of a run, and which of its checkpoints, to trace."""

    cell: Cell
    steps: list[int]
    name: str
    """Of the trace's file: `chains=16,seed=0,step=all`."""

    @classmethod
    def parse(cls, run: Run, chains: str | None, seed: int, step: str) -> TraceRequest:
        """From a user's words.  Raises `ValueError` for what the run does not have."""
        cell = run.chosen(chains, seed)
        if step not in ("all", "last") and not step.isdigit():
            raise ValueError(f"--step: expected a step, 'last' or 'all', got {step!r}")
        if not cell.steps:
            raise ValueError(f"cell {cell.name} is {cell.status}: it has no checkpoints")
        curves = cell.curves
        trained = [
            s for s in cell.steps if curves is None or np.isfinite(curves.loss.sel(step=s)).all()
        ]
        if not trained:
            raise ValueError(f"cell {cell.name} diverged before its first checkpoint")
        steps = {"all": trained, "last": trained[-1:]}.get(step) or [int(step)]
        label = "all" if step == "all" else steps[0]
        return cls(cell, steps, f"{cell.name},step={label}")

    @classmethod
    def parse_one(cls, run: Run, chains: str | None, seed: int, step: str) -> tuple[Cell, int]:
        """A cell and one checkpoint of it.  Raises `ValueError` as `parse` does, and for "all"."""
        if step == "all":
            raise ValueError("--step: expected a step or 'last', got 'all'")
        request = cls.parse(run, chains, seed, step)
        return request.cell, request.steps[0]


def trace_cell(
    cell: Cell,
    steps: Sequence[int],
    *,
    epsilon: float = 0.1,
    show: Sequence[int] = SHOWN,
    on_step: Callable[[int], None] = lambda step: None,
) -> xr.Dataset:
    """Trace a cell at some of its checkpoints.

    Nothing is compiled twice for the checkpoints of a cell.  `show` gives the sequences of the
    probe whose attention patterns are kept: sequence i is of chain i modulo their number, 32 at
    most.  `on_step` hears of each checkpoint that is done.

    Raises `ValueError` if there is no checkpoint at a step or its parameters are not finite, if
    the model has no such circuits (see `measure_roles`), or for a sequence that is not there.
    """
    check_epsilon(epsilon)
    check_roles(cell.recipe.model)
    if not len(steps):
        raise ValueError("a trace needs at least one checkpoint, got no steps")
    models = [cell.model(step) for step in steps]
    context, key = cell.recipe.task.context, cell.key("trace")
    source = cell.source
    names = ("id", "ood", "shuffle", "probe", "random")
    keys = dict(zip(names, jax.random.split(key, len(names)), strict=True))
    contrasts = {
        "id": contrast("resample", source, SEQUENCES, context, key=keys["id"]),
        "ood": contrast("resample", cell.prior, SEQUENCES, context, key=keys["ood"]),
    }
    shuffled = contrast("shuffle", source, SEQUENCES, context, key=keys["shuffle"])
    tasks = probe(source, context, key=keys["probe"])
    if not show or not all(0 <= place < len(tasks.states) for place in show):
        raise ValueError(
            f"show: expected sequences from 0 to {len(tasks.states) - 1}, got {list(show)}"
        )
    traced = []
    for step, model in zip(steps, models, strict=True):
        traced.append(_trace(model, contrasts, shuffled, tasks, epsilon, keys["random"]))
        on_step(step)
    trace = xr.concat(traced, "step", data_vars="all", coords="minimal", join="exact")
    trace = trace.assign_coords(step=("step", list(steps), {"units": "optimizer steps"}))
    shown = showcase(models[-1], tasks, jnp.asarray(show))
    trace["attention"] = (("layer", "head", "shown", "position", "key"), shown.attention)
    trace["shown_states"] = (("shown", "position"), shown.states)
    trace = trace.assign_coords(shown=list(show))
    trace["phi"] = (("sequence", "width"), shown.phi)
    trace["phi_chain"] = ("sequence", np.asarray(tasks.chain))
    if cell.curves is not None:
        curves = cell.curves.sel(step=list(steps))
        trace["phase"], trace["clear"] = curves.phase, curves.clear
    trace.attrs |= {"chains": cell.chains, "seed": cell.seed, "baseline": "resample"}
    return trace


def save_trace(run: Path, trace: xr.Dataset, name: str) -> Path:
    """Write a trace into a run's `circuits`; returns its path."""
    path = run / "circuits" / f"{name}.nc"
    path.parent.mkdir(exist_ok=True)
    return write_dataset(path, trace)


def _trace(
    model: Transformer,
    contrasts: dict[str, Contrast],
    shuffled: Contrast,
    tasks: Probe,
    epsilon: float,
    key: Any,
) -> xr.Dataset:
    """One checkpoint, without the step axis."""
    graph = Graph(model.config)
    names, masks = node_masks(model.config)
    tables = []
    for on in contrasts.values():
        edges = tabulate(edge_effects(model, on), graph.edges)
        nodes = tabulate(mask_effects(model, on, masks), names, "node")
        tables.append(
            edges.rename({name: f"edge_{name}" for name in edges.data_vars}).merge(
                nodes.rename({name: f"node_{name}" for name in nodes.data_vars})
            )
        )
    traced = xr.concat(tables, "set", data_vars="all", join="exact")
    traced = traced.assign_coords(set=list(contrasts))
    here = contrasts["id"]
    estimates = {
        "eap": (attribution(model, here), traced.edge_loss_change),
        "eap_ig": (attribution(model, here, integrated=INTEGRATION_STEPS), traced.edge_kl),
    }
    for name, (estimate, exact) in estimates.items():
        traced[name] = ("edge", estimate, {"units": "nats"})
        traced[f"{name}_rank"] = float(spearmanr(estimate, exact.sel(set="id")).statistic)
    circuit = find_circuit(model, here, epsilon=epsilon, key=key)
    traced["circuit"] = ("edge", np.isin(graph.edges, circuit.edges))
    traced["trail"] = ("round", list(circuit.trail))
    traced["trail_kl"] = ("round", circuit.trail_kl, {"units": "nats"})
    traced["random_faithfulness"] = ("sample", circuit.random)
    traced["total_kl"] = ((), circuit.total, {"units": "nats"})
    for name in ("faithfulness", "completeness", "minimality"):
        traced[name] = getattr(circuit, name)
    everything = mask_effects(model, shuffled, np.zeros((1, len(graph.edges)), np.float32))
    table = tabulate(everything, ("all",), "cut").isel(cut=0, drop=True)
    traced = traced.merge(table.rename({name: f"shuffle_{name}" for name in table.data_vars}))
    return traced.merge(_roles_table(measure_roles(model, tasks, contrasts["ood"])))


def _roles_table(roles: Roles) -> xr.Dataset:
    heads = roles.heads
    table = xr.Dataset(
        {name: value for name, value in vars(roles).items() if name != "heads"}
        | {
            name: (("layer", "head", "lag")[: np.ndim(value)], np.asarray(value))
            for name, value in vars(heads).items()
        }
    )
    found = [
        (f"{hypothesis}: {name}", criterion)
        for hypothesis, verdict in hypotheses(roles).items()
        for name, criterion in verdict.criteria.items()
    ]
    table = table.assign_coords(criterion=[name for name, _ in found])
    for part in ("holds", "value", "limit"):
        table[f"criterion_{part}"] = ("criterion", [criterion[part] for _, criterion in found])
    return table


def summary(trace: xr.Dataset) -> dict[str, Any]:
    """The last checkpoint of a trace as plain data: verdicts, circuit, roles, head scores.

    Of a trace of several checkpoints also its `history`: phase, verdicts and circuit at each, and
    the stretches of steps over which each hypothesis passes.
    """
    last = trace.isel(step=-1)
    effects = last.edge_kl.sel(set="id")
    chains = trace.attrs["chains"]
    found = {
        "chains": chains if chains == "infinite" else int(chains),
        "seed": int(trace.attrs["seed"]),
        **_checkpoint(last),
        "completeness": float(last.completeness),
        "minimality": float(last.minimality),
        "random_faithfulness": float(last.random_faithfulness.max()),
        "edges": dict(zip(last.edge.values.tolist(), effects.values.tolist(), strict=True)),
        "rank_correlation": {"eap": float(last.eap_rank), "eap_ig": float(last.eap_ig_rank)},
        "heads": {
            name: last[name].values.tolist() for name in ("previous", "induction", "uniformity")
        }
        | {name: float(last[name]) for name in ("previous_chance", "induction_chance")},
        "shuffle_kl": float(last.shuffle_kl),
        "shuffle_loss_change": float(last.shuffle_loss_change),
    }
    if trace.sizes["step"] > 1:
        found["history"] = [_checkpoint(trace.isel(step=i)) for i in range(trace.sizes["step"])]
        found["passes"] = {name: stretches(trace, name) for name in found["hypotheses"]}
    return found


def _checkpoint(here: xr.Dataset) -> dict[str, Any]:
    verdicts: dict[str, dict[str, Any]] = {}
    for place, full in enumerate(here.criterion.values.tolist()):
        hypothesis, name = full.split(": ")
        criteria = verdicts.setdefault(hypothesis, {"verdict": "pass", "criteria": {}})
        holds = bool(here.criterion_holds[place])
        criteria["criteria"][name] = {
            "holds": holds,
            "value": float(here.criterion_value[place]),
            "limit": float(here.criterion_limit[place]),
        }
        criteria["verdict"] = criteria["verdict"] if holds else "fail"
    return {
        "step": int(here.step),
        "phase": str(here.phase.values) if "phase" in here else None,
        "hypotheses": verdicts,
        "circuit": here.edge.values[here.circuit.values.astype(bool)].tolist(),
        "faithfulness": float(here.faithfulness),
    }


def stretches(trace: xr.Dataset, hypothesis: str) -> list[tuple[int, int]]:
    """First and last step of each run of successive checkpoints at which a hypothesis passes.

    None where it was not tested.
    """
    names = [name.startswith(hypothesis) for name in trace.criterion.values.tolist()]
    passes = trace.criterion_holds.values.astype(bool)[:, names].all(axis=1) & any(names)
    edges = np.flatnonzero(np.diff(np.concatenate([[False], passes, [False]]).astype(int)))
    steps = trace.step.values
    return [(int(steps[a]), int(steps[b - 1])) for a, b in edges.reshape(-1, 2)]


def describe(trace: xr.Dataset) -> str:
    """The last checkpoint of a trace, and when each mechanism was there, as a text to read."""
    found = summary(trace)
    lines = [f"K = {found['chains']}, seed {found['seed']}, step {found['step']}: {found['phase']}"]
    for name, verdict in found["hypotheses"].items():
        lines.append(f"{name}: {verdict['verdict']}")
        lines += [
            f"  {'yes' if criterion['holds'] else 'no ':3} {text} "
            f"({criterion['value']:.2f}, must exceed {criterion['limit']:.2f})"
            for text, criterion in verdict["criteria"].items()
        ]
        for first, final in found.get("passes", {}).get(name, []):
            phases = dict.fromkeys(
                str(here["phase"]) for here in found["history"] if first <= here["step"] <= final
            )
            lines.append(f"  passes from step {first} to {final} ({', '.join(phases)})")
    lines.append(
        f"circuit: {len(found['circuit'])} of {trace.sizes['edge']} edges, faithfulness "
        f"{found['faithfulness']:.2f} (random sets of that size: at most "
        f"{found['random_faithfulness']:.2f})"
    )
    lines += [f"  {edge:24} {found['edges'][edge]:.3f} nats" for edge in found["circuit"]]
    idle = trace.edge.values[~trace.isel(step=-1).edge_changes.sel(set="id").values.astype(bool)]
    if len(idle):
        lines.append(f"cutting these changes nothing at all: {', '.join(idle)}")
    return "\n".join(lines)

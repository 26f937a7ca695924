"""Figures of a trace: the circuit as a graph, its edges along training, patterns, task vectors."""

from __future__ import annotations

from pathlib import Path

import matplotlib
import numpy as np
import xarray as xr
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from iclens.lab.files import read_dataset
from iclens.phases import PHASES
from iclens.report.plates import COLUMN, PAGE, Plate
from iclens.report.style import LIGHT, PHASE_COLOURS

PORTS = {"q": 0.26, "k": 0.0, "v": -0.26}
"""Where queries, keys and values enter an attention head, from its middle upwards."""


def circuit_plates(path: Path) -> dict[str, Plate]:
    """The figures of a saved trace: `circuit`, `attention`, `task_vectors`, `edges`."""
    trace = read_dataset(path)
    last = trace.isel(step=-1)
    plates = {
        "circuit": Plate(lambda: circuit_graph(trace), lambda: last[["edge_kl", "circuit"]]),
        "attention": Plate(
            lambda: attention_patterns(trace), lambda: trace[["shown_states", "attention"]]
        ),
        "task_vectors": Plate(lambda: task_vectors(trace), lambda: _task_plane(trace)),
    }
    if trace.sizes["step"] > 1:
        plates["edges"] = Plate(lambda: edge_history(trace), lambda: trace[["edge_kl", "circuit"]])
    return plates


def _colour(trace: xr.Dataset) -> str:
    """The colour of the phase of the last checkpoint."""
    phase = str(trace.phase.values[-1]) if "phase" in trace else ""
    return PHASE_COLOURS[phase] if phase in PHASES else LIGHT["ink"]


def _title(trace: xr.Dataset) -> str:
    phase = f", {trace.phase.values[-1]}" if "phase" in trace else ""
    return f"K = {trace.attrs['chains']}, step {int(trace.step[-1]):,}{phase}"


def circuit_graph(trace: xr.Dataset) -> Figure:
    """Components in columns from input to output; an edge is as wide as its effect.

    Kept edges have the phase's colour, those that were cut are grey.
    """
    last = trace.isel(step=-1)
    edges = [edge.split("->") for edge in trace.edge.values.tolist()]
    nodes = list(dict.fromkeys([source for source, _ in edges if source != "lag"] + ["out"]))
    columns = list(dict.fromkeys(node.split(".")[0] for node in nodes))
    place: dict[str, tuple[float, float]] = {}
    for column, name in enumerate(columns):
        inside = [node for node in nodes if node.split(".")[0] == name]
        for row, node in enumerate(inside):
            place[node] = (column, 1.8 * ((len(inside) - 1) / 2 - row))
    figure = Figure(figsize=(PAGE, 2.6), layout="constrained")
    axes = figure.add_subplot()
    kl = np.clip(last.edge_kl.sel(set="id").values, 0, None)
    width = 0.4 + 4.6 * np.sqrt(kl / max(kl.max(), 1e-12))
    order = np.argsort(last.circuit.values.astype(bool), kind="stable")
    for index in order:
        source, receiver = edges[index]
        head, _, port = receiver.rpartition(".") if receiver not in place else (receiver, "", "")
        x, y = place[head]
        start = (x, y + 1.15) if source == "lag" else (place[source][0] + 0.2, place[source][1])
        end = (x, y + 0.42) if source == "lag" else (x - 0.2, y + PORTS.get(port, 0.0))
        far = end[0] - start[0] > 1
        # A long edge goes round the components between, above them to q and k, below to the rest.
        bend = (-0.3 if port in ("q", "k") or head == "out" else 0.3) if far else 0.0
        kept = bool(last.circuit[index])
        axes.add_patch(
            FancyArrowPatch(
                start,
                end,
                connectionstyle=f"arc3,rad={bend}",
                arrowstyle="-|>,head_length=2,head_width=1",
                shrinkA=0,
                shrinkB=0,
                linewidth=width[index],
                color=_colour(trace) if kept else LIGHT["none"],
                zorder=2 if kept else 1,
            )
        )
    for node, (x, y) in place.items():
        box = FancyBboxPatch(
            (x - 0.17, y - 0.36),
            0.34,
            0.72,
            boxstyle="round,pad=0.03",
            facecolor="white",
            edgecolor=LIGHT["ink"],
            linewidth=0.7,
            zorder=3,
        )
        axes.add_patch(box)
        attends = node.startswith("att")
        axes.text(x + 0.03 * attends, y, node, ha="center", va="center", fontsize=6, zorder=4)
        for port, lift in PORTS.items() if attends else ():
            axes.text(
                x - 0.17, y + lift, port, fontsize=5, color=LIGHT["muted"], va="center", zorder=4
            )
        if f"lag->{node}" in trace.edge.values:
            axes.text(x, y + 1.25, "lag", ha="center", va="center", color=LIGHT["muted"])
    axes.set_xlim(-0.5, len(columns) - 0.5)
    heights = [y for _, y in place.values()]
    axes.set_ylim(min(heights) - 1.5, max(heights) + 1.5)
    axes.axis("off")
    share = float(last.faithfulness)
    axes.set_title(
        f"{_title(trace)}: {int(last.circuit.sum())} of {len(edges)} edges, "
        f"faithfulness {share:.2f}",
        loc="left",
    )
    return figure


def edge_history(trace: xr.Dataset) -> Figure:
    """Effects of all edges along training; a dot where an edge belongs to the circuit."""
    kl = np.clip(trace.edge_kl.sel(set="id").transpose("edge", "step").values, 0, None)
    figure = Figure(figsize=(PAGE, 0.13 * len(kl) + 0.9), layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(np.sqrt(kl), aspect="auto", cmap="Greys", interpolation="nearest")
    kept = trace.circuit.transpose("edge", "step").values.astype(bool)
    rows, columns = np.nonzero(kept)
    phases = trace.phase.values.tolist() if "phase" in trace else [""] * trace.sizes["step"]
    colours = [PHASE_COLOURS.get(phases[column], LIGHT["muted"]) for column in columns]
    axes.scatter(columns, rows, s=5, c=colours, linewidths=0)
    axes.set_yticks(range(len(kl)), trace.edge.values.tolist(), fontsize=5.5)
    shown = range(0, trace.sizes["step"], max(1, trace.sizes["step"] // 8))
    axes.set_xticks(list(shown), [f"{int(trace.step[place]):,}" for place in shown])
    axes.set_xlabel("optimizer steps")
    bar = figure.colorbar(image, ax=axes, pad=0.01, aspect=40)
    ticks = np.linspace(0, np.sqrt(kl.max()), 5)
    bar.set_ticks(ticks.tolist(), labels=[f"{tick**2:.2f}" for tick in ticks])
    bar.set_label("KL(clean || edge cut), nats")
    axes.set_title(
        f"K = {trace.attrs['chains']}: effect of each edge; dots: kept in the circuit, in the "
        "colour of the phase",
        loc="left",
    )
    return figure


def attention_patterns(trace: xr.Dataset) -> Figure:
    """Where each head looks, on a few sequences; the states are written along the axes."""
    pattern, states = trace.attention.values, trace.shown_states.values
    layers, heads, shown = pattern.shape[:3]
    rows = layers * heads
    figure = Figure(figsize=(PAGE, 1.75 * rows + 0.3), layout="constrained")
    grid = figure.subplots(rows, shown, squeeze=False)
    for row, (layer, head) in enumerate(np.ndindex(layers, heads)):
        for column in range(shown):
            axes = grid[row][column]
            axes.imshow(
                np.sqrt(pattern[layer, head, column]), cmap="Greys", interpolation="nearest"
            )
            axes.set_xticks([])
            axes.set_yticks([])
            if column == 0:
                axes.set_ylabel(f"att{layer + 1}.{head}\nquery position")
            if row == rows - 1:
                axes.set_xlabel("key position")
            if row == 0:
                first = "".join(map(str, states[column][:20].tolist()))
                axes.set_title(f"{int(trace.shown[column])}: {first}", fontsize=5)
    figure.suptitle(
        f"{_title(trace)}: square root of attention; above, the sequence and its first states",
        fontsize=7,
    )
    return figure


def _task_plane(trace: xr.Dataset) -> xr.Dataset:
    """Task vectors in their first two principal components, and the variance of each."""
    phi = trace.phi.values
    centred = phi - phi.mean(0)
    _, scale, axes = np.linalg.svd(centred, full_matrices=False)
    return xr.Dataset(
        {
            "chain": ("sequence", trace.phi_chain.values),
            "phi": (("sequence", "component"), centred @ axes[:2].T),
            "variance_share": ("component", scale[:2] ** 2 / max(float((scale**2).sum()), 1e-300)),
        }
    )


def task_vectors(trace: xr.Dataset) -> Figure:
    """Task vectors in their first two principal components, coloured by chain."""
    shown = _task_plane(trace)
    plane, chain, share = (shown[name].values for name in ("phi", "chain", "variance_share"))
    figure = Figure(figsize=(COLUMN, COLUMN), layout="constrained")
    axes = figure.add_subplot()
    colours = matplotlib.colormaps["turbo"](chain / max(chain.max(), 1))
    axes.scatter(plane[:, 0], plane[:, 1], s=5, c=colours, linewidths=0)
    axes.set_xlabel(f"first component of phi ({share[0]:.0%} of variance)")
    axes.set_ylabel(f"second component ({share[1]:.0%})")
    axes.set_title(f"{_title(trace)}: {chain.max() + 1} chains, one colour each", loc="left")
    return figure

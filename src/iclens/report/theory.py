"""Figures of the theory: the landscape, growth with the context, capacity, the race, divergence."""

from __future__ import annotations

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from iclens.report.figures import COLUMN
from iclens.report.style import LIGHT, PHASE_COLOURS
from iclens.theory.fits import GROWTH

STYLES = {"N / ln N": "-", "N": "--", "sqrt(N)": "-.", "N ln N": ":"}


def _panel(width: float = COLUMN, height: float = 2.6) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def landscape(plane: xr.Dataset) -> Figure:
    """The loss over (beta, delta), with the flow and the descent that leave the origin."""
    figure, axes = _panel()
    beta, delta = plane.beta.values, plane.delta.values
    filled = axes.contourf(beta, delta, plane.loss.values.T, levels=24, cmap="Greys_r")
    flow, descent = plane.flow.values, plane.descent.values
    axes.plot(*descent.T, color=PHASE_COLOURS["M1"], linewidth=0.8, label="stochastic descent")
    axes.plot(*flow.T, color=PHASE_COLOURS["G2"], linewidth=1.4, label="gradient flow")
    down_beta, down_delta = np.gradient(-plane.loss.values, beta, delta)
    axes.streamplot(
        beta,
        delta,
        down_beta.T,
        down_delta.T,
        density=0.7,
        linewidth=0.35,
        arrowsize=0.5,
        color=LIGHT["muted"],
    )
    axes.set_xlim(beta[0], beta[-1])
    axes.set_ylim(delta[0], delta[-1])
    axes.set_xlabel("beta: match of the state with the one before")
    axes.set_ylabel("delta: bias of lag 1")
    axes.legend(loc="lower right", frameon=True, framealpha=0.85)
    figure.colorbar(filled, ax=axes, label="loss, nats")
    axes.set_title(
        f"C = {plane.attrs['states']}, N = {plane.attrs['plane_context']}: from 1-Gen to 2-Gen",
        loc="left",
    )
    return figure


def growth(table: xr.Dataset) -> Figure:
    """Times to 2-Gen over N, and the four laws fitted to them."""
    figure, axes = _panel()
    context, tau = table.context.values, table.tau.values
    grid = np.geomspace(context.min(), context.max(), 100)
    for place, law in enumerate(table.law.values.tolist()):
        weight = float(table.weight[place])
        axes.plot(
            grid,
            float(table.a[place]) * GROWTH[law](grid),
            STYLES[law],
            color=PHASE_COLOURS["G2"] if weight == float(table.weight.max()) else LIGHT["muted"],
            linewidth=1,
            label=f"{law} (weight {weight:.2g})",
        )
    axes.plot(context, tau, "o", color=LIGHT["ink"], markersize=3)
    axes.set(xscale="log", yscale="log", xlabel="context N", ylabel="flow time to 2-Gen")
    axes.legend()
    axes.set_title(table.attrs["title"], loc="left")
    return figure


def capacity(result: xr.Dataset) -> Figure:
    """Where the memory model ends: nearer to 2-Mem or to 2-Gen, over K and d."""
    figure, axes = _panel()
    here = result.isel(hidden=-1)
    difference = (here.to_2_gen - here.to_2_mem).transpose("width", "chains").values
    limit = float(np.abs(difference).max())
    image = axes.imshow(
        difference, cmap="RdBu_r", vmin=-limit, vmax=limit, origin="lower", aspect="auto"
    )
    axes.set_xticks(range(here.sizes["chains"]), here.chains.values.tolist())
    axes.set_yticks(range(here.sizes["width"]), here.width.values.tolist())
    axes.set_xlabel("chains K")
    axes.set_ylabel("width d of the task vector")
    figure.colorbar(image, ax=axes, label="nearer to 2-Mem, nats")
    axes.set_title(f"memory model, F = {int(here.hidden)}", loc="left")
    return figure


def race(result: xr.Dataset) -> Figure:
    """Times of both circuits alone over K, and of the whole model."""
    figure, axes = _panel()
    for name, phase, marker, label in (
        ("tau_induction", "G2", "o", "induction circuit alone, to 2-Gen"),
        ("tau_recognition", "M2", "s", "recognition circuit alone, to M2"),
        ("tau_whole_2_mem", "M1", "x", "whole model, to M2"),
    ):
        seen = np.isfinite(result[name].values)
        axes.plot(
            result.chains.values[seen],
            result[name].values[seen],
            marker,
            color=PHASE_COLOURS[phase],
            markersize=3.5,
            label=label,
        )
    observed = result.attrs["K1* observed"]
    if not isinstance(observed, str) and np.isfinite(observed).all():
        axes.axvspan(*observed[1:], color=LIGHT["none"], label="K1* of the whole model")
    axes.set(xscale="log", yscale="log", xlabel="chains K", ylabel="optimizer steps")
    axes.set_xticks(ticks := np.unique(result.chains.values), [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.legend(frameon=True, framealpha=0.85)
    axes.set_title("the race behind K1*", loc="left")
    return figure


def switching(table: xr.Dataset) -> Figure:
    """Steps at which runs turn to M2, diverging at K2*; triangles are runs that had not turned."""
    figure, axes = _panel()
    chains, time, before = (table[name].values for name in ("chains", "time", "before"))
    turned = np.isfinite(time)
    threshold, gamma = table.fit.sel(part="value").values
    axes.plot(table.curve_chains, table.curve_time, color=PHASE_COLOURS["M2"], linewidth=1)
    axes.plot(chains[turned], time[turned], "o", color=LIGHT["ink"], markersize=3, label="turned")
    axes.plot(
        chains[~turned],
        before[~turned],
        "^",
        color=LIGHT["muted"],
        markersize=4,
        label="not turned by the end",
    )
    axes.axvline(threshold, color=PHASE_COLOURS["M2"], linewidth=0.8, linestyle=":")
    axes.set(yscale="log", xlabel="chains K", ylabel="optimizer steps to M2")
    axes.set_xlim(0.9 * chains.min(), min(1.1 * threshold, 2 * chains.max()))
    axes.set_ylim(time[turned].min() / 2, 3 * before.max())
    axes.legend(loc="upper left")
    axes.set_title(f"K2* = {threshold:.3g}, gamma = {gamma:.2g}", loc="left")
    return figure

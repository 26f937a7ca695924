"""Results of the theory: a figure and a caption for each, made from its saved dataset."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from iclens.lab.files import read_dataset
from iclens.phases import PHASES
from iclens.report.plates import COLUMN, PAGE, Plate
from iclens.report.style import LIGHT, PHASE_COLOURS
from iclens.theory.fits import GROWTH

STYLES = {"N / ln N": "-", "N": "--", "sqrt(N)": "-.", "N ln N": ":"}


@dataclass(frozen=True)
class Drawing:
    """How a result is shown, and the command that makes it."""

    draw: Callable[[xr.Dataset], Figure]
    title: str
    caption: Callable[[xr.Dataset], str]
    command: str
    """Arguments of `iclens theory`, with {run} and {out} for a run's folder and its results'."""


def read_results(folder: Path) -> dict[str, xr.Dataset | str]:
    """The results in a folder by name, in the order of `DRAWINGS`; of a damaged one, why."""
    found: dict[str, xr.Dataset | str] = {}
    for name in DRAWINGS:
        path = folder / f"{name}.nc"
        if path.is_file():
            try:
                found[name] = read_dataset(path)
            except ValueError as error:
                found[name] = str(error)
    return found


def theory_plates(folder: Path) -> dict[str, Plate]:
    """The figures of the results in a folder that can be read, by name."""

    def plate(name: str, result: xr.Dataset) -> Plate:
        return Plate(lambda: DRAWINGS[name].draw(result), lambda: result)

    return {
        name: plate(name, result)
        for name, result in read_results(folder).items()
        if not isinstance(result, str)
    }


def _panels(count: int = 1, height: float = 2.6) -> tuple[Figure, list[Axes]]:
    """Panels in a row, a column wide in all, or a page where there are more than one."""
    figure = Figure(figsize=(COLUMN if count == 1 else PAGE, height), layout="constrained")
    return figure, [figure.add_subplot(1, count, place + 1) for place in range(count)]


def _logarithmic_chains(axes: Axes, chains: np.ndarray) -> None:
    axes.set(xscale="log", xlabel="chains K")
    ticks: list[int] = []
    for tick in np.unique(chains).astype(int).tolist():
        if not ticks or tick >= max(1.3, (chains.max() / chains.min()) ** 0.125) * ticks[-1]:
            ticks.append(tick)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()


def _interval(low: float, high: float, form: str = "{:.3g}") -> str:
    ends = [form.format(end) if math.isfinite(end) else "open" for end in (low, high)]
    return f"{ends[0]} to {ends[1]}"


def describe_interval(value: float, low: float, high: float) -> str:
    """A value with its interval, whose ends may be open (NaN or infinite)."""
    return f"{value:.3g} ({_interval(low, high)})"


# --- the reduced induction head


def landscape(plane: xr.Dataset) -> Figure:
    """The loss over (beta, delta), with the flow and the descent that leave the origin."""
    figure, (axes,) = _panels()
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
    return figure


def _of_landscape(plane: xr.Dataset) -> str:
    fall = (plane.flow_loss.values[0] - plane.flow_loss.values) / np.ptp(plane.flow_loss.values)
    quarter, half, three = np.interp([0.25, 0.5, 0.75], fall, plane.time.values)
    return (
        f"Loss of the reduced induction head at C = {plane.attrs['states']}, "
        f"N = {plane.attrs['context']}: from 1-Gen at the origin to 2-Gen. Grey lines follow "
        "the gradient downhill. From a quarter to three quarters of its fall the flow takes "
        f"{(three - quarter) / half:.0%} of the time to half of it."
    )


def growth(table: xr.Dataset) -> Figure:
    """Times to 2-Gen over N, and the four laws fitted to them."""
    figure, (axes,) = _panels()
    context, tau = table.context.values, table.tau.values
    grid = np.geomspace(context.min(), context.max(), 100)
    family = _family(table)
    weights = table[f"{family}weight"].values
    for place, law in enumerate(table.law.values.tolist()):
        a, delay = (float(table[f"{family}{part}"][place]) for part in ("a", "delay"))
        axes.plot(
            grid,
            delay + a * GROWTH[law](grid),
            STYLES[law],
            color=PHASE_COLOURS["G2"] if place == weights.argmax() else LIGHT["muted"],
            linewidth=1,
            label=f"{'t0 + a ' * bool(family)}{law} (weight {weights[place]:.2g})",
        )
    axes.plot(context, tau, "o", color=LIGHT["ink"], markersize=3, label=table.attrs["title"])
    if "reduced_tau" in table:
        axes.plot(
            table.reduced_context,
            table.reduced_tau,
            "s",
            markerfacecolor="none",
            color=PHASE_COLOURS["G1"],
            markersize=3.5,
            label="reduced model",
        )
    axes.set(xscale="log", yscale="log", xlabel="context N", ylabel="flow time to 2-Gen")
    axes.set_xticks(ticks := np.unique(context), [str(tick) for tick in ticks])
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.legend()
    return figure


def _of_growth(table: xr.Dataset) -> str:
    family = _family(table)
    best = table.isel(law=int(table[f"{family}weight"].values.argmax()))
    a, error, delay, weight = (
        float(best[f"{family}{part}"]) for part in ("a", "error", "delay", "weight")
    )
    start = f"{delay:.3g} + " if family else ""
    late, lost = table.counts.sum("study").values[1:] if "counts" in table else (0, 0)
    left_out = f" Left out: {late} models that came too late, {lost} lost." if late or lost else ""
    return (
        f"Flow time (steps x learning rate) to 2-Gen, {table.attrs['title']}. Best of four laws by "
        f"Akaike weight ({weight:.2g}): {start}{a:.3g} {best.law.item()}, ± {error:.2g}.{left_out}"
    )


def _family(table: xr.Dataset) -> str:
    """The prefix of the laws without a delay, or of those with one where they do better."""
    if "delayed_aic" in table and float(table.delayed_aic.min()) < float(table.aic.min()):
        return "delayed_"
    return ""


# --- the memory model


def capacity(result: xr.Dataset) -> Figure:
    """Where the memory model ends: nearer to 2-Mem or to 2-Gen, over K and d, for each F."""
    count = result.sizes["hidden"]
    figure, panels = _panels(count, 2.4)
    difference = (result.to_2_gen - result.to_2_mem).transpose("hidden", "width", "chains").values
    limit = float(np.nanmax(np.abs(difference)))
    sizes = result.chains.values
    for place, axes in enumerate(panels):
        image = axes.imshow(
            difference[place],
            cmap="RdBu_r",
            vmin=-limit,
            vmax=limit,
            origin="lower",
            aspect="auto",
        )
        for row, (low, high) in enumerate(result.K2.isel(hidden=place).values.T):
            # The line between the two K that bracket K2*.
            known = low if math.isfinite(low) else high
            if not math.isfinite(known):
                continue
            at = np.searchsorted(sizes, known) + (0.5 if math.isfinite(low) else -0.5)
            axes.plot([at, at], [row - 0.5, row + 0.5], color=LIGHT["ink"], linewidth=1.2)
        axes.set_xlim(-0.5, len(sizes) - 0.5)
        axes.set_xticks(range(len(sizes)), sizes.tolist())
        axes.set_yticks(range(result.sizes["width"]), result.width.values.tolist())
        axes.set_xlabel("chains K")
        axes.set_title(f"F = {int(result.hidden[place])}", loc="left")
    panels[0].set_ylabel("width d of the task vector")
    figure.colorbar(image, ax=panels, label="nearer to 2-Mem, nats")
    return figure


def _of_capacity(result: xr.Dataset) -> str:
    shown = (
        f"d = {int(here.width)}, F = {int(here.hidden)}: {_interval(*here.K2.values)}"
        for here in (
            result.isel(hidden=f, width=d)
            for f in range(result.sizes["hidden"])
            for d in range(result.sizes["width"])
        )
        if np.isfinite(here.K2.values).any()
    )
    return (
        "Where the encoder-pool-decoder model ends, after "
        f"{int(result.attrs['steps']):,} steps: red nearer to 2-Mem, blue nearer to 2-Gen; the "
        f"line is K2*. {'; '.join(shown)}."
    )


def geometry(result: xr.Dataset) -> Figure:
    """How chains' task vectors crowd as K grows, for each d; crosses are transformers."""
    figure, panels = _panels(3, 2.4)
    shades = np.linspace(0.75, 0.1, result.sizes["width"])
    here = result.isel(hidden=_fullest(result))
    for axes, (name, label) in zip(
        panels,
        (
            ("separation", "nearest means, in spreads"),
            ("dimension", "effective dimension"),
            ("readout", "linear read-out, share right"),
        ),
        strict=True,
    ):
        for shade, width in zip(shades, result.width.values.tolist(), strict=True):
            values = here[name].sel(width=width).dropna("chains")
            axes.plot(
                values.chains,
                values,
                ".-",
                color=str(shade),
                linewidth=0.9,
                markersize=3,
                label=f"d = {width}",
            )
        for phase in PHASES if "cell_chains" in result else ():
            at = result.cell_phase.values == phase
            if at.any():
                axes.plot(
                    result.cell_chains.values[at],
                    result[f"cell_{name}"].values[at],
                    "x",
                    color=PHASE_COLOURS[phase],
                    markersize=4,
                    label=f"transformer, {phase}",
                )
        axes.set_ylabel(label)
        chains = result.chains.values
        if "cell_chains" in result:
            chains = np.concatenate([chains, result.cell_chains.values])
        _logarithmic_chains(axes, chains)
    figure.legend(
        *panels[0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=7,
        handlelength=1.2,
    )
    return figure


def _fullest(result: xr.Dataset) -> int:
    """The place of the F at which most models were trained."""
    return int(result.separation.notnull().sum(["chains", "width"]).values.argmax())


def _of_geometry(result: xr.Dataset) -> str:
    beside = f"; crosses: {result.attrs['beside']}" if "beside" in result.attrs else ""
    return (
        "Task vectors of the memory model, one sequence against the chains' means: distance of a "
        "chain's mean to the nearest other over the spread within chains, effective dimension of "
        "the means, and how often a linear read-out finds the chain "
        f"(F = {int(result.hidden[_fullest(result)])}){beside}."
    )


# --- the race


def race(result: xr.Dataset) -> Figure:
    """Times of both circuits alone and of the whole model; what recognition lacks on 2-Gen."""
    figure, (left, right) = _panels(2, 2.7)
    for name, phase, marker, label in (
        ("tau_induction", "G2", "o", "induction circuit alone, to 2-Gen"),
        ("tau_recognition", "M2", "s", "recognition circuit alone, to M2"),
        ("tau_whole_2_mem", "M1", "x", "whole model, to M2"),
    ):
        seen = np.isfinite(result[name].values)
        left.plot(
            result.chains.values[seen],
            result[name].values[seen],
            marker,
            color=PHASE_COLOURS[phase],
            markersize=3.5,
            label=label,
        )
    observed = result.attrs["K1* observed"]
    if not isinstance(observed, str) and np.isfinite(observed).all():
        left.axvspan(*observed[1:], color=LIGHT["none"], label="K1* of the whole model")
    left.set(yscale="log", ylabel="optimizer steps")
    _logarithmic_chains(left, result.chains.values)
    left.set_ylim(top=3 * left.get_ylim()[1])  # room for the legend
    left.legend(frameon=True, framealpha=0.85, loc="upper left")

    sizes = np.unique(result.chains.values)
    excess = result.recognition_curve - result.loss_of_2_gen
    for shade, size in zip(np.linspace(0.1, 0.75, len(sizes)), sizes, strict=True):
        here = excess.isel(run=result.chains.values == size).mean("run")
        right.plot(here.step, here, color=str(shade), linewidth=0.9, label=f"K = {size}")
    right.axhline(0, color=LIGHT["muted"], linewidth=0.6)
    tau = result.tau_induction.values[np.isfinite(result.tau_induction.values)]
    if tau.size:
        between = float(np.diff(result.step.values).min())  # it formed since the evaluation before
        right.axvspan(
            tau.min() - between, tau.max(), color=PHASE_COLOURS["G2"], alpha=0.25, linewidth=0
        )
    right.set(xlabel="optimizer step", ylabel="recognition alone - 2-Gen, loss in nats")
    right.set_ylim(float(excess.min()) - 0.01, 0.12)
    right.legend(ncols=2, loc="upper right")
    return figure


def _of_race(result: xr.Dataset) -> str:
    never = int(np.isinf(result.tau_whole_2_mem.values).sum())
    told = {
        name: value if isinstance(value, str) else describe_interval(*value)
        for name, value in ((n, result.attrs.get(f"K1* {n}", "unknown")) for n in RACE_CRITERIA)
    }
    return (
        "Left: each circuit trained alone, and the whole model. Right: the loss of the recognition "
        "circuit alone above that of 2-Gen; the band is when the induction circuit has formed, and "
        "curves that are above 0 there predict a visit to G2. "
        f"{never} of {len(result.run)} whole models never came to M2, and have no mark. K1* of the "
        f"whole model: {told['observed']}; predicted by the loss at that time: "
        f"{told['loss at tau']}; by equal times: {told['equal times']}."
    )


RACE_CRITERIA = ("observed", "loss at tau", "equal times")


# --- fits of a run


def threshold(table: xr.Dataset) -> Figure:
    """Which runs lie beyond a threshold, and the logistic function of ln K fitted to them."""
    figure, (axes,) = _panels(height=2.0)
    chains, beyond = table.chains.values, table.beyond.values.astype(float)
    jitter = 0.02 * (table.seed.values - table.seed.values.mean())
    axes.plot(chains, beyond + jitter, "o", color=LIGHT["ink"], markersize=3)
    near = (table.curve_chains > chains.min() / 1.5) & (table.curve_chains < 1.5 * chains.max())
    axes.plot(table.curve_chains[near], table.curve_share[near], color=PHASE_COLOURS["G2"])
    _, low, high, *_ = table.fit.values[0]
    axes.axvspan(
        max(low, chains.min() / 1.5),
        min(high, 1.5 * chains.max()),
        color=LIGHT["none"],
    )
    axes.set_yticks([0, 1], ["below", "beyond"])
    _logarithmic_chains(axes, chains)
    return figure


def _of_threshold(symbol: str, beyond: str) -> Callable[[xr.Dataset], str]:
    def caption(table: xr.Dataset) -> str:
        value, low, high, *_ = table.fit.values[0]
        return (
            f"{symbol} = {describe_interval(value, low, high)}, by profile likelihood of a "
            f"logistic function of ln K (line; band: interval). Beyond it runs {beyond}; "
            f"{len(table.run)} runs."
        )

    return caption


def switching(table: xr.Dataset) -> Figure:
    """Steps at which runs turn to M2, diverging at K2*; triangles are runs that had not turned."""
    figure, (axes,) = _panels()
    chains, time, before = (table[name].values for name in ("chains", "time", "before"))
    turned = np.isfinite(time)
    limit = float(table.fit.sel(part="value", parameter="K2*"))
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
    axes.axvline(limit, color=PHASE_COLOURS["M2"], linewidth=0.8, linestyle=":")
    axes.set(yscale="log", xlabel="chains K", ylabel="optimizer steps to M2")
    axes.set_xlim(0.9 * chains.min(), max(1.1 * chains.max(), min(1.1 * limit, 2 * chains.max())))
    axes.set_ylim(time[turned].min() / 2, 3 * before.max())
    axes.legend(loc="center right")
    return figure


def _of_switching(table: xr.Dataset) -> str:
    (k2, k2_low, k2_high), (gamma, low, high) = table.fit.values[:, :3]
    return (
        "Steps from G2 to M2, and a (K2* - K)^-gamma fitted with the runs that had not turned as "
        f"censored: K2* = {describe_interval(k2, k2_low, k2_high)}, gamma = {gamma:.2g} "
        f"({_interval(low, high, '{:.2g}')})."
    )


DRAWINGS = {
    "K1": Drawing(
        threshold, "Threshold K1*", _of_threshold("K1*", "visit G2 on the way"), "fits {run}"
    ),
    "K2": Drawing(
        threshold, "Threshold K2*", _of_threshold("K2*", "do not end in M2"), "fits {run}"
    ),
    "switching": Drawing(switching, "Switching times", _of_switching, "fits {run}"),
    "landscape": Drawing(
        landscape, "The induction head's landscape", _of_landscape, "induction --out {out}"
    ),
    "growth": Drawing(growth, "Time to 2-Gen, reduced", _of_growth, "induction --out {out}"),
    "context": Drawing(growth, "Time to 2-Gen, transformer", _of_growth, "context --out {out}"),
    "race": Drawing(race, "The race behind K1*", _of_race, "race --out {out}"),
    "memory": Drawing(
        capacity, "Capacity of the memory model", _of_capacity, "memory --beside {run} --out {out}"
    ),
    "geometry": Drawing(
        geometry,
        "Task vectors as K grows",
        _of_geometry,
        "memory --beside {run} --out {out}",
    ),
}
"""By the name of the result's file."""

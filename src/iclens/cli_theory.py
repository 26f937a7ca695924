"""The command line of the theory: `iclens theory induction|context|memory|race|fits`."""

import sys
from collections.abc import Callable
from dataclasses import asdict
from json import dumps
from pathlib import Path
from typing import Annotated, Any

import tyro
import xarray as xr
from matplotlib.figure import Figure

from iclens.lab import theory
from iclens.lab.recipe import load_recipe
from iclens.lab.store import Run, open_run
from iclens.lab.theory import InductionStudy, MemoryStudy
from iclens.report import theory as draw
from iclens.report.figures import save_figures

INDUCTION, MEMORY = InductionStudy(), MemoryStudy()
GROWTH_CONTEXTS = (32, 64, 128, 256, 512, 1024, 2048)
"""Contexts at which the reduced model is followed."""


def induction(
    study: Annotated[InductionStudy, tyro.conf.arg(name="")] = INDUCTION,
    out: Path | None = None,
    json: bool = False,
) -> int:
    """Coefficients of the reduced induction head; with --out also its plane and its times.

    Args:
        study: What to compute.
        out: Folder for the landscape with its flow and for tau(N), with figures.
        json: Print JSON, for programs.
    """
    found = theory.coefficients(study)
    if json:
        print(dumps(found))
    else:
        print(f"C = {study.states}, N = {study.context}, rho = {study.rho:g}")
        for name in ("A_beta", "A_J", *theory.COEFFICIENTS):
            line = "{:8} {value:.6g} +- {error:.2g}".format(name, **found[name])
            formula = found["formula"].get(name)
            print(line if formula is None else f"{line}   formula, leading order: {formula:.6g}")
    if out is not None:
        _save(out, "landscape", theory.plane(study), draw.landscape, json)
        times = theory.growth(study, GROWTH_CONTEXTS)
        _save(out, "growth", times, draw.growth, json)
        _print_laws(times, json)
    return 0


def context(
    out: Path = Path("runs/context"),
    recipe: str = "context",
    contexts: tuple[int, ...] = (16, 32, 64, 128, 256, 512),
    json: bool = False,
) -> int:
    """Time to 2-Gen of the full transformer under SGD on fresh chains, at several N.

    Args:
        out: Folder of the runs, one for each N.
        recipe: Preset or .toml file; it must have infinitely many chains and SGD.
        contexts: N of the runs.
        json: Print JSON, for programs.
    """
    failed = theory.run_study(out, theory.context_recipes(load_recipe(recipe), contexts), _tell)
    times = theory.context_result(out)
    _save(out, "context", times, draw.growth, json)
    if json:
        print(dumps({name: times[name].values.tolist() for name in times.variables}))
    _print_laws(times, json)
    return _report(failed)


def memory(
    study: Annotated[MemoryStudy, tyro.conf.arg(name="")] = MEMORY,
    out: Path = Path("runs/memory"),
    json: bool = False,
) -> int:
    """Train the encoder-pool-decoder model over a grid of K, d and F, and map K2*(d, F).

    Args:
        study: The grid, and how each model is trained.
        out: Folder of the result.
        json: Print JSON, for programs.
    """
    found = theory.memory_result(
        study, lambda k, d, f: print(f"K = {k}, d = {d}, F = {f} is done", file=sys.stderr)
    )
    _save(out, "memory", found, draw.capacity, json)
    if json:
        names = ("chains", "width", "hidden", "loss", "to_2_gen", "to_2_mem", "K2")
        print(dumps({name: found[name].values.tolist() for name in names}))
        return 0
    print("distance to 2-Gen / to 2-Mem, nats")
    for f in found.hidden.values.tolist():
        print(f"F = {f:<5}" + "".join(f"{f'K = {k}':>14}" for k in found.chains.values.tolist()))
        for d in found.width.values.tolist():
            row = found.sel(width=d, hidden=f)
            pairs = zip(row.to_2_gen.values, row.to_2_mem.values, strict=True)
            ends = ["?" if end != end else f"{end:.0f}" for end in row.K2.values.tolist()]
            told = "".join(f"{f'{gen:.3f} / {mem:.3f}':>14}" for gen, mem in pairs)
            print(f"d = {d:<5}{told}   K2* between {ends[0]} and {ends[1]}")
    return 0


def race(out: Path = Path("runs/race"), recipe: str = "race", json: bool = False) -> int:
    """Train the whole model and each circuit alone, and predict K1* from the race.

    Args:
        out: Folder of the three runs.
        recipe: Preset or .toml file.
        json: Print JSON, for programs.
    """
    failed = theory.run_study(out, theory.race_recipes(load_recipe(recipe)), _tell)
    if failed:
        return _report(failed)
    found = theory.race_result(out)
    _save(out, "race", found, draw.race, json)
    told = {name: value for name, value in found.attrs.items() if name.startswith("K1*")}
    if json:
        print(dumps(told))
    else:
        for name, value in told.items():
            shown = value if isinstance(value, str) else "{:.3g} ({:.3g} to {:.3g})".format(*value)
            print(f"{name:18} {shown}")
    return 0


def fits(run: Path, /, json: bool = False) -> int:
    """Thresholds and exponents of a run, with 95 % intervals, or why they cannot be had.

    Args:
        run: Folder of the run.
        json: Print JSON, for programs.
    """
    found = theory.fit_run(open_run(run))
    for name, fit in found.items():
        if not isinstance(fit, str):
            plot = draw.switching if name == "switching" else None
            _save(run, theory.FIT_FILES[name], theory.fit_dataset(fit), plot, json)
    if json:
        plain = {
            name: {"refused": fit}
            if isinstance(fit, str)
            else {"goodness": fit.goodness, **{k: asdict(p) for k, p in fit.parameters.items()}}
            for name, fit in found.items()
        }
        print(dumps(plain))
        return 0
    for name, fit in found.items():
        if isinstance(fit, str):
            print(f"{name}: refused: {fit}")
            continue
        for parameter, value in fit.parameters.items():
            ends = ["open" if end is None else f"{end:.3g}" for end in value.profile]
            line = f"{name}: {parameter} = {value.value:.3g}, profile {ends[0]} to {ends[1]}"
            if value.bootstrap is not None:
                line += ", bootstrap {:.3g} to {:.3g}".format(*value.bootstrap)
            print(line)
    return 0


COMMANDS: dict[str, Callable[..., int]] = {
    "induction": induction,
    "context": context,
    "memory": memory,
    "race": race,
    "fits": fits,
}


def dispatch(arguments: list[str]) -> int:
    """Run `iclens theory ARGUMENTS`; returns its exit code."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: iclens theory COMMAND ...\n")
        for name, command in COMMANDS.items():
            print(f"  {name:10} {(command.__doc__ or '').splitlines()[0]}")
        return 0 if arguments else 2
    name, *rest = arguments
    if name not in COMMANDS:
        raise ValueError(f"unknown command {name!r}; expected one of {', '.join(COMMANDS)}")
    code: int = tyro.cli(COMMANDS[name], args=rest, prog=f"iclens theory {name}")
    return code


def _tell(run: Run) -> dict[str, Any]:
    return {
        "on_cell": lambda cell, event: print(f"{run.name} {cell.name}: {event}", file=sys.stderr)
    }


def _report(failed: dict[str, str]) -> int:
    for name, reason in failed.items():
        print(f"failed: {name}: {reason.strip().splitlines()[-1]}", file=sys.stderr)
    return 1 if failed else 0


def _print_laws(times: xr.Dataset, quiet: bool) -> None:
    for place, law in enumerate([] if quiet else times.law.values.tolist()):
        a, error, weight = (float(times[part][place]) for part in ("a", "error", "weight"))
        print(f"tau = a {law:9} a = {a:.4g} +- {error:.2g}, Akaike weight {weight:.3g}")


def _save(
    folder: Path,
    name: str,
    result: xr.Dataset,
    figure: Callable[[xr.Dataset], Figure] | None,
    quiet: bool,
) -> None:
    paths = [theory.save_result(folder, name, result)]
    if figure is not None:
        paths += save_figures(folder / "figures" / "theory", {name: figure}, result)
    for path in () if quiet else paths:
        print(f"wrote   {path}")

"""The commands of the theory: `iclens theory induction|context|memory|race|fits`."""

import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro
import xarray as xr

from iclens.cli.output import as_json
from iclens.lab import fits as lab_fits
from iclens.lab import reduced, studies
from iclens.lab.files import save_result
from iclens.lab.recipe import load_recipe
from iclens.lab.reduced import InductionStudy, MemoryStudy
from iclens.lab.store import Run, is_run, open_run
from iclens.lab.sweep import default_workers
from iclens.lab.work import Event
from iclens.report import write_report
from iclens.report.plates import save_plates
from iclens.report.theory import describe_interval, theory_plates

INDUCTION, MEMORY = InductionStudy(), MemoryStudy()
GROWTH_CONTEXTS = (32, 64, 128, 256, 512, 1024, 2048)
"""Contexts at which the reduced model is followed."""
OUT = Path("runs/theory")


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
    found = reduced.coefficients(study)
    if json:
        print(as_json(found))
    else:
        print(f"C = {study.states}, N = {study.context}, rho = {study.rho:g}")
        for name in ("A_beta", "A_J", *reduced.COEFFICIENTS):
            line = "{:8} {value:.6g} +- {error:.2g}".format(name, **found[name])
            formula = found["formula"].get(name)
            print(line if formula is None else f"{line}   formula, leading order: {formula:.6g}")
    if out is not None:
        times = reduced.growth(study, GROWTH_CONTEXTS)
        _save(out, {"landscape": reduced.plane(study), "growth": times}, json)
        _print_laws(times, json)
    return 0


def context(
    out: Path = OUT,
    recipe: str = "context",
    contexts: tuple[int, ...] = (16, 32, 64, 128, 256, 512),
    json: bool = False,
) -> int:
    """Time to 2-Gen of the full transformer under SGD on fresh chains, at several N.

    Args:
        out: Folder of the result; the runs, one for each N, are in its folder `context`.
        recipe: Preset or .toml file; it must have infinitely many chains and SGD.
        contexts: N of the runs.
        json: Print JSON, for programs.
    """
    folder = out / "context"
    recipes = studies.context_recipes(load_recipe(recipe), contexts)
    failed = studies.run_study(folder, recipes, _tell)
    code = _report(failed)
    times = studies.context_result(folder)
    _save(out, {"context": times}, json)
    if json:
        print(as_json({name: times[name].values.tolist() for name in times.variables}))
    else:
        alone = dict(zip(times.reduced_context.values, times.reduced_tau.values, strict=True))
        print("flow time to 2-Gen: N, transformer (median over seeds), reduced model")
        for n, tau in times.tau.groupby(times.context).median().to_series().items():
            print(f"{n:6} {tau:8.0f} {alone[n]:8.0f}")
        for n, (cells, late, lost) in zip(times.study.values, times.counts.values, strict=True):
            if late or lost:
                print(f"N = {n}: of {cells} models {late} came too late, {lost} were not finished")
    _print_laws(times, json)
    return code


def memory(
    study: Annotated[MemoryStudy, tyro.conf.arg(name="")] = MEMORY,
    out: Path = OUT,
    beside: Path | None = None,
    json: bool = False,
) -> int:
    """Train the encoder-pool-decoder model over a grid of K, d and F, and map K2*(d, F).

    A model that the result holds is not trained again, so that a grid can be extended.

    Args:
        study: The grid, and how each model is trained.
        out: Folder of the result.
        beside: A run, whose transformers' task vectors are measured beside the model's.
        json: Print JSON, for programs.
    """
    run = None if beside is None else open_run(beside)
    found = reduced.run_memory_study(
        study, out, lambda name: print(f"{name} is done", file=sys.stderr)
    )
    vectors = found[["separation", "dimension", "readout"]]
    if run is not None:
        cells = reduced.transformer_geometry(run)
        vectors = vectors.assign({f"cell_{name}": cells[name] for name in cells})
        vectors = vectors.assign_attrs(beside=f"transformers of {run.name}, by phase at the end")
    _save(out, {"geometry": vectors}, json)
    if json:
        names = ("chains", "width", "hidden", "loss", "to_2_gen", "to_2_mem", "K2")
        print(as_json({name: found[name].values.tolist() for name in names}))
        return 0
    print("distance to 2-Gen / to 2-Mem, nats")
    for f in found.hidden.values.tolist():
        print(f"F = {f:<5}" + "".join(f"{f'K = {k}':>14}" for k in found.chains.values.tolist()))
        for d in found.width.values.tolist():
            row = found.sel(width=d, hidden=f)
            pairs = zip(row.to_2_gen.values, row.to_2_mem.values, strict=True)
            ends = ["?" if end != end else f"{end:.0f}" for end in row.K2.values.tolist()]
            told = "".join(
                f"{f'{gen:.3f} / {mem:.3f}' if gen == gen else 'not run':>14}" for gen, mem in pairs
            )
            print(f"d = {d:<5}{told}   K2* between {ends[0]} and {ends[1]}")
    return 0


def race(out: Path = OUT, recipe: str = "race", json: bool = False) -> int:
    """Train the whole model and each circuit alone, and predict K1* from the race.

    Args:
        out: Folder of the result; the three runs are in its folder `race`.
        recipe: Preset or .toml file.
        json: Print JSON, for programs.
    """
    folder = out / "race"
    failed = studies.run_study(folder, studies.race_recipes(load_recipe(recipe)), _tell)
    if failed:
        return _report(failed)
    found = studies.race_result(folder)
    _save(out, {"race": found}, json)
    told = {name: value for name, value in found.attrs.items() if name.startswith("K1*")}
    if json:
        cells = {
            name: found[name].values.tolist() for name in found if found[name].dims == ("run",)
        }
        print(as_json(told | {"cells": cells}))
        return 0
    print("steps, median over seeds: to M2 alone and together, to 2-Gen alone and together")
    pairs = ("tau_recognition", "tau_whole_2_mem", "tau_induction", "tau_whole_2_gen")
    for k in np.unique(found.chains.values):
        medians = [float(found[name][found.chains.values == k].median()) for name in pairs]
        print(
            f"K = {k:<6}" + "".join(f"{m:8.0f}" if m < np.inf else f"{'never':>8}" for m in medians)
        )
    for name, value in told.items():
        print(f"{name:18} {value if isinstance(value, str) else describe_interval(*value)}")
    return 0


def fits(run: Path, /, json: bool = False) -> int:
    """Thresholds and exponents of a run, with 95 % intervals, or why they cannot be had.

    Args:
        run: Folder of the run.
        json: Print JSON, for programs.
    """
    opened = open_run(run)
    found = lab_fits.fit_run(opened)
    results = {
        lab_fits.FIT_FILES[name]: lab_fits.fit_dataset(fit)
        for name, fit in found.items()
        if not isinstance(fit, str)
    }
    for name in set(lab_fits.FIT_FILES.values()) - set(results):  # of an earlier fit
        for path in (run / "theory" / f"{name}.nc", run / "theory" / "figures" / f"{name}.svg"):
            path.unlink(missing_ok=True)
    _save(run / "theory", results, json)
    if json:
        plain = {
            name: {"refused": fit}
            if isinstance(fit, str)
            else {"goodness": fit.goodness, **{k: asdict(p) for k, p in fit.parameters.items()}}
            for name, fit in found.items()
        }
        print(as_json(plain))
        return 0
    done = len(lab_fits.fitted_cells(opened))
    print(f"from {done} of {len(opened.cells)} cells: finished, with finitely many chains")
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


def _tell(run: Run) -> dict[str, Any]:
    def tell(event: Event) -> None:
        if event.kind not in ("steps", "phase"):
            print(f"{run.name} {event.cell}: {event.kind}", file=sys.stderr)

    return {"on_event": tell, "workers": default_workers()}


def _report(failed: dict[str, str]) -> int:
    for name, reason in failed.items():
        print(f"failed: {name}: {reason.strip().splitlines()[-1]}", file=sys.stderr)
    return 1 if failed else 0


def _print_laws(times: xr.Dataset, quiet: bool) -> None:
    families = [""] if "delayed_a" not in times else ["", "delayed_"]
    least = min(float(times[f"{family}aic"].min()) for family in families)
    for family in [] if quiet else families:
        for place, law in enumerate(times.law.values.tolist()):
            a, error, delay, aic, weight = (
                float(times[f"{family}{part}"][place])
                for part in ("a", "error", "delay", "aic", "weight")
            )
            start = f"{delay:.0f} + " if family else ""
            print(
                f"tau = {start + 'a ' + law:17} a = {a:.4g} +- {error:.2g}, "
                f"AIC {aic - least:+.1f}, Akaike weight {weight:.3g}"
            )


def _save(out: Path, results: dict[str, xr.Dataset], quiet: bool) -> None:
    """Save results and their figures; beside a run's own files, its page is written again."""
    paths = [save_result(out, name, result) for name, result in results.items()]
    if is_run(out.parent):
        paths.append(write_report(open_run(out.parent)))
    else:
        paths += save_plates(out / "figures", theory_plates(out))
    for path in () if quiet else paths:
        print(f"wrote   {path}")

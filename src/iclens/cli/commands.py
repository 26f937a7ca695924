"""The commands on runs: train, look, trace, report."""

import sys
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from iclens.cli.progress import Progress, duration

if TYPE_CHECKING:
    from iclens.lab.store import Run


def run(arguments: list[str]) -> int:
    """Train a recipe's cells, label their phases and write the report."""
    import tyro

    from iclens.lab.recipe import Recipe, load_recipe, presets
    from iclens.lab.store import create_run, open_run
    from iclens.lab.sweep import plan as make_plan
    from iclens.lab.sweep import run_sweep
    from iclens.report import write_report

    if not arguments or arguments[0].startswith("-"):
        asked = arguments[:1] in (["-h"], ["--help"])
        print(
            "usage: iclens run RECIPE [--out DIR] [--plan] [--SECTION.KEY VALUE ...]\n"
            f"RECIPE is the path of a .toml file, or one of: {', '.join(presets())}\n"
            "`iclens run RECIPE --help` lists the keys.",
            file=sys.stdout if asked else sys.stderr,
        )
        return 0 if asked else 2
    source, *rest = arguments
    loaded = load_recipe(source)

    def command(
        recipe: Annotated[Recipe, tyro.conf.arg(name="")] = loaded,
        out: Path | None = None,
        plan: bool = False,
    ) -> tuple[Recipe, Path | None, bool]:
        """Train a recipe's cells, label their phases and write the report.

        Args:
            recipe: Keys of the recipe to change.
            out: Folder of the run; runs/NAME where it is not given.
            plan: Print cells, steps, and estimated time and memory, and stop.
        """
        return recipe, out, plan

    recipe, out, only_plan = tyro.cli(command, args=rest, prog=f"iclens run {source}")
    if only_plan:
        planned = make_plan(recipe)
        print(f"cells   {planned.cells}")
        print(f"steps   {planned.steps}")
        print(f"time    about {duration(planned.seconds)} on this machine")
        print(f"memory  about {planned.peak_bytes / 2**20:.0f} MiB")
        return 0
    created = create_run(out or Path("runs") / Path(source).stem, recipe)
    progress = Progress(created)
    try:
        failed = run_sweep(created, on_cell=progress.on_cell, on_steps=progress.on_steps)
    except KeyboardInterrupt:
        print(
            f"\nstopped; nothing that was saved is lost. To go on: {created.resume_command}",
            file=sys.stderr,
        )
        return 130
    finished = open_run(created.path)
    print_phases(finished)
    print(f"report  {write_report(finished)}")
    for name, reason in failed.items():
        last = reason.strip().splitlines()[-1]
        saved = created.path / "cells" / name / "error.txt"
        told = f" (all of it in {saved})" if saved.exists() else ""
        print(f"failed: {name}: {last}{told}", file=sys.stderr)
    return 1 if failed else 0


def status(run: Path, /) -> int:
    """Say what is done, unfinished, failed, damaged or missing in a run.

    Args:
        run: Folder of the run.
    """
    from iclens.lab.store import open_run

    opened = open_run(run)
    for cell in opened.cells:
        curves = cell.curves
        step = 0 if curves is None else int(curves.step[-1])
        outcome = "" if curves is None else curves.attrs["outcome"]
        told = (cell.error or "").strip().splitlines()[-1:] or (
            [outcome] if outcome.startswith("diverged") else []
        )
        line = f"{cell.name:28} {cell.status:10} step {step} of {cell.recipe.train.steps}"
        print(" ".join([line, *told]))
    if any(cell.status != "done" for cell in opened.cells):
        print(f"to go on: {opened.resume_command}")
    return 0


def phases(run: Path, /, json: bool = False) -> int:
    """Print the phases that each cell goes through, and the thresholds.

    Args:
        run: Folder of the run.
        json: Print JSON, for programs.
    """
    from iclens.lab.store import open_run

    opened = open_run(run)
    if json:
        found = opened.phase_map
        print(dumps({"cells": found.cells, "thresholds": found.thresholds}))
    else:
        print_phases(opened)
    return 0


def trace(
    run: Path,
    /,
    chains: str | None = None,
    seed: int = 0,
    step: str = "last",
    epsilon: float = 0.1,
    show: tuple[int, ...] = (0, 1, 2, 3),
    json: bool = False,
) -> int:
    """Find the circuit of a cell and test which mechanism it is.

    Args:
        run: Folder of the run.
        chains: K of the cell; needed where the run has several.
        seed: Seed of the cell.
        step: A checkpoint's step, "last", or "all" for the whole training history.
        epsilon: Share of KL(full || all edges cut) that the circuit may differ by.
        show: Sequences whose attention patterns are drawn; sequence i is of chain i, from 0.
        json: Print JSON, for programs.
    """
    from iclens.lab.store import open_run
    from iclens.lab.trace import TraceRequest, describe, save_trace, summary, trace_cell
    from iclens.report.circuits import write_circuit_figures

    opened = open_run(run)
    request = TraceRequest.parse(opened, chains, seed, step)
    found = trace_cell(
        request.cell,
        request.steps,
        epsilon=epsilon,
        show=show,
        on_step=lambda done: print(f"step {done} traced", file=sys.stderr),
    )
    path = save_trace(opened.path, found, request.name)
    figures = write_circuit_figures(opened.path, path)
    if json:
        print(dumps(summary(found)))
    else:
        print(describe(found))
        for file in (path, *figures):
            print(f"wrote   {file}")
    return 0


def report(run: Path, /) -> int:
    """Write the page and the figures of a run again.

    Args:
        run: Folder of the run.
    """
    from iclens.lab.store import open_run
    from iclens.report import write_report

    print(write_report(open_run(run)))
    return 0


def print_phases(run: "Run") -> None:
    print(f"{'K':>8} {'seed':>4}  phases (and the step at which each begins)")
    for cell in run.phase_map.cells:
        path = " -> ".join(
            f"{phase} ({step})" for phase, step in zip(cell["phases"], cell["steps"], strict=True)
        )
        print(f"{cell['chains']:>8} {cell['seed']:>4}  {path or 'none'}")
    for name, threshold in run.phase_map.thresholds.items():
        low, high = threshold["bracket"] or (None, None)
        print(f"{name} between {low or '?'} and {high or '?'}: {threshold['note']}")

"""The commands on runs: train, look, trace, report."""

import contextlib
import shlex
import sys
from collections import Counter
from dataclasses import dataclass
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from iclens.interrupts import STOPPED, held_back

if TYPE_CHECKING:
    from iclens.lab.store import Run
    from iclens.lab.work import Event


@dataclass(frozen=True)
class RunOptions:
    """Where and how a recipe is run."""

    out: Path | None = None
    """Folder of the run; runs/NAME where it is not given."""
    plan: bool = False
    """Print cells, steps, and estimated time and memory, and stop."""
    create: bool = False
    """Write the run's folder and stop, for `iclens cell`."""
    workers: int | None = None
    """Processes of one thread each, one for each core where it is not given; with 0 (and with a
    GPU, where it is not given) cells are trained in this process."""
    scheduler: str = ""
    """Address of a Dask scheduler whose workers train the cells."""
    ensemble: int | None = None
    """Cells trained in one program in this process; 64 with a GPU, else 1, by default."""
    wandb: str = ""
    """Project of Weights & Biases that follows the training (extra `wandb`)."""

    def __post_init__(self) -> None:
        for name, least in (("workers", 0), ("ensemble", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"--{name}: expected at least {least}, got {value}")
        asked = [
            name
            for name, given in (
                ("--workers", self.workers),
                ("--scheduler", self.scheduler),
                ("--ensemble", (self.ensemble or 1) > 1),
            )
            if given
        ]
        if len(asked) > 1:
            raise ValueError(f"expected one of {' and '.join(asked)}, got both")


DEFAULTS = RunOptions()


def run(arguments: list[str]) -> int:
    """Train a recipe's cells, label their phases and write the report."""
    with held_back():
        import tyro

        from iclens.cli.live import LiveLog
        from iclens.cli.progress import Progress, duration
        from iclens.lab.ensemble import default_members
        from iclens.lab.recipe import Recipe, load_recipe, presets
        from iclens.lab.source import prior_of
        from iclens.lab.store import create_run, open_run
        from iclens.lab.sweep import default_workers, run_sweep
        from iclens.lab.sweep import plan as make_plan
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
        options: Annotated[RunOptions, tyro.conf.arg(name="")] = DEFAULTS,
    ) -> tuple[Recipe, RunOptions]:
        """Train a recipe's cells, label their phases and write the report.

        Args:
            recipe: Keys of the recipe to change.
            options: Where and how.
        """
        return recipe, options

    recipe, options = tyro.cli(command, args=rest, prog=f"iclens run {source}")
    workers = default_workers() if options.workers is None else options.workers
    if options.plan:
        planned = make_plan(recipe)
        at_once = max(1, min(workers, planned.cells))
        some = ", of which some are trained, and others between them" * recipe.sweep.refine
        print(f"cells   {planned.cells}{some}")
        print(f"steps   {planned.steps}")
        print(f"time    about {duration(planned.seconds / at_once)} on this machine")
        each = f" for each of {at_once} workers" if at_once > 1 else ""
        print(f"memory  about {planned.peak_bytes / 2**20:.0f} MiB{each}")
        return 0
    if options.create and recipe.sweep.refine:
        raise ValueError("--create: the cells of a sweep that refines are not known beforehand")
    if recipe.cluster.kind == "slurm" and (options.workers is not None or options.ensemble):
        raise ValueError(
            "--workers and --ensemble train on this machine: give --cluster.kind local with them"
        )
    created = create_run(options.out or Path("runs") / Path(source).stem, recipe)
    if recipe.task.chains or recipe.prior.kind != "dirichlet":
        print(f"chains  {prior_of(recipe).two_gen}")
    if options.create:
        count = len(created.cells)
        print(f"{created.path}: {count} cells. Each is done by")
        print(f"  iclens cell {shlex.quote(str(created.path))} INDEX    (0 to {count - 1})")
        return 0
    members = options.ensemble or 1
    elsewhere = options.workers or options.scheduler or recipe.cluster.kind != "local"
    if options.ensemble is None and not elsewhere:
        members = default_members(recipe)
    try:
        with contextlib.ExitStack() as stack:
            progress = stack.enter_context(Progress(created))
            listeners = [progress.on_event]
            if options.wandb:
                log = stack.enter_context(LiveLog(created, options.wandb, progress.say))
                listeners.append(log.on_event)

            def hear(event: "Event") -> None:
                for listener in listeners:
                    listener(event)

            failed = run_sweep(
                created,
                workers=workers,
                scheduler=options.scheduler,
                ensemble=members,
                on_event=hear,
            )
        finished = open_run(created.path)
        print_phases(finished)
        try:
            print(f"report  {write_report(finished)}")
        except OSError as error:  # the failures of cells are still to be told
            failed["report"] = str(error)
    except KeyboardInterrupt:
        again = f" --wandb {shlex.quote(options.wandb)}" if options.wandb else ""
        print(
            f"\nstopped; nothing that was saved is lost. To go on: {created.resume_command}{again}",
            file=sys.stderr,
        )
        return STOPPED
    for name, reason in failed.items():
        last = reason.strip().splitlines()[-1]
        saved = created.path / "cells" / name / "error.txt"
        told = f" (all of it in {saved})" if saved.exists() else ""
        print(f"failed: {name}: {last}{told}", file=sys.stderr)
    return 1 if failed else 0


def cell(run: Path, index: int, /) -> int:
    """Train one cell of a run, by its place in the order of work, as a job of an array does.

    Args:
        run: Folder of the run, as `iclens run --create` makes it.
        index: From 0.
    """
    with held_back():
        from iclens.lab.store import open_run, record_provenance
        from iclens.lab.sweep import in_order
        from iclens.lab.work import use_one_thread, work

    use_one_thread()
    opened = open_run(run)
    if opened.recipe.sweep.refine:
        raise ValueError("the cells of a sweep that refines are not known beforehand")
    cells = in_order(opened.cells)
    if not 0 <= index < len(cells):
        raise ValueError(f"expected an index from 0 to {len(cells) - 1}, got {index}")
    record_provenance(opened, {"cell": index})
    chosen = cells[index]
    quiet = ("steps",)

    def tell(event: "Event") -> None:
        if event.kind not in quiet:
            what = f"step {event.steps}" if event.kind == "phase" else event.kind
            print(f"{event.cell}: {what} {event.detail}".rstrip(), file=sys.stderr)

    reason = work(chosen, tell)
    print(f"{chosen.name}: {'done' if reason is None else reason.strip().splitlines()[-1]}")
    return 0 if reason is None else 1


def status(run: Path, /) -> int:
    """Say what is done, running, unfinished, failed, damaged or missing in a run; time left.

    Args:
        run: Folder of the run.
    """
    from iclens.cli.progress import duration
    from iclens.lab.store import open_run

    opened = open_run(run)
    steps = opened.recipe.train.steps
    rate, left, counts = 0.0, 0, Counter[str]()
    for cell in opened.cells:
        curves = cell.curves
        step = 0 if curves is None else int(curves.step[-1])
        outcome = "" if curves is None else curves.attrs["outcome"]
        told = (cell.error or "").strip().splitlines()[-1:] or (
            [outcome] if outcome.startswith("diverged") else []
        )
        held = cell.is_held
        state = "running" if held else cell.status
        if state == "done" and outcome == "imported":
            state = outcome
        line = f"{cell.name:28} {state:10} step {step}"
        line += f" of {steps}" * (state != "imported")
        counts[state] += 1
        if curves is not None and state != "done":
            told = [str(curves.phase.values[-1]), *told]
        print(" ".join([line, *told]))
        if cell.status != "done":
            left += steps - step
        if held:
            rate += cell.rate
    print(", ".join(f"{count} {state}" for state, count in counts.items()))
    if counts["running"] and rate:
        print(f"about {duration(left / rate)} left at {rate:.0f} steps/s")
    elif left and not counts["running"]:
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
    from iclens.report.circuits import circuit_plates
    from iclens.report.plates import save_plates

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
    figures = save_plates(opened.path / "figures" / path.stem, circuit_plates(path))
    if json:
        print(dumps(summary(found)))
    else:
        print(describe(found))
        for file in (path, *figures):
            print(f"wrote   {file}")
    return 0


def figure(run: Path, name: str = "", /, out: Path | None = None) -> int:
    """Make one figure of a run for a paper: SVG, PDF, and the table behind it as CSV.

    Args:
        run: Folder of the run.
        name: Name of the figure; without one the names are listed.
        out: Folder to write to; where the report has it if it is not given.
    """
    from iclens.lab.store import open_run
    from iclens.report import figure_names, write_figure

    opened = open_run(run)
    for line in write_figure(opened, name, out) if name else figure_names(opened):
        print(line)
    return 0


def report(runs: tuple[Path, ...], /, out: Path | None = None) -> int:
    """Write the page and the figures of a run again, or several runs side by side.

    Args:
        runs: Folder of the run, or of the runs to compare.
        out: File of the comparison, `comparison.html` if it is not given.
    """
    from iclens.lab.store import open_run
    from iclens.report import compare, write_report

    if not runs:
        raise ValueError("expected the folder of a run, or of several to compare, got none")
    if len(runs) > 1:
        print(compare([open_run(run) for run in runs], out or Path("comparison.html")))
    elif out is None:
        print(write_report(open_run(runs[0])))
    else:
        raise ValueError("--out: expected several runs to compare, got one")
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

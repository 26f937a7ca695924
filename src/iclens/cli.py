"""The command line: parse, call, print.

Heavy imports wait until a command needs them, so that help answers at once.
"""

import difflib
import inspect
import sys
import time
from collections.abc import Callable
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

if TYPE_CHECKING:
    from iclens.lab.cell import Cell
    from iclens.lab.store import Run

PLAIN_SECONDS = 10.0
"""Time between lines of progress where there is no terminal."""


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


def theory(arguments: list[str]) -> int:
    """Reduced models, the race of the circuits, fits of the thresholds."""
    from iclens.cli_theory import dispatch

    return dispatch(arguments)


COMMANDS: dict[str, Callable[..., int]] = {
    "run": run,
    "status": status,
    "phases": phases,
    "trace": trace,
    "theory": theory,
    "report": report,
}


def main() -> None:
    """Entry point of `iclens`; exits with 0, 1 if cells failed, 2 for errors a user can mend."""
    sys.exit(dispatch(sys.argv[1:]))


def dispatch(arguments: list[str]) -> int:
    """Run a command line and return its exit code."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: iclens COMMAND ...\n")
        for name, command in COMMANDS.items():
            print(f"  {name:8} {(inspect.getdoc(command) or '').splitlines()[0]}")
        print("\niclens COMMAND --help says more.")
        return 0 if arguments else 2
    if arguments[0] == "--version":
        from iclens import __version__

        print(f"iclens {__version__}")
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        print(
            f"iclens: unknown command {name!r}{hint} Expected one of {', '.join(COMMANDS)}.",
            file=sys.stderr,
        )
        return 2
    try:
        if name in ("run", "theory"):  # these read on by themselves
            return COMMANDS[name](rest)
        import tyro

        code: int = tyro.cli(COMMANDS[name], args=rest, prog=f"iclens {name}")
        return code
    except (ValueError, OSError) as error:
        print(f"iclens {name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"iclens {name}: stopped", file=sys.stderr)
        return 130


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


def duration(seconds: float) -> str:
    """Seconds as a text to read."""
    minutes = seconds / 60
    if minutes < 1:
        return f"{seconds:.0f} s"
    return f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.1f} h"


class Progress:
    """Progress of a sweep: a live line in a terminal, plain lines elsewhere."""

    def __init__(self, run: "Run") -> None:
        self.left = len(run.recipe.sweep.chains) * len(run.recipe.sweep.seeds)
        self.left *= run.recipe.train.steps
        self.trained = 0  # steps, and the seconds they took, without compilation
        self.seconds = 0.0
        self.last: tuple[int, float] | None = None
        self.shown = time.monotonic()

    def on_cell(self, cell: "Cell", event: str) -> None:
        self.last = None
        if event in ("skip", "done", "fail"):
            self.left -= cell.recipe.train.steps
        told = {
            "start": "starts",
            "skip": "is done already",
            "set aside": f"is damaged ({cell.damage}): set aside, computed again",
            "done": "is done",
            "fail": "failed",
        }[event]
        self.say(f"{cell.name} {told}", final=True)

    def on_steps(self, cell: "Cell", steps: int) -> None:
        now = time.monotonic()
        if self.last is not None:
            self.trained += steps - self.last[0]
            self.seconds += now - self.last[1]
        self.last = steps, now
        live = sys.stderr.isatty()
        if not self.trained or now - self.shown < (0.2 if live else PLAIN_SECONDS):
            return
        self.shown = now
        rate = self.trained / self.seconds
        self.say(
            f"{cell.name} step {steps} of {cell.recipe.train.steps}, "
            f"{rate:.0f} steps/s, {duration((self.left - steps) / rate)} left",
            final=not live,
        )

    def say(self, line: str, *, final: bool) -> None:
        clear: Any = "\r\x1b[K" if sys.stderr.isatty() else ""
        print(f"{clear}{line}", end="\n" if final else "", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()

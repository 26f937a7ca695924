"""`python benchmarks/sweep.py`: a sweep of eight equal quick cells on two workers.

Beside it the same cells by two bare processes of one thread each (aim: at most 1.1 times theirs),
and one after another in one process with all threads (aim: at most 0.6 of that).
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from iclens.lab.cell import Cell, run_cell
from iclens.lab.recipe import SweepConfig, load_recipe
from iclens.lab.work import use_one_thread

SEEDS = tuple(range(8))
RECIPE = replace(load_recipe("quick"), sweep=SweepConfig(chains=(32,), seeds=SEEDS))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "r.toml"
        path.write_text(RECIPE.to_toml())
        run = [sys.executable, "-m", "iclens.cli", "run", str(path), "--out"]
        bare = [sys.executable, __file__]
        times = {
            "sweep": timed([*run, f"{folder}/sweep", "--workers", "2"]),
            "bare": timed(*([*bare, f"{folder}/bare-{half}", half] for half in "01")),
            "serial": timed([*run, f"{folder}/serial", "--workers", "0"]),
        }
    print({name: f"{seconds:.0f} s" for name, seconds in times.items()})
    for other, aim in (("bare", 1.1), ("serial", 0.6)):
        ratio = times["sweep"] / times[other]
        print(f"sweep / {other:7} {ratio:.2f}   aim {aim} {'met' if ratio <= aim else 'missed'}")


def timed(*commands: list[str]) -> float:
    """Seconds until commands that run at the same time are done."""
    start = time.perf_counter()
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    started = [subprocess.Popen(command, **quiet) for command in commands]
    codes = [process.wait() for process in started]
    assert not any(codes), codes
    return time.perf_counter() - start


def half(folder: str, which: str) -> None:
    """Every other cell, in this process, on one thread."""
    use_one_thread()
    for seed in SEEDS[int(which) :: 2]:
        run_cell(Cell(Path(folder), RECIPE, 32, seed))


if __name__ == "__main__":
    if len(sys.argv) == 1:
        main()
    else:
        half(*sys.argv[1:])

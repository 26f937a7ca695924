"""What tests of sweeps share: a small recipe, `iclens run` in a process, the bytes it ends with."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil

from iclens.lab.cell import RESULTS
from iclens.lab.recipe import Recipe, SweepConfig, load_recipe
from iclens.lab.store import Run, open_run

TINY = load_recipe("tiny")
BASE = dataclasses.replace(
    TINY,
    train=dataclasses.replace(TINY.train, steps=2000, evaluations=12),
    evaluation=dataclasses.replace(TINY.evaluation, sequences=16),
    sweep=SweepConfig(chains=(2, 4)),
)
ICLENS = [sys.executable, "-m", "iclens.cli"]


def results(run: Run) -> dict[str, bytes]:
    """The bytes of all finished cells."""
    return {
        f"{cell.name}/{name}": (cell.path / name).read_bytes()
        for cell in open_run(run.path).cells
        for name in (*RESULTS, "done.json")
    }


class Sweep:
    """`iclens run` in a process of its own, in a process group of its own."""

    def __init__(self, folder: Path, recipe: Recipe = BASE, *, workers: int = 2, **environ: str):
        (folder / "r.toml").write_text(recipe.to_toml())
        self.path = folder / "run"
        self.log = folder / "log"
        self.process = subprocess.Popen(
            [*ICLENS, "run", "r.toml", "--out", "run", "--workers", str(workers)],
            cwd=folder,
            stdout=(log := os.open(self.log, os.O_CREAT | os.O_APPEND | os.O_WRONLY)),
            stderr=log,
            env=os.environ | environ,
            start_new_session=True,
        )
        os.close(log)

    def workers(self) -> list[psutil.Process]:
        """The processes that train, by their command lines."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return [child for child in children if "spawn_main" in " ".join(child.cmdline())]

    def wait_for(self, *pieces: str, seconds: float = 120) -> None:
        """Until there are some pieces of cells, such as `chains=2,seed=0/pieces/4.safetensors`."""
        end = time.monotonic() + seconds
        while not all((self.path / "cells" / piece).exists() for piece in pieces):
            assert self.process.poll() is None, self.told()
            assert time.monotonic() < end, self.told()
            time.sleep(0.02)

    def end(self, seconds: float = 240) -> int:
        return self.process.wait(seconds)

    def told(self) -> str:
        return self.log.read_text()


EARLY = [f"chains={k},seed=0/pieces/4.safetensors" for k in (2, 4)]
"""Written after the first steps of each cell."""

"""A sweep on SLURM: the real dask-jobqueue, with `sbatch` and `scancel` that run jobs here."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from sweeping import BASE, EARLY, ICLENS, results

from iclens.lab.recipe import ClusterConfig
from iclens.lab.slurm import slurm_job
from iclens.lab.store import Run, open_run

SBATCH = """#!{python}
import subprocess, sys, time
from pathlib import Path
job = Path(__file__).with_name("jobs") / str(time.time_ns())
broken = Path(__file__).with_name("broken")  # how many jobs are to end at once
left = int(broken.read_text()) if broken.exists() else 0
broken.write_text(str(max(0, left - 1)))
script = "exit 1" if left else Path(sys.argv[1]).read_text()
with open(f"{{job}}.log", "w") as log:
    started = subprocess.Popen(
        ["bash", "-c", script],  # the file is removed when this returns
        stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
    )
job.write_text(str(started.pid))
print("Submitted batch job", started.pid)
"""
SQUEUE = """#!{python}
import os, sys
try:
    os.killpg(int(sys.argv[-1]), 0)
    print(sys.argv[-1], "RUNNING")
except ProcessLookupError:
    raise SystemExit("slurm_load_jobs error: Invalid job id specified")
"""
SCANCEL = """#!{python}
import os, signal, sys
os.killpg(int(sys.argv[1]), signal.SIGTERM)
"""


class Queue:
    """A batch system whose jobs are process groups of this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.jobs = folder, folder / "jobs"
        self.jobs.mkdir(parents=True)
        self.install("sbatch", SBATCH)
        self.install("squeue", SQUEUE)
        self.install("scancel", SCANCEL)
        self.commands: list[subprocess.Popen[str]] = []

    def install(self, name: str, script: str) -> None:
        (self.folder / name).write_text(script.format(python=sys.executable))
        (self.folder / name).chmod(0o755)

    def submitted(self) -> list[int]:
        """Process groups of all jobs so far, in order."""
        paths = [path for path in self.jobs.iterdir() if path.suffix != ".log"]
        return [int(path.read_text()) for path in sorted(paths, key=lambda path: int(path.name))]

    def run(self, folder: Path, jobs: int, cores: int, *more: str) -> subprocess.Popen[str]:
        """`iclens run` in a process of its own."""
        there = ClusterConfig(kind="slurm", jobs=jobs, cores=cores)
        (folder / "r.toml").write_text(dataclasses.replace(BASE, cluster=there).to_toml())
        command = subprocess.Popen(
            [*ICLENS, "run", "r.toml", "--out", "run", *more],
            cwd=folder,
            env=os.environ | {"PATH": f"{self.folder}{os.pathsep}{os.environ['PATH']}"},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self.commands.append(command)
        return command

    def under_way(self) -> list[int]:
        groups = set(self.submitted())
        found = set()
        for process in psutil.process_iter():
            try:
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.add(os.getpgid(process.pid))
            except (psutil.NoSuchProcess, ProcessLookupError):
                continue
        return sorted(groups & found)


@pytest.fixture
def slurm(tmp_path):
    queue = Queue(tmp_path / "slurm")
    try:
        yield queue
    finally:
        for command in queue.commands:
            command.kill()
            command.communicate()
        for group in queue.under_way():
            os.killpg(group, signal.SIGKILL)


def test_jobs_of_slurm_run_workers_of_one_thread() -> None:
    config = ClusterConfig(
        kind="slurm", cores=4, memory="8 GiB", queue="short", directives=("--exclusive",)
    )
    script = slurm_job(config, "tcp://10.0.0.1:8786", "worker").job_script()
    for line in ("#SBATCH -p short", "#SBATCH --exclusive", "#SBATCH --cpus-per-task=4"):
        assert line in script
    for option in ("tcp://10.0.0.1:8786", "--nthreads 1", "--nworkers 4", "--memory-limit 0"):
        assert option in script


@pytest.mark.slow
@pytest.mark.parametrize(("jobs", "cores"), [(2, 1), (1, 2)])
def test_jobs_that_are_killed_are_submitted_again_and_nothing_is_lost(
    slurm, undisturbed, tmp_path, jobs, cores
) -> None:
    command = slurm.run(tmp_path, jobs, cores)
    end = time.monotonic() + 120
    while not all((tmp_path / "run" / "cells" / piece).exists() for piece in EARLY):
        assert command.poll() is None, command.stdout.read()
        assert time.monotonic() < end
        time.sleep(0.02)
    assert len(slurm.submitted()) == jobs
    for job in slurm.submitted():
        os.killpg(job, signal.SIGKILL)
    told, _ = command.communicate(timeout=120)
    assert command.returncode == 0, told
    assert len(slurm.submitted()) == 2 * jobs
    assert results(Run(tmp_path / "run")) == results(undisturbed)
    end = time.monotonic() + 30
    while slurm.under_way():
        assert time.monotonic() < end, "jobs are left"
        time.sleep(0.1)


@pytest.mark.slow
def test_a_job_that_is_refused_is_one_message(slurm, tmp_path) -> None:
    slurm.install("sbatch", "#!{python}\nraise SystemExit('sbatch: invalid partition specified')\n")
    command = slurm.run(tmp_path, 2, 1)
    told, _ = command.communicate(timeout=60)
    assert command.returncode == 2, told
    assert "invalid partition specified" in told
    assert "Traceback" not in told


@pytest.mark.slow
@pytest.mark.parametrize(("broken", "code"), [(1, 0), (9, 2)])
def test_jobs_that_end_before_a_worker_came(slurm, tmp_path, broken, code) -> None:
    """One is submitted again; if they all do, the command ends."""
    (slurm.folder / "broken").write_text(str(broken))
    command = slurm.run(tmp_path, 1, 2)
    told, _ = command.communicate(timeout=120)
    assert command.returncode == code, told
    assert "ended before a worker came: see its log" in told
    assert "Traceback" not in told
    assert not slurm.under_way()
    assert {cell.status for cell in open_run(tmp_path / "run").cells} == (
        {"missing"} if code else {"done"}
    )


def test_what_trains_here_is_not_asked_for_with_slurm(slurm, tmp_path) -> None:
    command = slurm.run(tmp_path, 1, 1, "--workers", "0")
    told, _ = command.communicate(timeout=60)
    assert command.returncode == 2
    assert "give --cluster.kind local with them" in told

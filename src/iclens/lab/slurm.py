"""Cells on jobs of SLURM, each with workers of one thread; a job that is lost is submitted again.

The scripts and commands are dask-jobqueue's.  Its clusters are not used: they submit again only
jobs of a single process, and a refused job is no error to them.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from typing import Any

import dask
from distributed import Client, Scheduler, SpecCluster

from iclens.interrupts import held_back
from iclens.lab.recipe import ClusterConfig

LOST_SECONDS = 15.0
"""Time without any of its workers after which a job is looked for, and submitted again."""
EARLY_ENDS = 3
"""Jobs that may end before a worker came, while no other job has one."""


@contextlib.contextmanager
def slurm_client(config: ClusterConfig) -> Iterator[tuple[Client, Callable[[], Iterable[str]]]]:
    """Jobs of SLURM until the block ends, and what is to be called to submit those again that end.

    Raises `ValueError` if the extra `slurm` is not installed, or there is no `sbatch`; `OSError` if
    a job is refused.
    """
    if not shutil.which("sbatch"):
        raise ValueError('cluster.kind = "slurm": there is no `sbatch` here')
    interface = dask.config.get("jobqueue.slurm.interface", None)  # as the jobs' workers take it
    options = {"dashboard_address": ":0", "interface": interface}
    scheduler = {"cls": Scheduler, "options": options}
    with SpecCluster(scheduler=scheduler) as cluster, Client(cluster, set_as_default=False) as on:
        jobs = _Jobs(on, config)
        try:
            for _ in range(config.jobs):
                jobs.submit()
            yield on, jobs.keep
        finally:
            jobs.cancel()


class _Jobs:
    """The jobs that are in the queue or run."""

    def __init__(self, client: Client, config: ClusterConfig) -> None:
        self.client, self.config = client, config
        self.jobs: dict[str, Any] = {}
        self.names = (f"iclens-{number}" for number in count())
        self.here: dict[str, float] = {}  # when a worker of each job was last seen
        self.early = 0  # jobs in a row that ended without
        self.next = time.monotonic() + LOST_SECONDS

    def submit(self) -> None:
        """One job more.  Raises `OSError` with what `sbatch` says if it is refused."""
        name = next(self.names)
        job = slurm_job(self.config, self.client.scheduler.address, name)
        try:
            with held_back():  # else it might be in the queue and nobody know of it
                self.client.sync(job.start)
                self.jobs[name] = job
        except (RuntimeError, ValueError) as error:
            told = str(error).partition("stderr:")[2].strip() or str(error)
            raise OSError(f"sbatch: {told.removeprefix('sbatch: ')}") from None

    def keep(self) -> Iterable[str]:
        """Submit another job for each that is lost; returns what there is to say of them.

        Raises `OSError` if they keep ending before a worker came.
        """
        workers = self.client.scheduler_info(n_workers=-1)["workers"].values()
        names = [str(worker["name"]) for worker in workers]
        now = time.monotonic()
        for name in self.jobs:
            if any(worker == name or worker.startswith(f"{name}-") for worker in names):
                self.here[name], self.early = now, 0
        if now < self.next:
            return []
        self.next = now + LOST_SECONDS / 3
        told = []
        for name, job in list(self.jobs.items()):
            if name in self.here:
                if now - self.here[name] < LOST_SECONDS:
                    continue
                told.append(f"job {job.job_id} has no worker any more: another one is submitted")
            elif self._is_queued(job.job_id):
                continue
            else:
                self.early += 1
                told.append(f"job {job.job_id} ended before a worker came: see its log")
                if self.early >= EARLY_ENDS and not any(other in self.here for other in self.jobs):
                    raise OSError(told[-1])
            self._cancel(self.jobs.pop(name))
        try:
            while len(self.jobs) < self.config.jobs:
                self.submit()
        except OSError as error:  # refused now, perhaps not the next time
            self.next = now + 4 * LOST_SECONDS
            told.append(str(error))
        return told

    def _is_queued(self, job_id: str) -> bool:
        """Whether a job waits or runs, as far as `squeue` says."""
        command = ["squeue", "--noheader", "--jobs", job_id]
        try:
            listed = subprocess.run(command, capture_output=True, text=True)
        except OSError:
            return True
        if listed.returncode:  # so it is for a job that ended some time ago
            return "Invalid job id" not in listed.stderr
        return bool(listed.stdout.strip())

    def _cancel(self, job: Any) -> None:
        with contextlib.suppress(Exception):  # it is gone, or there is no connection or scancel
            self.client.sync(job.close)

    def cancel(self) -> None:
        """End all jobs."""
        for job in self.jobs.values():
            self._cancel(job)


def slurm_job(config: ClusterConfig, scheduler: str, name: str) -> Any:
    """A job, not yet submitted, with workers for the Dask scheduler at an address.

    Raises `ValueError` if the extra `slurm` is not installed.
    """
    try:
        from dask_jobqueue.slurm import SLURMJob
    except ImportError:
        raise ValueError(
            'cluster.kind = "slurm" wants dask-jobqueue: install the extra slurm'
        ) from None
    return SLURMJob(
        scheduler,
        name,
        queue=config.queue or None,
        account=config.account or None,
        cores=config.cores,
        processes=config.cores,
        memory=config.memory,
        walltime=config.walltime,
        job_extra_directives=list(config.directives),
        worker_extra_args=["--memory-limit", "0"],  # the batch system's own limit is enough
    )

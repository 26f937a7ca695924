"""Cells on jobs of SLURM, each with workers of one thread; a job that is lost is submitted again.

The scripts and commands are dask-jobqueue's.  Its clusters are not used: they submit again only
jobs of a single process, and a refused job is no error to them.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator
from itertools import count
from threading import Event, Thread
from typing import Any

import dask
from distributed import Client, Scheduler, SpecCluster

from iclens.lab.recipe import ClusterConfig

POLL_SECONDS = 1.0
"""Time between two looks at which workers are there."""
LOST_SECONDS = 15.0
"""Time without any of its workers after which a job that had some is lost."""


@contextlib.contextmanager
def slurm_client(config: ClusterConfig) -> Iterator[Client]:
    """Jobs of SLURM, which are submitted again when they end, until the block does.

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
        end = Event()
        keeper = Thread(target=jobs.keep, args=(end,), daemon=True)
        try:
            for _ in range(config.jobs):
                jobs.submit()
            keeper.start()
            yield on
        finally:
            end.set()
            if keeper.ident:
                keeper.join()
            jobs.cancel()


class _Jobs:
    """The jobs that are in the queue or run."""

    def __init__(self, client: Client, config: ClusterConfig) -> None:
        self.client, self.config = client, config
        self.jobs: dict[str, Any] = {}
        self.names = (f"iclens-{number}" for number in count())

    def submit(self) -> None:
        """One job more.  Raises `OSError` with what `sbatch` says if it is refused."""
        name = next(self.names)
        job = slurm_job(self.config, self.client.scheduler.address, name)
        try:
            self.client.sync(job.start)
        except RuntimeError as error:
            told = str(error).partition("stderr:")[2].strip() or str(error)
            raise OSError(f"sbatch: {told.removeprefix('sbatch: ')}") from None
        self.jobs[name] = job

    def keep(self, end: Event) -> None:
        """Submit another job for each that is lost, until the end."""
        seen: dict[str, float] = {}
        while not end.wait(POLL_SECONDS):
            workers = self.client.scheduler_info(n_workers=-1)["workers"].values()
            here = [str(worker["name"]) for worker in workers]
            now = time.monotonic()
            for name, job in list(self.jobs.items()):
                if any(worker == name or worker.startswith(f"{name}-") for worker in here):
                    seen[name] = now
                elif now - seen.get(name, now) > LOST_SECONDS:
                    self.client.sync(job.close)
                    del self.jobs[name]
            with contextlib.suppress(OSError):  # refused now, perhaps not the next time
                while len(self.jobs) < self.config.jobs:
                    self.submit()

    def cancel(self) -> None:
        """End all jobs."""
        for job in self.jobs.values():
            with contextlib.suppress(Exception):  # the connection is lost, or there is no scancel
                self.client.sync(job.close)


def slurm_job(config: ClusterConfig, scheduler: str, name: str) -> Any:
    """A job, not yet submitted, with workers for the Dask scheduler at an address.

    Raises `ValueError` if the extra `slurm` is not installed.
    """
    try:
        from dask_jobqueue.slurm import SLURMJob
    except ImportError:
        raise ValueError(
            'cluster.kind = "slurm" wants dask-jobqueue: pip install "iclens[slurm]"'
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

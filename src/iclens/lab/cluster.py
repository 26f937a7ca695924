"""Cells on Dask: on processes of this machine, or on the workers of an existing scheduler."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import queue
import signal
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import cache
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import dask
import jax
from distributed import Client, Future, KilledWorker, LocalCluster, Worker, get_worker

from iclens import __version__
from iclens.interrupts import held_back
from iclens.lab.cell import Cell
from iclens.lab.work import Event, Teller, keep_error, use_one_thread, work

logging.getLogger("distributed").setLevel(logging.CRITICAL)  # events and results tell more
POLL_SECONDS = 0.5
"""Longest time between two looks at the workers and whether the scheduler is still there."""
CONNECT_SECONDS = 10
VERSION = f"iclens {__version__} on jax {jax.__version__}"
"""What decides about the bytes of a result: all workers have the same."""
QUIET = {
    "distributed.admin.tick.interval": "1s",
    "distributed.worker.profile.enabled": False,
}
"""Settings of local processes: what Dask watches of itself takes 5 % of the time of two cores."""


@contextlib.contextmanager
def local_client(workers: int) -> Iterator[Client]:
    """Processes on this machine, of one thread each, that end with the block."""
    # A terminal interrupts the workers too; they are not to hear it.  To begin the tracker, as the
    # first worker would, ends the holding back.
    resource_tracker.ensure_running()
    with contextlib.ExitStack() as stack:
        with held_back(), dask.config.set(QUIET):
            cluster = LocalCluster(
                n_workers=workers,
                threads_per_worker=1,
                processes=True,
                memory_limit=0,
                host="127.0.0.1",
                dashboard_address="127.0.0.1:0",
                silence_logs=logging.CRITICAL,
            )
            stack.callback(_end, cluster)
        yield stack.enter_context(Client(cluster, set_as_default=False))


def _end(cluster: LocalCluster) -> None:
    """End a cluster at once: stopped, its workers would first finish their cells."""
    for nanny in cluster.workers.values():
        nanny.auto_restart = False
        with contextlib.suppress(TypeError, ProcessLookupError):
            os.kill(nanny.pid, signal.SIGKILL)
    cluster.close()


@contextlib.contextmanager
def remote_client(address: str, folder: Path) -> Iterator[Client]:
    """The workers of the scheduler at an address, which go on when the block ends.

    Raises `OSError` if there is no scheduler, `ValueError` if a worker does not see `folder`, has
    several threads or another version of iclens.
    """
    with Client(address, timeout=CONNECT_SECONDS, set_as_default=False) as client:
        try:
            faults = client.run(_fault, folder.resolve(), VERSION)
        except Exception as error:
            raise ValueError(f"a worker of {address} cannot load {VERSION}: {error!r}") from None
        for fault in faults.values():
            if fault:
                raise ValueError(fault)
        yield client


def run_on(
    client: Client,
    cells: Sequence[Cell],
    on_event: Callable[[Event], None],
    keep: Callable[[], Iterable[str]] | None = None,
) -> dict[str, str]:
    """Do cells in their order on the workers of a client; returns why those failed that did.

    As many are under way as there are threads, so that their order is kept.  A cell whose workers
    keep dying is given up when it has saved nothing new meanwhile: jobs that end in time cost no
    cell.  A worker that does not fit is retired.  `keep`, where workers are jobs of this command,
    is called again and again to see to them; what it returns is told.

    Raises `ConnectionError` if the scheduler is lost, `OSError` if a job's worker does not fit.
    """
    topic = f"iclens-{uuid.uuid4().hex}"
    heard: queue.SimpleQueue[Any] = queue.SimpleQueue()
    client.subscribe_topic(topic, lambda event: heard.put(Event(**event[1]["iclens"])))
    left = deque(replace(cell, folder=cell.folder.resolve()) for cell in cells)
    active: dict[Any, tuple[Cell, Future, int]] = {}
    failed: dict[str, str] = {}
    retired: set[str] = set()
    idle = False
    try:
        while left or active:
            for told in keep() if keep is not None else ():
                on_event(Event("", "notice", detail=told))
            threads = sum(client.nthreads().values())
            if threads == 0 and not idle:
                on_event(Event("", "idle"))
            idle = threads == 0
            for _ in range(min(max(1, threads) - len(active), len(left))):
                cell = left.popleft()
                name = f"{cell.name}-{uuid.uuid4().hex}"
                future = client.submit(_task, cell, VERSION, topic, key=name, pure=False, retries=0)
                active[future.key] = cell, future, cell.saved
                future.add_done_callback(heard.put)
            for item in _drain(heard, client):
                if isinstance(item, Event):
                    on_event(item)
                    continue
                cell, future, saved = active.pop(item.key)
                unfit = _unfit(future)
                if unfit and cell.folder.parent.is_dir():  # else it is the run that is gone
                    address, fault = unfit
                    if keep is not None:  # so is every worker that would come after it
                        raise OSError(fault)
                    if address not in retired:
                        retired.add(address)
                        on_event(Event("", "notice", detail=f"{fault}; it is retired"))
                        client.retire_workers([address])
                    left.appendleft(cell)
                    continue
                if _was_preempted(future) and cell.saved > saved:
                    left.appendleft(cell)  # it gets on, from one worker to the next
                    continue
                reason = _reason(cell, future)
                if reason is not None:
                    failed[cell.name] = reason
                Teller(cell.name, on_event).ended(reason)
    finally:
        with contextlib.suppress(Exception):
            client.cancel([future for _, future, _ in active.values()])
            client.unsubscribe_topic(topic)
    return failed


def _drain(heard: queue.SimpleQueue[Any], client: Client) -> Iterator[Any]:
    """What has been heard; where that is nothing, waits for it a little."""
    try:
        yield heard.get(timeout=POLL_SECONDS)
        while True:
            yield heard.get_nowait()
    except queue.Empty:
        if client.status != "running":
            raise ConnectionError("the connection to the scheduler is lost") from None


def _was_preempted(future: Future) -> bool:
    return future.status == "error" and isinstance(future.exception(), KilledWorker)


def _reason(cell: Cell, future: Future) -> str | None:
    """Why a cell failed, if it did."""
    if future.status == "finished":
        reason: str | None = future.result()
        return reason
    if future.status == "error":
        error = future.exception()
        told = str(error) or repr(error)
        if isinstance(error, KilledWorker):
            told = f"the cell was given up: {error.allowed_failures + 1} workers died at it"
        keep_error(cell, told)
        return told
    raise ConnectionError("the connection to the scheduler is lost")


class _UnfitWorker(RuntimeError):
    """Raised, with its address and what is wrong, by a worker that came later and does not fit."""

    def __str__(self) -> str:
        return str(self.args[1])


def _unfit(future: Future) -> tuple[str, str] | None:
    error = future.exception() if future.status == "error" else None
    return error.args if isinstance(error, _UnfitWorker) else None


def _fault(folder: Path, version: str, dask_worker: Worker) -> str:
    """What is wrong with a worker, if anything, for a run in a folder by some iclens."""
    here = f"the worker at {dask_worker.address}"
    if (threads := dask_worker.state.nthreads) != 1:
        return f"{here} has {threads} threads: start workers with --nthreads 1"
    if version != VERSION:
        return f"{here} has {VERSION}, this is {version}"
    if not folder.is_dir():
        return (
            f"{here} does not see {str(folder)!r}: it is gone, or on no file system of all workers"
        )
    return ""


def _task(cell: Cell, version: str, topic: str) -> str | None:
    """What a worker does."""
    worker = get_worker()
    if fault := _fault(cell.folder.parent, version, worker):
        raise _UnfitWorker(worker.address, fault)
    use_one_thread()
    _keep_freed_memory()
    # Left alone, xarray would ask the scheduler for a lock on each file.
    with dask.config.set(scheduler="synchronous"):
        return work(cell, lambda event: worker.log_event(topic, {"iclens": asdict(event)}))


@cache
def _keep_freed_memory() -> None:
    """Let the C library keep memory that was freed, as it does by itself where Dask does not ask.

    Dask starts its workers with MALLOC_TRIM_THRESHOLD_ = 64 KiB, so that each step's arrays would
    be given back to the system and asked for again: a fifth of the time of small models.
    """
    trim_threshold, mmap_threshold = -1, -3  # glibc's malloc.h
    with contextlib.suppress(OSError, AttributeError):  # another C library
        library = ctypes.CDLL(None)
        library.mallopt(trim_threshold, 2**30)
        library.mallopt(mmap_threshold, 2**25)  # the most that it takes

"""Live logging to Weights & Biases (extra `wandb`), beside the training and never in its way.

Each cell is a run of the service, in the group of its sweep.  A thread of its own talks to the
service: whatever fails there, a missing package, no network, no login, is told once and ends the
logging alone.
"""

import contextlib
import json
import queue
import threading
import time
import tomllib
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from iclens.interrupts import held_back
from iclens.lab.files import write_file
from iclens.lab.recipe import ABOUT_CELLS

if TYPE_CHECKING:
    import xarray as xr

    from iclens.lab.store import Run
    from iclens.lab.work import Event

INIT_SECONDS = 30.0
"""Time in which the service has to answer when a cell begins."""
CLOSE_SECONDS = 60.0
"""Time that is left at the end to send what was not sent yet."""
STOP_SECONDS = 5.0
"""The same after an interruption: what is not sent is, when the run goes on."""
TELL_SECONDS = 2.0
"""After which waiting for that is told."""
RATE_SECONDS = 10.0
"""Time between two tellings of the rate of a cell."""


class LiveLog:
    """Sends what is measured of the cells of a run, as it comes.  A context manager.

    `RUN/wandb.json` keeps, for each project, what the runs of the service are called and which step
    of each cell was sent last: a run that goes on is the same run there.
    """

    def __init__(self, run: "Run", project: str, say: Callable[[str], None]) -> None:
        self.run, self.project, self.say = run, project, say
        self.heard: queue.SimpleQueue[tuple[float, Event] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.projects: dict[str, Any] = {}
        self.open: dict[str, Any] = {}
        self.rates: dict[str, tuple[float, int]] = {}
        self.closed = False

    def __enter__(self) -> "LiveLog":
        with held_back():  # interrupts are for the thread that trains
            self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.heard.put(None)
        most = CLOSE_SECONDS if error[0] is None else STOP_SECONDS
        self.thread.join(min(most, TELL_SECONDS))
        if self.thread.is_alive() and most > TELL_SECONDS:
            self.say(f"Weights & Biases: sending what is left, for {most:.0f} s at most")
            self.thread.join(most - TELL_SECONDS)
        if self.thread.is_alive():
            self.say("Weights & Biases: not all was sent; the run sends it when it goes on")
        self.closed = True

    def on_event(self, event: "Event") -> None:
        """Take in what happens to a cell; returns at once."""
        if event.cell and self.thread.is_alive():
            self.heard.put((time.monotonic(), event))

    def _work(self) -> None:
        try:
            import wandb

            self.service = wandb
            with contextlib.suppress(FileNotFoundError):
                self.projects = json.loads((self.run.path / "wandb.json").read_text("utf-8"))
            new = {"id": uuid.uuid4().hex[:8], "sent": {}}
            self.known = self.projects.setdefault(self.project, new)
            while (item := self.heard.get()) is not None:
                self._take(*item)
            for name in list(self.open):  # interrupted: they go on another time
                self._close(name, 1)
        except ModuleNotFoundError as error:
            missing = error.name == "wandb"
            how = "install the extra wandb" if missing else f"{error}"
            self.say(f"Weights & Biases: nothing is logged: {how}")
        except Exception as error:
            if self.closed:  # that not all was sent has been told
                return
            told = (str(error).strip().splitlines() or [""])[0].rstrip(".")
            self.say(
                f"Weights & Biases: nothing more is logged: {type(error).__name__}: {told}. "
                "The training goes on"
            )

    def _take(self, at: float, event: "Event") -> None:
        name = event.cell
        if event.kind == "steps":
            self._tell_rate(name, at, event.steps)
        elif event.kind in ("start", "phase", "skip", "done"):
            self._send_new(name)
            if event.kind in ("skip", "done") and name in self.open:
                self._close(name, 0)
        elif event.kind == "fail":
            last = (event.detail.strip().splitlines() or [""])[-1]
            self._opened(name).summary["error"] = last
            self._close(name, 1)

    def _send_new(self, name: str) -> None:
        """Send what was measured after the last step that was sent."""
        curves = self.run.named(name).curves_after(self.known["sent"].get(name, -1))
        if curves is None:
            return
        remote = self._opened(name)
        for step in curves.step.values.tolist():
            remote.log({"step": step} | _values(curves.sel(step=step)))
            self.known["sent"][name] = step
        remote.summary["outcome"] = curves.attrs["outcome"]
        write_file(self.run.path / "wandb.json", json.dumps(self.projects, indent=1).encode())

    def _tell_rate(self, name: str, at: float, steps: int) -> None:
        before, done = self.rates.setdefault(name, (at, steps))
        if at - before >= RATE_SECONDS and name in self.open:
            self.open[name].log({"step": steps, "steps_per_second": (steps - done) / (at - before)})
            self.rates[name] = at, steps

    def _opened(self, name: str) -> Any:
        """The run of a cell at the service: a new one, or the one that it had before."""
        if name in self.open:
            return self.open[name]
        cell = self.run.named(name)
        recipe = tomllib.loads(self.run.recipe_text)
        told = {section: recipe[section] for section in recipe if section not in ABOUT_CELLS}
        remote = self.service.init(
            project=self.project,
            group=self.run.name,
            name=f"{self.run.name} {name}",
            id=f"{self.known['id']}-{cell.chains}-{cell.seed}",
            resume="allow",
            reinit="create_new",
            config=told | {"chains": cell.chains, "seed": cell.seed},
            dir=str(self.run.path),
            # Silent also keeps it from asking for a key at the terminal.
            settings=self.service.Settings(silent=True, console="off", init_timeout=INIT_SECONDS),
        )
        remote.define_metric("step")
        remote.define_metric("*", step_metric="step")
        if not self.open:
            here = f"offline, in {self.run.path / 'wandb'}; send it with `wandb sync`"
            self.say(f"Weights & Biases: {here if remote.offline else remote.url}")
        self.open[name] = remote
        return remote

    def _close(self, name: str, code: int) -> None:
        self.open.pop(name).finish(exit_code=code)


def _values(curves: "xr.Dataset") -> dict[str, float | str]:
    """Loss, distances and composition at a step, by the names that they have at the service."""
    found: dict[str, float | str] = {
        "phase": str(curves.phase.values),
        "loss/training": float(curves.train_loss),
        "margin": float(curves.margin),
    }
    for kind in curves.set.values.tolist():
        here = curves.sel(set=kind)
        found[f"loss/{kind}"] = float(here.loss)
        for predictor in curves.predictor.values.tolist():
            found[f"distance_{kind}/{predictor}"] = float(here.distance.sel(predictor=predictor))
    for predictor in curves.predictor.values.tolist():
        found[f"composition/{predictor}"] = float(curves.composition.sel(predictor=predictor))
    return {name: value for name, value in found.items() if value == value}  # no NaN

"""Runs on disk: a recipe, where it came from, and its cells.

The folder of a run NAME has

    NAME/recipe.toml        the complete recipe, defaults filled in
    NAME/chains-DIGEST.npz  the chains that training sets are taken from, where they are a file's
    NAME/provenance.json    versions, device, random numbers, code revision and recipe of each
                            invocation
    NAME/cells/chains=K,seed=S/
    NAME/figures/  NAME/report.html
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import platform
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from importlib import metadata
from itertools import product
from pathlib import Path
from typing import Any

import jax

from iclens.lab.cell import Cell
from iclens.lab.files import hold_lock, write_file
from iclens.lab.recipe import Recipe, load_recipe, parse_recipe
from iclens.lab.refine import Place, next_cells
from iclens.lab.source import chains_difference, chains_of, prior_of, saved_chains
from iclens.phases import PhaseMap, float_diversity
from iclens.revision import revision

LIBRARIES = ("iclens", "jax", "jaxlib", "equinox", "optax", "numpy")


@dataclass(frozen=True)
class Run:
    """A folder with a recipe and its results, as they stood when first looked at.

    `open_run(run.path)` looks again.
    """

    path: Path

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def resume_command(self) -> str:
        """The command line that goes on with what is not done."""
        return shlex.join(
            ["iclens", "run", str(self.path / "recipe.toml"), "--out", str(self.path)]
        )

    @cached_property
    def recipe(self) -> Recipe:
        return load_recipe(self.path / "recipe.toml")

    @property
    def recipe_text(self) -> str:
        """The recipe as TOML."""
        return (self.path / "recipe.toml").read_text(encoding="utf-8")

    @property
    def provenance(self) -> dict[str, Any]:
        """Versions, device, random numbers and code revision, of each invocation."""
        path = self.path / "provenance.json"
        try:
            found = json.loads(path.read_text()) if path.exists() else {}
            invocations = found.get("invocations", []) if isinstance(found, dict) else None
            if not isinstance(invocations, list) or not all(
                isinstance(invocation, dict) for invocation in invocations
            ):
                raise ValueError("expected a list of invocations")
        except ValueError as error:
            raise ValueError(f"{path} is damaged: {error}; move it away to go on") from None
        return found | {"invocations": invocations}

    @property
    def imported(self) -> dict[str, str] | None:
        """The `file` that the model of a run was imported from, and its `sha256`.

        None where iclens trains the models of the run.
        """
        for invocation in self.provenance["invocations"]:
            how = invocation.get("trained_by")
            if isinstance(how, dict) and isinstance(source := how.get("imported"), dict):
                return source
        return None

    @cached_property
    def cells(self) -> list[Cell]:
        """The cells of the recipe, by K, then seed.

        Those that refinement added are among them; of a sweep that refines, only those that were
        begun, and where none of these is left to do, those that come next.
        """
        sweep = self.recipe.sweep
        begun = {
            place
            for path in (self.path / "cells").glob("chains=*,seed=*")
            if (place := _place(path.name)) is not None
        }
        if not sweep.refine:
            return self._cells_of({*begun, *product(sweep.chains, sweep.seeds)})
        cells = self._cells_of(begun)
        if any(cell.status not in ("done", "failed") for cell in cells):
            return cells
        found = PhaseMap.from_curves(
            cell.curves for cell in cells if cell.status == "done" and cell.curves is not None
        )
        new = next_cells(begun, found, sweep.chains, sweep.seeds, sweep.ratio)
        return self._cells_of({*begun, *new})

    def _cells_of(self, places: Iterable[Place]) -> list[Cell]:
        return [
            Cell(self.path / "cells", self.recipe, chains, seed)
            for chains, seed in sorted(places, key=lambda at: (float_diversity(at[0]), at[1]))
        ]

    def cell(self, chains: int | str, seed: int = 0) -> Cell:
        """One cell.  Raises `ValueError` if the run has no such cell."""
        for cell in self.cells:
            if (cell.chains, cell.seed) == (chains, seed):
                return cell
        raise ValueError(
            f"run {self.name!r} has no cell with chains = {chains} and seed = {seed}; "
            f"it has {', '.join(cell.name for cell in self.cells) or 'none yet'}"
        )

    def chosen(self, chains: str | None, seed: int) -> Cell:
        """The cell of a user's words; K may be left out where the run has only one.

        Raises `ValueError` if the run has no such cell.
        """
        options = list(dict.fromkeys(str(cell.chains) for cell in self.cells))
        if chains is None and len(options) > 1:
            raise ValueError(f"--chains: expected one of {', '.join(options)}, got none")
        wanted = chains or next(iter(options), "none")
        if wanted not in options:
            raise ValueError(f"--chains: expected one of {', '.join(options)}, got {wanted!r}")
        return self.cell("infinite" if wanted == "infinite" else int(wanted), seed)

    def named(self, name: str) -> Cell:
        """The cell of a name, such as `chains=16,seed=0`, be it begun or still to come.

        Raises `ValueError` if that is no name of a cell.
        """
        place = _place(name)
        if place is None:
            raise ValueError(f"expected a cell's name like 'chains=16,seed=0', got {name!r}")
        return Cell(self.path / "cells", self.recipe, *place)

    @cached_property
    def phase_map(self) -> PhaseMap:
        """The phase map of all cells that have curves."""
        return PhaseMap.from_curves(cell.curves for cell in self.cells if cell.curves is not None)


def _place(name: str) -> Place | None:
    """K and seed in the name of a cell's folder; None for others, such as those set aside."""
    if found := re.fullmatch(r"chains=(\d+|infinite),seed=(\d+)", name):
        return "infinite" if found[1] == "infinite" else int(found[1]), int(found[2])
    return None


def is_run(path: Path) -> bool:
    """Whether there is a run in a folder."""
    return (path / "recipe.toml").exists()


def open_run(path: str | Path) -> Run:
    """Open a saved run.

    Raises `ValueError` if there is none at `path`, or if its recipe is not the one that its cells
    were trained with.
    """
    path = Path(path)
    if not is_run(path):
        raise ValueError(f"no run at {str(path)!r}: expected a folder with a recipe.toml")
    run = Run(path)
    recipes = {i["recipe"]: None for i in run.provenance.get("invocations", []) if "recipe" in i}
    for recipe in recipes:
        trained = parse_recipe(recipe, where=f"{path}/provenance.json")
        if different := trained.difference(run.recipe):
            raise ValueError(
                f"{path}/recipe.toml was changed after its cells were trained (trained against "
                f"now): {'; '.join(different)}. Change it back, and copy it to change it"
            )
    return run


def create_run(path: str | Path, recipe: Recipe) -> Run:
    """Start a run, or take up the one at `path`; cells of new K or seeds are added to it.

    A file of chains is copied into the run's folder.

    Raises `ValueError` with the differences if the run there has another recipe, if there is
    something else at `path`, or if the recipe's chains do not fit it, and `OSError` if they cannot
    be read; nothing is written then.
    """
    path = Path(path)
    chains_of(recipe)
    prior_of(recipe)
    # And what a killed process leaves of them.
    ours = (".lock", ".recipe.toml", "recipe.toml", "chains-", ".chains-")
    if path.exists() and not (path / "recipe.toml").exists():
        stranger = not path.is_dir() or any(not e.name.startswith(ours) for e in path.iterdir())
        if stranger:
            raise ValueError(
                f"{str(path)!r} exists and is not a run: choose another folder with --out"
            )
    path.mkdir(parents=True, exist_ok=True)
    with hold(Run(path)):
        if exists := (path / "recipe.toml").exists():
            old = open_run(path).recipe
            if old.task.chains and recipe.task.chains:
                if apart := chains_difference(old, recipe):
                    raise ValueError(
                        f"the run at {str(path)!r} has other chains (saved against asked): "
                        f"{apart}. Choose another folder with --out"
                    )
                recipe = dataclasses.replace(
                    recipe, task=dataclasses.replace(recipe.task, chains=old.task.chains)
                )
            if different := old.difference(recipe):
                raise ValueError(
                    f"the run at {str(path)!r} has another recipe (saved against asked): "
                    f"{'; '.join(different)}. Choose another folder with --out"
                )
            sweep = dataclasses.replace(
                recipe.sweep,
                chains=tuple(dict.fromkeys(old.sweep.chains + recipe.sweep.chains)),
                seeds=tuple(dict.fromkeys(old.sweep.seeds + recipe.sweep.seeds)),
            )
            recipe = dataclasses.replace(old, sweep=sweep, cluster=recipe.cluster)
        elif recipe.task.chains:
            recipe, content = saved_chains(recipe, path)
            write_file(Path(recipe.task.chains), content)
        if not exists or recipe != old:  # the file may have comments of the user's
            write_file(path / "recipe.toml", recipe.to_toml().encode())
    return Run(path)


@contextlib.contextmanager
def hold(run: Run) -> Iterator[None]:
    """Keep other processes from working on a run meanwhile.

    Raises `ValueError` if another one does.
    """
    with hold_lock(run.path / ".lock") as held:
        if not held:
            raise ValueError(
                f"another process is working on the run at {str(run.path)!r}: "
                f"wait for it, or see `iclens status {run.path}`"
            )
        yield


def record_provenance(run: Run, how: Mapping[str, object]) -> None:
    """Add this invocation to the provenance of a run; `how` says by what cells are trained.

    Raises `ValueError` if the model of the run was imported, unless it is being so now.
    """
    if (source := run.imported) and "imported" not in how:
        raise ValueError(
            f"the model of the run at {str(run.path)!r} was imported from {source.get('file')!r}: "
            "it has no training to go on with"
        )
    invocation = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version()}
        | {name: metadata.version(name) for name in LIBRARIES},
        "device": f"{jax.devices()[0].platform}: {jax.devices()[0].device_kind}",
        "machine": f"{platform.system()} {platform.machine()}",
        "random_numbers": str(jax.random.key_impl(jax.random.key(0))),
        "revision": revision(),
        "trained_by": dict(how),
        "recipe": run.recipe.to_toml(),
    }
    with hold_lock(run.path / ".provenance.lock", wait=True):  # cells of an array come at once
        invocations = [*run.provenance.get("invocations", []), invocation]
        content = json.dumps({"invocations": invocations}, indent=1)
        write_file(run.path / "provenance.json", content.encode())

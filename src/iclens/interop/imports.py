"""Models in: a checkpoint of another tool as a run with one cell."""

from __future__ import annotations

import math
from pathlib import Path

from iclens.chains import ChainSet
from iclens.interop.checkpoints import checkpoint_file, read_checkpoint
from iclens.interop.unsaid import UNSAID, Unsaid
from iclens.lab.cell import begin, finish, save_snapshot, tidy
from iclens.lab.files import checksum
from iclens.lab.recipe import Diversity, Recipe, SweepConfig, TaskConfig
from iclens.lab.store import Run, create_run, hold, open_run, record_provenance
from iclens.training import Snapshot, TrainingConfig, initial_state

IMPORTED = "imported"
"""The outcome of an imported cell."""


def import_checkpoint(
    path: str | Path,
    out: str | Path,
    *,
    chains: str = "infinite",
    unsaid: Unsaid = UNSAID,
    concentration: float = 1.0,
) -> Run:
    """Make a run with one cell of a checkpoint of TransformerLens.

    It is measured once, at step 0; circuits are traced in it as in any other.

    Args:
        path: The checkpoint, as `read_checkpoint` takes it.
        out: Folder of the run.
        chains: File of the chain set that the model was trained on, for the memorising references;
            "infinite" if it was trained on fresh chains without end.
        unsaid: What the checkpoint does not say.
        concentration: Dirichlet concentration of the rows of the chain prior.

    Raises `ValueError` if the checkpoint cannot be expressed, does not fit the chains, or if there
    is something else at `out`; `OSError` if a file cannot be read or written.
    """
    model = read_checkpoint(path, unsaid)
    states = model.embedding.shape[0]
    diversity: Diversity = "infinite" if chains == "infinite" else ChainSet.from_file(chains).count
    recipe = Recipe(
        task=TaskConfig(
            states=states,
            context=model.context,
            concentration=concentration,
            chains="" if chains == "infinite" else str(Path(chains).resolve()),
        ),
        model=model.config,
        train=TrainingConfig(steps=1, evaluations=1),
        sweep=SweepConfig(chains=(diversity,), seeds=(0,)),
    )
    source = checkpoint_file(path)
    run = create_run(out, recipe)
    with hold(run):
        run = open_run(run.path)
        cell = run.cell(diversity, 0)
        if cell.status not in ("missing", "unfinished"):
            raise ValueError(f"{str(out)!r} has a model already: choose another folder with --out")
        record_provenance(
            run, {IMPORTED: {"file": str(source.resolve()), "sha256": checksum(source)}}
        )
        begin(cell)
        tidy(cell)
        save_snapshot(cell, Snapshot(0, initial_state(model, recipe.train), math.nan, {}))
        finish(cell, outcome=IMPORTED)
    return open_run(run.path)

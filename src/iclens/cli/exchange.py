"""The commands that exchange models with other tools: export, import."""

import shlex
from pathlib import Path
from typing import Annotated, Literal

from iclens.cli.commands import print_phases


def export(
    run: Path,
    /,
    to: Literal["safetensors", "transformer-lens", "torch"],
    out: Path,
    chains: str | None = None,
    seed: int = 0,
    step: str = "last",
) -> int:
    """Write a trained model for another tool: safetensors, TransformerLens or PyTorch.

    Args:
        run: Folder of the run.
        to: One file in iclens' own layout; or a folder that TransformerLens 4 loads; or a folder
            with a torch module in one file, and its weights. Folders have the cell's chains too.
        out: The file or folder to write.
        chains: K of the cell; needed where the run has several.
        seed: Seed of the cell.
        step: A checkpoint's step, or "last".
    """
    from iclens.interop.export import export_model
    from iclens.lab.store import open_run
    from iclens.lab.trace import TraceRequest

    opened = open_run(run)
    cell, at = TraceRequest.parse_one(opened, chains, seed, step)
    about = {"run": opened.name, "cell": cell.name, "step": str(at)}
    exported = export_model(cell.model(at), to, out, about, cell.chain_set)
    for path in exported.paths:
        print(f"wrote   {path}")
    print("to load it in Python:")
    for line in exported.python.splitlines():
        print(f"  {line}")
    return 0


def import_(arguments: list[str]) -> int:
    """Make a run with one cell of a checkpoint of TransformerLens, to trace and report."""
    import tyro

    from iclens.interop.imports import import_checkpoint
    from iclens.interop.unsaid import UNSAID, Unsaid
    from iclens.report import write_report

    def command(
        file: Path,
        /,
        out: Path,
        chains: str = "infinite",
        concentration: float = 1.0,
        unsaid: Annotated[Unsaid, tyro.conf.arg(name="")] = UNSAID,
    ) -> int:
        """Make a run with one cell of a checkpoint of TransformerLens, to trace and report.

        Args:
            file: Checkpoint in safetensors, or the folder that has it as model.safetensors; a
                config.json beside it is read too.
            out: Folder of the run.
            chains: File of the chain set that the model was trained on, or "infinite".
            concentration: Dirichlet concentration of the rows of the chain prior.
            unsaid: What the checkpoint does not say.
        """
        run = import_checkpoint(
            file, out, chains=chains, unsaid=unsaid, concentration=concentration
        )
        print_phases(run)
        print(f"report  {write_report(run)}")
        print(f"next    iclens trace {shlex.quote(str(run.path))}")
        return 0

    code: int = tyro.cli(command, args=arguments, prog="iclens import")
    return code

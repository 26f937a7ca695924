"""The command that estimates chains from sequences."""

import sys
from json import dumps
from pathlib import Path


def chains(
    file: Path, /, out: Path | None = None, smoothing: float = 1.0, json: bool = False
) -> int:
    """Estimate a chain for each group of state sequences, for `task.chains` of a recipe.

    Args:
        file: CSV file with the columns group, order and state.
        out: File of the chains to write, which ends in .npz.
        smoothing: Pseudo-count of every transition.
        json: Print JSON, for programs.
    """
    from iclens.chains import ChainSet
    from iclens.lab.files import write_file

    if out is not None and out.suffix != ".npz":
        raise ValueError(f"--out: expected a file that ends in .npz, got {str(out)!r}")
    if out is not None and not out.parent.is_dir():
        raise ValueError(f"--out: expected a folder at {str(out.parent)!r}, got none")
    found, report = ChainSet.from_sequences(file, smoothing=smoothing)
    print(dumps(report.to_json()) if json else report)
    if out is not None:
        write_file(out, found.to_npz())
        print(f"wrote   {out}", file=sys.stderr if json else sys.stdout)
    return 0

"""Models out: a checkpoint as a file or folder that other tools open."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Literal

from iclens.chains import ChainSet
from iclens.interop.files import save_model
from iclens.interop.transformer_lens import CONFIG, WEIGHTS, lens_arrays, lens_config
from iclens.lab.files import write_arrays, write_file
from iclens.names import unknown
from iclens.transformer import Transformer

Target = Literal["safetensors", "transformer-lens", "torch"]
CHAINS = "chains.npz"
PORT = "model.py"
"""The file with the torch module, beside its weights."""


@dataclass(frozen=True)
class Exported:
    """What was written, and how to open it."""

    paths: tuple[Path, ...]
    python: str
    """Lines of Python that load the model."""


def export_model(
    model: Transformer,
    to: Target,
    out: str | Path,
    about: Mapping[str, str] | None = None,
    chains: ChainSet | None = None,
) -> Exported:
    """Write a model for another tool.

    Args:
        model: The model.
        to: "safetensors": one file, in iclens' own layout.  "transformer-lens": a folder with
            weights under the names of TransformerLens and its configuration.  "torch": a folder
            with one readable Python file that needs torch only, and the weights in iclens' layout.
        out: The file or the folder to write.
        about: Where the model comes from, for the metadata of the weights.
        chains: The chain set that it was trained on, to go into the folder as `chains.npz`.

    Raises `ValueError` if there is something at `out` already (an empty folder will do), or if the
    other tool has no such models; `OSError` if it cannot be written.
    """
    out = Path(out)
    if to not in ("safetensors", "transformer-lens", "torch"):
        raise ValueError(unknown("target", to, ("safetensors", "transformer-lens", "torch")))
    if model.config.circuit and to != "safetensors":
        raise ValueError(
            "a sub-circuit (model.circuit) has no residual stream that all its parts share, as "
            f"{to} models have: use --to safetensors"
        )
    if out.exists() and (to == "safetensors" or not out.is_dir() or any(out.iterdir())):
        kind = "file" if to == "safetensors" else "folder"
        raise ValueError(f"{str(out)!r} exists: expected the name of a new {kind}")
    if to == "safetensors":
        out.parent.mkdir(parents=True, exist_ok=True)
        save_model(out, model, about)
        load = f"from iclens import load_model\nmodel = load_model({str(out)!r})"
        return Exported((out,), load)
    out.mkdir(parents=True, exist_ok=True)
    beside: tuple[Path, ...] = ()
    if chains is not None:
        write_file(out / CHAINS, chains.to_npz())
        beside = (out / CHAINS,)
    if to == "torch":
        port = resources.files("iclens").joinpath("interop", "torch_model.py").read_bytes()
        write_file(out / PORT, port)
        save_model(out / WEIGHTS, model, about)
        load = (
            f"import sys; sys.path.insert(0, {str(out)!r})\n"
            f"from model import load\nmodel = load({str(out / WEIGHTS)!r})"
        )
        return Exported((out / PORT, out / WEIGHTS, *beside), load)
    positions = {"positions": model.config.positions}
    write_arrays(out / WEIGHTS, lens_arrays(model), {**positions, **(about or {})})
    write_file(out / CONFIG, json.dumps(lens_config(model), indent=1).encode())
    load = f"from iclens import load_bridge\nbridge = load_bridge({str(out)!r})"
    if model.config.positions == "relative":
        load = (
            '# TransformerLens has no learned bias per lag (model.positions = "relative") of its\n'
            "# own: load_bridge adds it, boot_native does not; --to torch needs neither\n"
        ) + load
    return Exported((out / WEIGHTS, out / CONFIG, *beside), load)

"""Models by name, as `iclens score` takes them.

runs/quick                    a checkpoint of a run
python:module:function        a function states -> log-probabilities
model.safetensors             one model in one file, as `save_model` writes it
folder                        a causal language model as Hugging Face's transformers saves it
"""

from __future__ import annotations

import os
import sys
import traceback
from dataclasses import dataclass, field
from importlib import import_module, invalidate_caches
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float

from iclens.chains import ChainSet, Prior
from iclens.interop.files import load_model
from iclens.lab.store import is_run, open_run
from iclens.lab.trace import TraceRequest
from iclens.names import nearest
from iclens.scoring import Model
from iclens.transformer import Transformer, forward

FORMS = (
    "the folder of a run, python:MODULE:FUNCTION, a .safetensors file that iclens wrote, or the "
    "folder of a Hugging Face model"
)


@dataclass(frozen=True)
class Source:
    """A model, and what is known of it."""

    model: Model
    kind: str
    """In words, such as "checkpoint of a run"."""
    facts: dict[str, str] = field(default_factory=dict)
    """What else there is to say of how it was given."""
    tokens: tuple[str, ...] = ()
    """What stands for each state, of a language model."""
    states: int | None = None
    """Number C of states, where the model has a fixed one."""
    context: int | None = None
    """The longest context, where the model has one."""
    chains: ChainSet | None = None
    """The chain set that it was trained on."""
    prior: Prior | None = None
    """The prior of its training; None where it is not known."""


def is_language_model(path: Path) -> bool:
    """Whether a folder looks like one that transformers saved."""
    return (path / "config.json").is_file()


def open_source(name: str, chains: str | None = None, seed: int = 0, step: str = "last") -> Source:
    """The model of a name, but for language models (see `iclens.interop.huggingface`).

    `chains`, `seed` and `step` choose the checkpoint of a run, as in `iclens trace`.

    Raises `ValueError`, saying what was expected, if there is no such model or it cannot be read.
    """
    path = Path(name)
    if name.startswith("python:"):
        return Source(python_function(name), "Python function")
    if is_run(path):
        return _checkpoint(path, chains, seed, step)
    if path.is_file():
        if path.suffix != ".safetensors":
            raise ValueError(f"model {name!r}: expected {FORMS}; got another file")
        model = load_model(path)
        shape = {"layers": str(model.config.layers), "width": str(model.config.width)}
        return Source(
            log_probabilities(model),
            "safetensors file",
            shape,
            states=model.embedding.shape[0],
            context=model.context,
        )
    if path.is_dir():
        raise ValueError(
            f"model {name!r}: expected {FORMS}; the folder has neither a recipe.toml nor a "
            "config.json"
        )
    raise ValueError(f"model {name!r}: expected {FORMS}; there is no such file or folder")


def log_probabilities(model: Transformer) -> Model:
    """A transformer of iclens as a function states -> log-probabilities."""

    @jax.jit
    def predict(states: Array) -> Float[Array, "batch position state"]:
        return jax.nn.log_softmax(forward(model, states).logits)

    return lambda states: predict(np.asarray(states, np.int32))


def _checkpoint(path: Path, chains: str | None, seed: int, step: str) -> Source:
    cell, at = TraceRequest.parse_one(open_run(path), chains, seed, step)
    return Source(
        log_probabilities(cell.model(at)),
        "checkpoint of a run",
        {"chains K": str(cell.chains), "seed": str(seed), "step": str(at)},
        states=cell.recipe.task.states,
        context=cell.recipe.task.context,
        chains=cell.chain_set,
        prior=cell.prior,
    )


def python_function(name: str) -> Model:
    """The function of `python:module:function`; modules of the current folder come first.

    Raises `ValueError`, with the nearest name, if there is no such module or function, if the
    module cannot be imported, or if what it has there cannot be called.
    """
    parts = name.split(":")
    if len(parts) != 3 or not all(parts):
        raise ValueError(f"model {name!r}: expected python:MODULE:FUNCTION")
    _, module_name, function_name = parts
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    invalidate_caches()
    top = module_name.partition(".")[0]
    if not _exists(top):
        entries = [path for path in Path(here).iterdir() if not path.name.startswith((".", "_"))]
        known = {path.stem for path in entries if path.suffix == ".py" or path.is_dir()}
        near = nearest(top, known)
        raise ValueError(f"model {name!r}: no module {top!r} here or among those installed{near}")
    try:
        module: Any = import_module(module_name)
    except (Exception, SystemExit) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = f" ({last.filename}, line {last.lineno})" if os.path.isfile(last.filename) else ""
        raise ValueError(
            f"model {name!r}: module {module_name!r} cannot be imported: "
            f"{type(error).__name__}: {error}{place}"
        ) from error
    if not hasattr(module, function_name):
        near = nearest(function_name, [n for n in vars(module) if not n.startswith("__")])
        raise ValueError(f"model {name!r}: module {module_name!r} has no {function_name!r}{near}")
    function: Model = getattr(module, function_name)
    if not callable(function):
        raise ValueError(
            f"model {name!r}: expected a function states -> log-probabilities, got "
            f"{type(function).__name__}"
        )
    return function


def _exists(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):  # such as "" or one half imported
        return False

"""One model in one file: safetensors, with all that is needed to build the model again.

The arrays have the names of the fields of `Transformer`, such as `attentions.0.query`.  The
metadata has, under `iclens`, a JSON object with the keys `format` (a number), `model` (the fields
of `TransformerConfig`), `states` (C) and `context` (N), and a checksum under `sha256`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np

from iclens.lab.files import (
    arrays_to_tree,
    read_arrays_and_metadata,
    tree_to_arrays,
    write_arrays,
)
from iclens.lab.recipe import structure
from iclens.transformer import Transformer, TransformerConfig

FORMAT = 1
OURS = ("iclens", "sha256")
"""Keys of the metadata that `extra` must not have."""


def save_model(
    path: str | Path, model: Transformer, extra: Mapping[str, str] | None = None
) -> None:
    """Write a model as one safetensors file; `extra` is added to its metadata.

    Raises `ValueError` if `extra` has a key that the layout itself uses.
    """
    if taken := [key for key in OURS if key in (extra or {})]:
        raise ValueError(f"extra: the key {taken[0]!r} is the layout's own")
    about = {
        "format": FORMAT,
        "model": dataclasses.asdict(model.config),
        "states": model.embedding.shape[0],
        "context": model.context,
    }
    write_arrays(Path(path), tree_to_arrays(model), {"iclens": json.dumps(about), **(extra or {})})


def load_model(path: str | Path) -> Transformer:
    """Read a model that `save_model` wrote.

    Raises `ValueError` if the file is damaged, is not of this layout, or lacks an array or has one
    of another shape; `OSError` if it cannot be opened.
    """
    arrays, metadata = read_arrays_and_metadata(Path(path))
    if "iclens" not in metadata:
        raise ValueError(f"{path} is not a model written by iclens: its metadata has no 'iclens'")
    try:
        about = json.loads(metadata["iclens"])
        numbers = [about["format"], about["states"], about["context"], about["model"]["layers"]]
        if not all(type(number) is int for number in [*numbers, about["model"]["heads"]]):
            raise TypeError("expected whole numbers")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"{path}: the description of the model is damaged: {error!r}") from None
    if about["format"] != FORMAT:
        raise ValueError(f"{path}: expected format {FORMAT}, got {about['format']}")
    config = structure(_held_to(arrays, about, path), TransformerConfig, str(path))
    try:
        return build_model(config, about["states"], about["context"], arrays)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def build_model(
    config: TransformerConfig, states: int, context: int, arrays: Mapping[str, np.ndarray]
) -> Transformer:
    """A model of given arrays, by name.

    Raises `ValueError` if there is no such model, or if an array is missing, too many, or has
    another shape or type than its configuration asks for.
    """
    try:
        shapes = eqx.filter_eval_shape(
            lambda key: Transformer(config, states, context, key=key), jax.random.key(0)
        )
    except (TypeError, OverflowError) as error:
        raise ValueError(str(error)) from None
    model: Transformer = arrays_to_tree(shapes, arrays)
    if strange := sorted(arrays.keys() - tree_to_arrays(model).keys()):
        raise ValueError(f"{strange[0]}: the model described has no such array")
    return model


def _held_to(arrays: Mapping[str, np.ndarray], about: dict[str, Any], path: object) -> object:
    """The table of the configuration, its sizes held to the arrays.

    A damaged description could ask for any number of layers or states.
    """
    embedding = arrays.get("embedding", np.empty(0)).shape
    if len(embedding) != 2 or embedding[0] != about["states"]:
        raise ValueError(
            f"{path}: embedding: expected shape ({about['states']}, width), got {embedding}"
        )
    layers = sum(name.startswith("attentions.") and name.endswith(".query") for name in arrays)
    if about["model"]["layers"] != layers:
        raise ValueError(f"{path}: expected {about['model']['layers']} layers, got {layers}")
    return about["model"]

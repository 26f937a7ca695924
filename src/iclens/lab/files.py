"""Files: written whole or not at all, checksummed, without pickle."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import equinox as eqx
import jax
import numpy as np
import safetensors.numpy
import xarray as xr

Tree = TypeVar("Tree")


def write_file(path: Path, content: bytes) -> None:
    """Write beside the file's place, reach the disk, then rename: readers see old or new, whole."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(beside, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def write_dataset(path: Path, dataset: xr.Dataset) -> Path:
    """Write a dataset as netCDF, whole or not at all; returns its path."""
    write_file(path, bytes(dataset.to_netcdf(engine="h5netcdf")))
    return path


def read_dataset(path: Path) -> xr.Dataset:
    """Read a dataset into memory.  Raises `ValueError` if the file is damaged."""
    try:
        with xr.open_dataset(path, engine="h5netcdf") as saved:
            return saved.load()
    except FileNotFoundError:
        raise
    except Exception as error:
        raise ValueError(f"{path} cannot be read as netCDF: {error!r}") from None


def save_result(folder: Path, name: str, result: xr.Dataset) -> Path:
    """Write NAME.nc into a folder, made if need be; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    return write_dataset(folder / f"{name}.nc", result)


@contextlib.contextmanager
def hold_lock(path: Path, *, wait: bool = False) -> Iterator[bool]:
    """Hold a lock file for the block; yields False where another process holds it.

    With `wait`, that process is waited for.  The lock ends with the process, however it ends.
    """
    with open(path, "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
        else:
            yield True


def is_locked(path: Path) -> bool:
    """Whether a process holds a lock file; nothing is written."""
    try:
        with open(path) as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def checksum(path: Path) -> str:
    """SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_arrays(
    path: Path, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None
) -> None:
    """Write named arrays as safetensors (which stores the buffer as it lies, hence the C order).

    The format has no checksum of its own: that of the arrays and of the other metadata goes into
    its metadata.
    """
    ordered = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    digest = {"sha256": _digest(ordered, metadata or {})}
    write_file(path, safetensors.numpy.save(ordered, {**(metadata or {}), **digest}))


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Read what `write_arrays` wrote.  Raises `ValueError` if the file is damaged."""
    return read_arrays_and_metadata(path)[0]


def read_arrays_and_metadata(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Read the arrays and the metadata that `write_arrays` wrote, the checksum left out.

    Raises `ValueError` if the file is damaged.
    """
    arrays, metadata = read_safetensors(path)
    expected = metadata.pop("sha256", None)
    if expected is None:
        raise ValueError(f"{path} has no checksum: it was not written by iclens")
    if _digest(arrays, metadata) != expected:
        raise ValueError(f"{path} does not match its checksum")
    return arrays, metadata


def read_safetensors(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """The arrays and the metadata of any safetensors file.

    Raises `ValueError` if the file is damaged.
    """
    content = path.read_bytes()
    try:
        arrays: dict[str, np.ndarray] = safetensors.numpy.load(content)
        length = int.from_bytes(content[:8], "little")
        metadata: dict[str, str] = json.loads(content[8 : 8 + length]).get("__metadata__") or {}
    except KeyError as error:
        raise ValueError(
            f"{path}: tensors of type {error} are not read: save them as float32"
        ) from None
    except Exception as error:
        raise ValueError(f"{path} cannot be read as safetensors: {error!r}") from None
    return arrays, metadata


def _digest(arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> str:
    digest = hashlib.sha256()
    for name in sorted(arrays):
        digest.update(f"{name} {arrays[name].dtype} {arrays[name].shape}".encode())
        digest.update(arrays[name].tobytes())
    if metadata:
        digest.update(json.dumps(metadata, sort_keys=True).encode())
    return digest.hexdigest()


def tree_to_arrays(tree: object) -> dict[str, np.ndarray]:
    """The arrays of a pytree by their path, such as `model.attentions.0.query`."""
    leaves = jax.tree_util.tree_leaves_with_path(eqx.filter(tree, eqx.is_array))
    return {_name(path): np.asarray(leaf) for path, leaf in leaves}


def arrays_to_tree(like: Tree, arrays: Mapping[str, np.ndarray]) -> Tree:
    """The pytree `like` with its arrays, or their shapes, replaced by the arrays of the same path.

    Raises `ValueError` naming the path where an array is missing or has another shape or type.
    """

    def replace(path: tuple[object, ...], leaf: Any) -> Any:
        if not (eqx.is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)):
            return leaf
        name = _name(path)
        if name not in arrays:
            raise ValueError(f"{name}: expected an array of shape {leaf.shape}, got none")
        found = arrays[name]
        if found.shape != leaf.shape or found.dtype != leaf.dtype:
            raise ValueError(
                f"{name}: expected shape {leaf.shape} of {leaf.dtype}, "
                f"got shape {found.shape} of {found.dtype}"
            )
        return jax.numpy.asarray(found)

    replaced: Tree = jax.tree_util.tree_map_with_path(replace, like)
    return replaced


def _name(path: tuple[object, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")

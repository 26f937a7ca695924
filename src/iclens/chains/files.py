"""Chain sets in files: .npy, .npz, .csv and .json, read strictly and in bounded memory."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import warnings
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from iclens.chains.sets import ChainSet
from iclens.names import nearest, unknown

FORMATS = (".npy", ".npz", ".csv", ".json")
KEYS = ("transition", "weights", "labels")
"""What a .npz or .json file holds: the transition matrices, and if need be the others."""
COLUMNS = ("chain", "state", "next", "probability", "weight")
"""Columns of a .csv file; the last one may be missing."""
MOST_ENTRIES = 2**25
"""Numbers in a file at most, 256 MiB as float64.  Looked at before memory is taken."""
MOST_STATES = 1024
"""States at most: the time that stationary laws take grows as the cube of their number."""
LONGEST_TEXT = 2**28
"""Bytes of a .json file at most; read, it takes some ten times as much."""
MOST_LETTERS = 2**22
"""Letters in the labels of a .npz file at most."""
EPOCH = (1980, 1, 1, 0, 0, 0)
"""Date of the members of a .npz file, so that equal chain sets have equal bytes."""


def read_chains(path: str | Path) -> ChainSet:
    """Read a chain set, by the ending of the file's name.

    `.npy`: transition matrices (chain, state, state), or a single one (state, state).
    `.npz`: `transition` of those shapes, and where wanted `weights` (chain,) and `labels` (state,).
    `.json`: an object of these keys with nested lists, or the transition matrices alone.
    `.csv`: a header with chain, state, next, probability and, where wanted, weight; a line for each
    transition; those that are left out have probability 0.  Chains and states are numbered in the
    order of their names, by value where all of them are whole numbers.  States that are called 0 to
    C - 1 have no labels, others are labelled by their names.

    Raises `OSError` if the file cannot be read, and `ValueError`, naming file and place, for one
    that is of another format, damaged, larger than 2^25 numbers or 1024 states, or holds no valid
    chain set.
    """
    path = Path(path)
    ending = path.suffix.lower()
    if ending not in READERS:
        expected = f"expected a file that ends in {', '.join(FORMATS[:-1])} or {FORMATS[-1]}"
        raise ValueError(f"chains {str(path)!r}: {expected}{nearest(ending, FORMATS)}")
    try:
        found = READERS[ending](path)
        return ChainSet(_matrices(found["transition"]), found.get("weights"), found.get("labels"))
    except ValueError as error:
        raise ValueError(f"chains {str(path)!r}: {error}") from None


def npz_bytes(chains: ChainSet) -> bytes:
    """A chain set as the content of a .npz file; equal sets give equal bytes."""
    arrays = {"transition": chains.transition, "weights": chains.weights}
    if chains.labels is not None:
        arrays["labels"] = np.array(chains.labels)
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for name, array in arrays.items():
            with archive.open(zipfile.ZipInfo(f"{name}.npy", EPOCH), "w") as member:
                np.lib.format.write_array(member, array, version=(1, 0), allow_pickle=False)
    return content.getvalue()


def _matrices(transition: np.ndarray) -> np.ndarray:
    if transition.ndim and transition.shape[-1] > MOST_STATES:
        raise ValueError(f"expected at most {MOST_STATES} states, got {transition.shape[-1]}")
    return transition[None] if transition.ndim == 2 else transition


# --- .npy and .npz


def _read_npy(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        return {"transition": _array(file, path.stat().st_size, "the array", "fiu")}


def _read_npz(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with open(path, "rb") as file:
        try:
            archive = zipfile.ZipFile(file)
            members = archive.infolist()
        except Exception as error:  # whatever a damaged directory leads to
            raise ValueError(f"it is no readable .npz file: {error}") from None
        for member in members:
            name = member.filename.removesuffix(".npy")
            if name not in KEYS:
                raise ValueError(unknown("array", name, KEYS))
            if name in found:
                raise ValueError(f"it has {name} twice")
            try:
                content = archive.open(member)
            except Exception as error:
                raise ValueError(f"{name} cannot be read: {error}") from None
            with content:
                kinds = "U" if name == "labels" else "fiu"
                found[name] = _array(content, member.file_size, name, kinds)
    if "transition" not in found:
        raise ValueError("expected an array called transition, got none")
    if "labels" in found:
        if found["labels"].ndim != 1:
            raise ValueError(f"labels: expected shape (state,), got {found['labels'].shape}")
        try:
            found["labels"] = found["labels"].tolist()
        except Exception:  # numbers that are no letters
            raise ValueError("labels: expected texts, got no Unicode") from None
    return found


def _array(file: Any, size: int, name: str, kinds: str) -> np.ndarray:
    """An array in the layout of .npy, of a kind of numbers or texts, that is as long as it says."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of headers by old versions
        try:
            version = np.lib.format.read_magic(file)
            read = {
                (1, 0): np.lib.format.read_array_header_1_0,
                (2, 0): np.lib.format.read_array_header_2_0,
            }[version]
            shape, by_columns, kind = read(file)
        except Exception as error:  # a header is a Python expression: it may fail in many ways
            raise ValueError(f"{name}: no readable .npy header: {error!r}") from None
    if kind.kind not in kinds:
        expected = "texts" if kinds == "U" else "numbers"
        raise ValueError(f"{name}: expected {expected}, got {kind}")
    count = math.prod(shape)
    most = MOST_LETTERS * 4 if kinds == "U" else MOST_ENTRIES * 8
    if min(shape, default=0) < 0 or not all(isinstance(side, int) for side in shape):
        raise ValueError(f"{name}: expected a shape, got {shape}")
    if count > MOST_ENTRIES or count * kind.itemsize > most:
        raise ValueError(f"{name}: shape {shape} of {kind} is more than is read: {most >> 20} MiB")
    if count * kind.itemsize > size:
        raise ValueError(f"{name}: shape {shape} of {kind} is more than the file has")
    try:
        content = file.read(count * kind.itemsize)
        whole = len(content) == count * kind.itemsize and not file.read(1)
    except Exception as error:  # a damaged compressed member
        raise ValueError(f"{name} cannot be read: {error}") from None
    if not whole:
        raise ValueError(f"{name}: expected {count * kind.itemsize} bytes of data, got others")
    return np.ndarray(shape, kind, content, order="F" if by_columns else "C")


# --- .json


def _read_json(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        content = file.read(LONGEST_TEXT + 1)
    if len(content) > LONGEST_TEXT:
        raise ValueError(f"it is longer than {LONGEST_TEXT >> 20} MiB: use a .npz file")
    try:
        table = json.loads(content.decode("utf-8-sig"), object_pairs_hook=_once)
    except RecursionError:
        raise ValueError("it is no readable JSON: nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"it is no readable JSON: {error}") from None
    if isinstance(table, list):
        table = {"transition": table}
    if not isinstance(table, dict):
        raise ValueError(f"expected an object with {KEYS[0]}, got {type(table).__name__}")
    if wrong := [key for key in table if key not in KEYS]:
        raise ValueError(unknown("key", wrong[0], KEYS))
    if "transition" not in table:
        raise ValueError("expected the key transition, got none")
    found: dict[str, Any] = {"transition": _numbers(table["transition"], "transition")}
    if table.get("weights") is not None:
        found["weights"] = _numbers(table["weights"], "weights")
    if table.get("labels") is not None:
        labels = table["labels"]
        if not isinstance(labels, list) or not all(isinstance(label, str) for label in labels):
            raise ValueError("labels: expected a list of texts")
        found["labels"] = labels
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key occurs twice")
    return found


def _numbers(value: Any, name: str) -> np.ndarray:
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError, RecursionError):
        raise ValueError(f"{name}: expected lists of one length each, got others") from None
    if array.dtype.kind not in "fiu":
        raise ValueError(f"{name}: expected numbers, got others")
    return array


# --- .csv


def _read_csv(path: Path) -> dict[str, Any]:
    lines = read_table(path, COLUMNS[:4], COLUMNS[4:])
    chains: dict[str, int] = {}
    states: dict[str, int] = {}
    weights: dict[int, float] = {}
    entries: dict[tuple[int, int, int], float] = {}
    weighed = next(lines)[1][4] is not None
    for line, row in lines:
        names, numbers = row[:3], row[3:]
        if "" in names:
            column = COLUMNS[names.index("")]
            raise ValueError(f"line {line}: expected a name in column {column}, got none")
        place = (
            chains.setdefault(names[0] or "", len(chains)),
            states.setdefault(names[1] or "", len(states)),
            states.setdefault(names[2] or "", len(states)),
        )
        if place in entries:
            raise ValueError(f"line {line}: chain {names[0]} has {names[1]} -> {names[2]} twice")
        entries[place] = _number(numbers[0], line, "probability")
        if len(chains) * len(states) ** 2 > MOST_ENTRIES or len(states) > MOST_STATES:
            raise ValueError(
                f"line {line}: {len(chains)} chains of {len(states)} states are more than the "
                f"{MOST_ENTRIES} numbers and {MOST_STATES} states that are read"
            )
        if weighed:
            weight = _number(numbers[1], line, "weight")
            if weights.setdefault(place[0], weight) != weight:
                raise ValueError(
                    f"line {line}: weight {weight:g} of chain {names[0]} was "
                    f"{weights[place[0]]:g} before"
                )
    if not entries:
        raise ValueError("it has a header, and no transition below it")
    chain_order, state_order = in_order(chains), in_order(states)
    transition = np.zeros((len(chains), len(states), len(states)))
    at = np.array(list(entries))
    transition[at[:, 0], at[:, 1], at[:, 2]] = list(entries.values())
    take = [states[name] for name in state_order]
    which = [chains[name] for name in chain_order]
    found: dict[str, Any] = {
        "transition": transition[np.ix_(which, take, take)],
        "labels": labels_of(state_order),
    }
    if weighed:
        found["weights"] = np.array([weights[chain] for chain in which])
    return found


def read_table(
    path: Path, needed: Sequence[str], optional: Sequence[str] = ()
) -> Iterator[tuple[int, list[str | None]]]:
    """The rows of a CSV file with a header: number of the line, and texts in the order asked for.

    First comes the header's, then one row for each line; a column that is missing is None all
    along.  Raises `ValueError` with the line where a file is none such.
    """
    line = 1
    with open(path, encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True)
        try:
            header = [name.strip() for name in next(reader, [])]
            if not header:
                raise ValueError(f"line 1: expected a header with {', '.join(needed)}, got none")
            if twice := [name for name in needed if header.count(name) > 1]:
                raise ValueError(f"line 1: the header has {twice[0]} twice")
            if missing := [name for name in needed if name not in header]:
                got = ", ".join(header)[:80]
                raise ValueError(
                    f"line 1: expected a header with {', '.join(needed)}, got {got!r}, without "
                    f"{missing[0]}{nearest(missing[0], header)}"
                )
            places = [
                header.index(name) if name in header else None for name in (*needed, *optional)
            ]
            yield 1, [None if place is None else header[place] for place in places]
            width = len(header)
            for row in reader:
                line = reader.line_num
                if len(row) == width:
                    yield line, [None if place is None else row[place] for place in places]
                elif row:
                    raise ValueError(f"line {line}: expected {width} fields, got {len(row)}")
        except csv.Error as error:
            raise ValueError(f"line {max(line, reader.line_num)}: {error}") from None
        except UnicodeDecodeError as error:
            raise ValueError(
                f"after line {line}: it is not in UTF-8 ({error.reason} {error.object[error.start]}"
                f" at byte {error.start} of what follows): save it as UTF-8"
            ) from None


def _number(text: str | None, line: int, column: str) -> float:
    try:
        number = float((text or "").replace("_", "?"))
        if math.isfinite(number):
            return number
    except ValueError:
        pass
    raise ValueError(f"line {line}: expected a number in column {column}, got {text!r}")


def in_order(names: Iterator[str] | Sequence[str] | dict[str, int]) -> list[str]:
    """Names in alphabetical order; by value where all of them are whole numbers."""
    listed = list(names)
    if all(re.fullmatch(r"-?[0-9]{1,18}", name) for name in listed):
        return sorted(listed, key=lambda name: (int(name), name))
    return sorted(listed)


def labels_of(names: Sequence[str]) -> list[str] | None:
    """Labels of states with these names; none where they are called by their numbers."""
    return None if list(names) == [str(number) for number in range(len(names))] else list(names)


READERS = {".npy": _read_npy, ".npz": _read_npz, ".csv": _read_csv, ".json": _read_json}

"""Chain sets in files: every format says the same, and every fault is one clear error."""

from __future__ import annotations

import io
import json
import re
import zipfile
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from iclens.chains import ChainPrior, ChainSet
from iclens.chains.files import FORMATS

LABELS = ("b c", "ä", "火")  # in the order of their names
CHAINS = ChainSet(
    ChainPrior(3).sample(jax.random.key(0), 4).transition, [1.0, 2.0, 3.0, 4.0], LABELS
)


def csv_text(chains: ChainSet) -> str:
    names = chains.labels or [str(state) for state in range(chains.states)]
    weights, transition = chains.weights.tolist(), chains.transition.tolist()
    return "weight,chain,state,next,probability\n" + "".join(
        f"{weights[k]!r},{k},{names[a]},{names[b]},{transition[k][a][b]!r}\n"
        for k in reversed(range(chains.count))
        for a in range(chains.states)
        for b in range(chains.states)
    )


def write(folder: Path, ending: str) -> Path:
    path = folder / f"chains{ending}"
    if ending == ".npy":
        np.save(path, CHAINS.transition)
    elif ending == ".npz":
        path.write_bytes(CHAINS.to_npz())
    elif ending == ".csv":
        path.write_text(csv_text(CHAINS), "utf-8")
    else:
        table = {"transition": CHAINS.transition.tolist(), "weights": [1, 2, 3, 4]}
        path.write_text(json.dumps({**table, "labels": LABELS}), "utf-8")
    return path


@pytest.mark.parametrize("ending", FORMATS)
def test_a_chain_set_comes_back_from_every_format(tmp_path, ending) -> None:
    found = ChainSet.from_file(write(tmp_path, ending))
    np.testing.assert_allclose(found.transition, CHAINS.transition, rtol=1e-15)
    if ending != ".npy":
        np.testing.assert_allclose(found.weights, CHAINS.weights, rtol=1e-15)
        assert found.labels == LABELS


def test_equal_sets_have_equal_bytes(tmp_path) -> None:
    path = write(tmp_path, ".npz")
    drawn = ChainPrior(3).sample(jax.random.key(0), 4)
    again = ChainSet(drawn.transition, [1.0, 2.0, 3.0, 4.0], LABELS)
    assert again.to_npz() == path.read_bytes()
    with np.load(path) as arrays:  # plain numpy reads it too
        np.testing.assert_array_equal(arrays["transition"], CHAINS.transition)
        assert arrays["labels"].tolist() == list(LABELS)


def test_a_single_matrix_is_a_set_of_one_chain(tmp_path) -> None:
    np.save(tmp_path / "one.npy", np.float32([[0.9, 0.1], [0.3, 0.7]]).T.copy().T)
    assert ChainSet.from_file(tmp_path / "one.npy").count == 1
    (tmp_path / "one.json").write_text("[[0.5, 0.5], [1, 0]]")
    np.testing.assert_array_equal(
        ChainSet.from_file(tmp_path / "one.json").transition, [[[0.5, 0.5], [1, 0]]]
    )
    np.save(tmp_path / "columns.npy", np.asfortranarray([[0.9, 0.1], [0.3, 0.7]]))
    np.testing.assert_allclose(
        ChainSet.from_file(tmp_path / "columns.npy").transition, [[[0.9, 0.1], [0.3, 0.7]]]
    )


def test_transitions_that_a_table_leaves_out_have_probability_0(tmp_path) -> None:
    path = tmp_path / "cycle.csv"
    path.write_text("chain,state,next,probability\n0,10,2,1\n0,2,10,1.0\n")
    found = ChainSet.from_file(path)
    np.testing.assert_array_equal(found.transition, [[[0, 1], [1, 0]]])
    assert found.labels == ("2", "10")  # by value, and not called 0 and 1


def npy(header: str, data: bytes = b"", version: bytes = b"\x01\x00") -> bytes:
    size = len(header).to_bytes(2 if version[0] == 1 else 4, "little")
    return b"\x93NUMPY" + version + size + header.encode() + data


def header(kind: str, shape: str) -> str:
    return f"{{'descr': {kind!r}, 'fortran_order': False, 'shape': {shape}, }}"


def npz(**members: bytes) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for name, data in members.items():
            archive.writestr(f"{name}.npy", data)
    return content.getvalue()


def npy_of(array: np.ndarray) -> bytes:
    content = io.BytesIO()
    np.save(content, array)
    return content.getvalue()


FAIR = npy_of(np.full((2, 2, 2), 0.5))


@pytest.mark.parametrize(
    ("ending", "content", "message"),
    [
        (".npy", b"", "the array: no readable .npy header"),
        (".npy", npy(header("<f8", "(1000000000000000,)")), "is more than is read: 256 MiB"),
        (".npy", npy(header("<f8", "(1000, 1000)")), "shape (1000, 1000) of float64 is more than"),
        (".npy", npy(header("<f8", "(2, -2)")), "expected a shape, got (2, -2)"),
        (".npy", npy(header("|O", "(2, 2)"), b"x" * 99), "expected numbers, got object"),
        (".npy", npy("{" * 900), "no readable .npy header"),
        (".npy", FAIR + b"x", "expected 64 bytes of data, got others"),
        (".npy", npy_of(np.ones((2, 1025, 1025)) / 1025), "at most 1024 states, got 1025"),
        (".npy", npy_of(np.array(1.0)), "expected shape (chain, state, state), got ()"),
        (".npz", b"PK", "it is no readable .npz file"),
        (".npz", npz(weight=FAIR), "unknown array 'weight'; did you mean 'weights'?"),
        (".npz", npz(weights=FAIR), "expected an array called transition, got none"),
        (".npz", npz(transition=FAIR, weights=npy_of(np.ones(3))), "weights: expected shape (2,)"),
        (
            ".npz",
            npz(transition=FAIR, labels=npy_of(np.array(["a", "a"]))),
            "labels: expected different names, got 'a' twice",
        ),
        (
            ".npz",
            npz(transition=FAIR, labels=npy(header("<U1", "(2,)"), b"\xff" * 8)),
            "labels: expected texts, got no Unicode",
        ),
        (".npz", npz(transition=FAIR, labels=npy_of(np.ones(2))), "labels: expected texts, got fl"),
        (".json", b"[" * 10**5, "it is no readable JSON"),
        (".json", b'{"transitions": []}', "unknown key 'transitions'; did you mean 'transition'?"),
        (".json", b'{"transition": [], "transition": []}', "a key occurs twice"),
        (".json", b'{"weights": [1]}', "expected the key transition, got none"),
        (".json", b'[["0.5", 0.5], [1, 0]]', "transition: expected numbers, got others"),
        (".json", b"[[0.5, 0.5], [1]]", "expected lists of one length each"),
        (".json", b"[[NaN, 0.5], [1, 0]]", "row 0 of chain 0: expected a probability at column 0"),
        (".json", b'"transition"', "expected an object with transition, got str"),
        (".json", "[\xff]".encode("latin-1"), "it is no readable JSON"),
        (".json", b'{"transition": [[0.5, 0.5], [1, 0]], "labels": ["a", 1]}', "labels: expected"),
        (".json", b'{"transition": [[0.5, 0.5], [1, 0]], "labels": ["a"]}', "expected 2, one for"),
        (".json", b'{"transition": [[0.5, 0.5], [1, 0]], "labels": ["a", "\\ud800"]}', "'\\ud800'"),
        (".csv", b"", "line 1: expected a header with chain, state, next, probability, got none"),
        (".csv", b"0,0,1,0.5\n", "line 1: expected a header"),
        (".csv", b"chain,state,nxt,probability\n", "without next; did you mean 'nxt'?"),
        (".csv", b"chain,state,next,probability\n", "a header, and no transition below it"),
        (".csv", b"chain,state,next,probability\n0,0,1\n", "line 2: expected 4 fields, got 3"),
        (".csv", b"chain,state,next,probability\n0,0,1,x\n", "line 2: expected a number in col"),
        (".csv", b"chain,state,next,probability\n0,,1,1\n", "line 2: expected a name in column st"),
        (
            ".csv",
            b"chain,state,next,probability\n0,0,1,1\n\n0,0,1,1\n",
            "line 4: chain 0 has 0 -> 1 twice",
        ),
        (
            ".csv",
            b"chain,state,next,probability,weight\n0,0,1,1,2\n0,1,0,1,3\n",
            "line 3: weight 3 of chain 0 was 2 before",
        ),
        (".csv", b"chain,state,next,probability\n0,\xe9,1,1\n", "not in UTF-8"),
        (".csv", b'chain,state,next,probability\n0,"0,1,1\n', "line 2: unexpected end of data"),
        (".csv", b"chain,state,next,probability\n0,0,1,0.5\n0,1,0,1\n", "row 0 of chain 0 sums to"),
        (".txt", b"", "expected a file that ends in .npy, .npz, .csv or .json"),
        (".cvs", b"", "or .json; did you mean '.csv'?"),
    ],
)
def test_a_bad_file_is_one_clear_error(tmp_path, ending, content, message) -> None:
    path = tmp_path / f"bad{ending}"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        ChainSet.from_file(path)
    assert str(error.value).startswith(f"chains {str(path)!r}: ")


def test_no_file_is_an_error_of_the_system(tmp_path) -> None:
    with pytest.raises(FileNotFoundError):
        ChainSet.from_file(tmp_path / "none.npz")
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(OSError, match="folder"):
        ChainSet.from_file(tmp_path / "folder.csv")


def read_or_refuse(path: Path) -> None:
    try:
        found = ChainSet.from_file(path)
    except (ValueError, OSError):
        return
    np.testing.assert_allclose(found.transition.sum(-1), 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("any")


TABLES = st.lists(
    st.lists(st.sampled_from(["0", "1", "0.5", "1.0", "", "x", "é", "-1", "inf", '"']), max_size=6),
    max_size=8,
).map(lambda rows: "\n".join(map(",".join, rows)))
TREES = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["transition", "weights", "labels", "x"]), inner)
    ),
)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_whatever_bytes_there_are_nothing_but_a_clear_error_comes(folder, data) -> None:
    ending = data.draw(st.sampled_from(FORMATS))
    good = write(folder, ending).read_bytes()
    texts = {
        ".csv": TABLES.map(lambda text: f"chain,state,next,probability\n{text}".encode()),
        ".json": TREES.map(lambda tree: json.dumps(tree).encode()),
    }
    path = folder / f"any{ending}"
    kind = data.draw(st.sampled_from(["bytes", "damage", "cut", "text"]))
    if kind == "damage":
        content = bytearray(good)
        for at, value in data.draw(
            st.lists(st.tuples(st.integers(0, len(good) - 1), st.integers(0, 255)), max_size=4)
        ):
            content[at] = value
    elif kind == "cut":
        content = good[: data.draw(st.integers(0, len(good)))]
    elif kind == "text" and ending in texts:
        content = data.draw(texts[ending])
    else:
        content = data.draw(st.binary(max_size=200))
    path.write_bytes(content)
    read_or_refuse(path)


HEADERS = st.sampled_from(["(2, 2)", "(10**9,)", "(2,)*70", "()", "(2, 2.0)", "None", "[2, 2]"])


@settings(deadline=None, max_examples=30)
@example("<f8", "(True, 2, 2)", b"")
@given(st.sampled_from(["<f8", "<U3", "|O", "f8,f8", "<M8[s]", "x", "|S2"]), HEADERS, st.binary())
def test_whatever_a_header_says_nothing_but_a_clear_error_comes(folder, kind, shape, rest) -> None:
    content = npy(header(kind, shape), rest)
    for ending, data in ((".npy", content), (".npz", npz(transition=content, labels=content))):
        path = folder / f"header{ending}"
        path.write_bytes(data)
        read_or_refuse(path)

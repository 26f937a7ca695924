"""Chains estimated from sequences: right, or refused with the place."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2

from iclens import cli
from iclens.chains import ChainPrior, ChainSet
from iclens.chains import orders as orders_module

HEAD = "group,order,state\n"


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "sequences.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_sampled_sequences_give_their_chains_back_within_the_expected_error() -> None:
    chains = ChainPrior(4).sample(jax.random.key(0), 3)
    states = [
        np.asarray(ChainSet(chains.transition[k : k + 1]).sample(jax.random.key(k), 1, 100_000)[0])[
            0
        ]
        for k in range(3)
    ]
    found, report = ChainSet.from_sequences(states, smoothing=0.0)
    visits = np.array([np.bincount(s[:-1], minlength=4) for s in states])
    error = np.sqrt(chains.transition * (1 - chains.transition) / visits[..., None])
    assert (abs(found.transition - chains.transition) < 4.5 * error).all()
    assert report.rows == 300_000
    assert [group.transitions for group in report.groups] == [99_999] * 3
    assert report.pooled.best == 1
    assert report.pooled.first.p < 1e-15
    assert report.pooled.second.p > 1e-3
    assert report.pooled.second.degrees == 3 * 4 * 9
    assert report.same_chain.p < 1e-15
    assert report.same_chain.degrees == 2 * 4 * 3


def test_every_order_is_told_from_the_others() -> None:
    rng = np.random.default_rng(0)
    independent = rng.integers(0, 3, 6000).tolist()
    second = [0, 0]  # the next state is likely the one before the last, and one more
    for number in rng.random(6000):
        second.append((second[-2] + 1) % 3 if number < 0.8 else int(10 * number) % 3)
    best = [
        ChainSet.from_sequences([sequence])[1].pooled.best for sequence in (independent, second)
    ]
    assert best == [0, 2]
    report = ChainSet.from_sequences([independent])[1]
    assert report.pooled.first.p > 1e-3


@given(st.lists(st.lists(st.sampled_from("abc"), max_size=12), min_size=1, max_size=4))
@settings(deadline=None, max_examples=40)
def test_likelihood_ratios_are_those_of_the_formulas(sequences) -> None:
    if len({state for sequence in sequences for state in sequence}) < 2:
        return
    if max(map(len, sequences)) < 2:
        return
    _, report = ChainSet.from_sequences(sequences)
    names = report.states
    kept = [sequence for sequence in sequences if len(sequence) > 1]
    for sequence, group in zip(kept, report.groups, strict=True):
        s = [names.index(state) for state in sequence]
        n = np.zeros((len(names),) * 3)
        np.add.at(n, (s[:-2], s[1:-1], s[2:]), 1)
        pairs = np.zeros((len(names),) * 2)
        np.add.at(pairs, (s[:-1], s[1:]), 1)
        assert group.counts == pairs.tolist()
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = pairs * pairs.sum() / np.outer(pairs.sum(1), pairs.sum(0))
            first = 2 * np.nansum(pairs * np.log(ratio))
            middle = n.sum((0, 2))
            ratio = n * middle[None, :, None] / (n.sum(2)[:, :, None] * n.sum(0)[None])
            second = 2 * np.nansum(n * np.log(ratio))
        assert group.orders.first.statistic == pytest.approx(first, abs=1e-9)
        assert group.orders.second.statistic == pytest.approx(second, abs=1e-9)
        degrees = ((pairs.sum(1) > 0).sum() - 1) * ((pairs.sum(0) > 0).sum() - 1)
        assert group.orders.first.degrees == degrees
        if degrees:
            assert group.orders.first.p == pytest.approx(chi2.sf(first, degrees))
        degrees = sum(
            max(0, (n[:, b].sum(1) > 0).sum() - 1) * max(0, (n[:, b].sum(0) > 0).sum() - 1)
            for b in range(len(names))
        )
        assert group.orders.second.degrees == degrees


def test_p_values_are_uniform_where_the_smaller_model_is_true() -> None:
    chains = ChainPrior(3).sample(jax.random.key(2), 1)
    states = np.asarray(chains.sample(jax.random.key(3), 100, 1500)[0])
    report = ChainSet.from_sequences(list(states))[1]
    p = np.array([group.orders.second.p for group in report.groups])
    assert p.mean() == pytest.approx(0.5, abs=0.12)
    assert (p < 0.05).mean() == pytest.approx(0.05, abs=0.07)
    assert report.same_chain.p > 1e-3
    assert report.pooled.second.p > 1e-4


def test_counts_do_not_depend_on_the_chunks_or_on_the_table(monkeypatch) -> None:
    rng = np.random.default_rng(1)
    table = {
        "group": rng.integers(0, 3, 200),
        "order": rng.permutation(400)[:200],
        "state": rng.integers(0, 3, 200),
    }
    whole = ChainSet.from_sequences(table)
    for chunk, dense in ((7, 2**25), (1, 0), (50, 0)):
        monkeypatch.setattr(orders_module, "CHUNK", chunk)
        monkeypatch.setattr(orders_module, "DENSE", dense)
        found = ChainSet.from_sequences(table)
        np.testing.assert_array_equal(found[0].transition, whole[0].transition)
        assert found[1] == whole[1]


def test_rows_in_any_order_and_files_and_tables_say_the_same(tmp_path) -> None:
    rows = [
        ("ελ", 3, "水"), ("ελ", 1, "木"), ("ελ", 2, "水"), ("10", 5, "木"), ("10", 7, "水"),
        ("10", 4, "火"), ("9", 0, "木"), ("9", 1, "木"), ("8", 3, "火"), ("10", 8, "木"),
    ]  # fmt: skip
    path = write(tmp_path, HEAD + "".join(f"{g},{o},{s}\n" for g, o, s in rows))
    found, report = ChainSet.from_sequences(path)
    assert found.labels == ("木", "水", "火")
    assert [group.name for group in report.groups] == ["10", "9", "ελ"]
    assert report.left_out == ["8"]  # of a single row
    # 10: gamma alpha, a gap, beta alpha; 9: alpha alpha; el: alpha beta beta
    assert report.groups[0].counts == [[0, 0, 0], [1, 0, 0], [1, 0, 0]]
    assert [group.gaps for group in report.groups] == [1, 0, 0]
    assert report.groups[1].counts == [[1, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert report.groups[1].never_seen == ["水", "火"]
    assert report.single == 1
    np.testing.assert_allclose(found.transition[1], [[2 / 4, 1 / 4, 1 / 4]] + [[1 / 3] * 3] * 2)
    random.Random(0).shuffle(rows)
    group, order, state = zip(*rows, strict=True)
    table = {"state": state, "other": order, "group": group, "order": order}
    again = ChainSet.from_sequences(table)
    np.testing.assert_array_equal(again[0].transition, found.transition)
    assert again[1] == report
    import pandas

    frame = ChainSet.from_sequences(pandas.DataFrame(table))
    assert frame[1] == report
    text = str(report)
    assert "state 火 is never seen in 9, ελ" in text
    assert "left out for want of a transition: 8" in text
    assert "1 gap, 1 of a single state" in text
    assert json.loads(json.dumps(report.to_json()))["groups"][0]["orders"]["best"] is None


def test_groups_and_states_that_are_numbers_are_in_their_order(tmp_path) -> None:
    text = HEAD + "".join(f"{g},{o},{(g + o) % 11}\n" for g in (10, 9) for o in range(30))
    found, report = ChainSet.from_sequences(write(tmp_path, text))
    assert found.labels is None
    assert found.states == 11
    assert [group.name for group in report.groups] == ["9", "10"]


def test_a_text_is_a_sequence_of_its_letters() -> None:
    found, report = ChainSet.from_sequences(["abab", "aab"], smoothing=1.0)
    assert found.labels == ("a", "b")
    assert report.groups[0].counts == [[0, 2], [1, 0]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: expected a header with group, order, state, got none"),
        (HEAD, "expected at least one row, got none"),
        ("a,0,x\na,1,y\n", "line 1: expected a header with group, order, state, got 'a, 0, x'"),
        ("group,oder,state\n", "without order; did you mean 'oder'?"),
        ("group,order,state,state\n", "line 1: the header has state twice"),
        (HEAD + "a,0,x\n\na,1.5,y\n", "line 4: expected a whole number in column order, got '1.5'"),
        (HEAD + "a,0,x\na,99999999999999999999,y\n", "line 3: expected an order within 2^62"),
        (HEAD + "a,0,x\na,1\n", "line 3: expected 3 fields, got 2"),
        (HEAD + "a,0,x\na,1,\n", "line 3: expected a state, got ''"),
        (HEAD + ",0,x\n", "line 2: expected a group, got ''"),
        (
            HEAD + "b,0,x\n\na,1,y\na,0,x\na,1,x\n",
            "line 6: group 'a' has order 1 twice, first at line 4",
        ),
        (HEAD + "a,0,x\na,1,x\n", "expected at least 2 different states, got only 'x'"),
        (HEAD + "a,0,x\nb,1,y\n", "expected at least one transition, got none"),
        (b"group,order,state\na,0,\xe9\n", "it is not in UTF-8"),
        ("group,order,state\na,0,x\n".encode("utf-16"), "it is not in UTF-8"),
        (HEAD + 'a,0,"x\n', "unexpected end of data"),
        (
            HEAD + "".join(f"a,{i},{i}\n" for i in range(1030)),
            "line 1026: expected at most 1024 different states, got another one, '1024'",
        ),
    ],
)
def test_a_bad_file_is_refused_with_its_place(tmp_path, text, message) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        ChainSet.from_sequences(path)
    assert str(error.value).startswith(f"sequences {str(path)!r}: ")


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ([], {}, "expected at least one row, got none"),
        ([[0, 1], [1, None]], {}, "position 1 of sequence 1: expected a state, got None"),
        ([[0.0, float("nan")]], {}, "position 1 of sequence 0: expected a state, got nan"),
        ({"group": [0], "state": [1]}, {}, "got 'group, state', without order"),
        ({"group": [0], "order": [0.5], "state": [1]}, {}, "row 0: expected a whole number in col"),
        ({"group": [0, 1], "order": [0], "state": [1]}, {}, "of one length, got 2, 1 and 1 rows"),
        ([[0, 1]], {"smoothing": -1.0}, "smoothing: expected a number from 0 to 1e+12, got -1"),
        ([[0, 1]], {"smoothing": 0.0}, "state '1' is never left in group '0'"),
        ([[0, 0, 1, 1]], {"smoothing": 0.0}, None),
    ],
)
def test_a_bad_table_is_refused_with_its_place(source, options, message) -> None:
    if message is None:
        assert ChainSet.from_sequences(source, **options)[0].transition[0, 1].tolist() == [0, 1]
        return
    with pytest.raises(ValueError, match=re.escape(message)):
        ChainSet.from_sequences(source, **options)


FIELDS = st.sampled_from(["a", "b", "0", "1", "2", "7", "-1", "x y", "é", "", '"', "1e3", "\0"])


@settings(deadline=None, max_examples=60)
@given(
    st.one_of(
        st.binary(max_size=60),
        st.lists(st.lists(FIELDS, min_size=2, max_size=4), max_size=12).map(
            lambda rows: (HEAD + "\n".join(map(",".join, rows))).encode()
        ),
        st.lists(
            st.tuples(st.sampled_from("ab"), st.integers(-3, 9), st.sampled_from("xyz")),
            max_size=12,
        ).map(lambda rows: (HEAD + "".join(f"{g},{o},{s}\n" for g, o, s in rows)).encode()),
    )
)
def test_whatever_a_file_holds_nothing_but_a_clear_error_comes(tmp_path_factory, content) -> None:
    path = write(tmp_path_factory.getbasetemp(), content)
    try:
        found, report = ChainSet.from_sequences(path)
    except (ValueError, OSError):
        return
    assert str(report)
    json.dumps(report.to_json(), allow_nan=False)
    np.testing.assert_allclose(found.transition.sum(-1), 1)


def test_the_command_prints_and_writes(tmp_path, capsys) -> None:
    path = write(
        tmp_path, HEAD + "".join(f"{g},{o},{'xy'[o % 2]}\n" for g in "ab" for o in range(9))
    )
    out = tmp_path / "chains.npz"
    assert cli.dispatch(["chains", str(path), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "2 chains of 2 states from 18 rows, smoothing 1" in printed
    assert f"wrote   {out}" in printed
    assert ChainSet.from_file(out).labels == ("x", "y")
    assert cli.dispatch(["chains", str(path), "--json", "--smoothing", "0.5"]) == 0
    assert json.loads(capsys.readouterr().out)["smoothing"] == 0.5
    assert cli.dispatch(["chains", str(path), "--out", "chains.csv"]) == 2
    assert cli.dispatch(["chains", str(tmp_path / "none.csv")]) == 2
    assert "No such file" in capsys.readouterr().err


@pytest.mark.slow
def test_ten_million_rows_take_bounded_memory(tmp_path) -> None:
    path = tmp_path / "large.csv"
    rng = np.random.default_rng(0)
    with open(path, "w") as file:
        file.write(HEAD)
        for group in rng.permutation(100):  # groups out of order: they are sorted
            states = rng.integers(0, 5, 100_000).tolist()
            file.writelines(f"g{group},{place},{state}\n" for place, state in enumerate(states))
    script = f"""
from pathlib import Path
from iclens.chains import ChainSet

def peak():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])

before = peak()
chains, report = ChainSet.from_sequences({str(path)!r})
assert (chains.count, report.rows) == (100, 10_000_000)
assert abs(chains.transition - 0.2).max() < 0.02
print(before >> 10, peak() >> 10)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert int(done.stdout.split()[1]) < 768  # MiB; 570 were measured

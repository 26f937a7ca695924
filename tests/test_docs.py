"""The documentation is true: its code runs, its links lead somewhere, its numbers are measured."""

from __future__ import annotations

import ast
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import iclens
from blocks import DIRECTIVES, ELSEWHERE, KINDS, PAGES, ROOT, blocks, difference, needs, run_page
from iclens.cli import COMMANDS
from iclens.cli.theory import COMMANDS as THEORY
from iclens.lab.recipe import presets

sys.path.insert(0, str(ROOT / "docs"))
from check import problems

EVERY = [block for page in PAGES for block in blocks(page)]
HERE = [
    page
    for page in PAGES
    if "quick" not in needs(page)
    and any(b.kind not in (*DIRECTIVES, "text") and b.note == "" for b in blocks(page))
]
"""Pages with code; those that want the run of `quick` are run where it is, in test_quick.py."""


def relative(page: Path) -> str:
    return str(page.relative_to(ROOT))


# --- the blocks


@pytest.mark.slow
@pytest.mark.parametrize("page", HERE, ids=relative)
def test_code_runs_as_it_stands(page: Path, tmp_path: Path, tiny_run) -> None:
    assert list(run_page(page, tmp_path, {"tiny": tiny_run.path}))


def test_every_block_is_of_a_known_kind() -> None:
    assert {b.place: b.kind for b in EVERY if b.kind not in (*KINDS, *DIRECTIVES)} == {}
    notes = {"", "environment", "not run", "as seen once"}
    assert {b.place: b.note for b in EVERY if b.note not in notes} == {}
    assert {b.reason for b in EVERY if b.note == "environment"} <= {"interop"}


def test_these_blocks_alone_are_not_run() -> None:
    assert [b.name for b in EVERY if b.note == "not run"] == [
        "docs/gallery.md: make quick # three minutes on two cores",
        "docs/how-to/cluster.md: sbatch --array 0-2 --wrap 'iclens cell runs/array "
        "$SLURM_ARRAY_TASK_ID'",
        "docs/how-to/cluster.md: iclens run RECIPE --scheduler tcp://10.0.0.1:8786",
        "docs/how-to/cluster.md: iclens run paper --ensemble 16",
        "docs/how-to/neighbours.md: iclens run edelman --out runs/edelman",
        "docs/how-to/neighbours.md: iclens run park-small --out runs/park-small",
        "docs/how-to/own-chains.md: cd examples/names",
        "docs/how-to/own-chains.md: cd examples/names",
        "docs/install.md: pip install .",
    ]


def test_make_quick_is_the_command_that_runs_in_its_place() -> None:
    made = subprocess.run(
        ["make", "--no-print-directory", "--dry-run", "quick"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert made.stdout.splitlines()[-1] == ".venv/bin/iclens run quick --out runs/quick"


@pytest.mark.parametrize(("command", "file"), ELSEWHERE.items())
def test_what_is_not_run_here_is_run_there(command: str, file: str) -> None:
    assert command in (ROOT / file).read_text().splitlines()


@pytest.mark.parametrize(
    ("expected", "printed", "same"),
    [
        ("a 1\nb", "a 1.2\nb", True),
        ("a 1\nb", "a 1\nc", False),
        ("a", "a\nb", False),
        ("a\n...", "a\nb\nc", True),
        ("...\nc", "a\nb\nc", True),
        ("...\nc", "a\nc\nb", False),
        ("a\n...\nc", "a\nc", True),
        ("loss 0.5", "loss 2.5", False),
        ("...\nb\n...\nd", "a\nb\nc\nd", True),
        ("...\nb\n...\nd", "a\nd\nb", False),
        ("M1 (4) -> M2 (600)", "M1 (5) -> M2 (550)", True),
        ("M1 (4) -> M2 (600)", "M1 (4) -> G2 (600)", False),
        ("a\nb", "a", False),
    ],
)
def test_outputs_are_compared_loosely(expected: str, printed: str, same: bool) -> None:
    assert (not difference(expected, printed)) is same


# --- what the pages say


def test_links_lead_to_files_and_headings() -> None:
    wrong = []
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
        for link in re.findall(r"\]\(([^)\s]+)\)", prose):
            if "://" in link:
                continue
            name, _, anchor = link.partition("#")
            target = (page.parent / name).resolve() if name else page
            if not target.exists():
                wrong.append(f"{relative(page)}: {link}: no such file")
            elif anchor and anchor not in headings(target):
                wrong.append(f"{relative(page)}: {link}: no such heading")
    assert wrong == []


def headings(page: Path) -> set[str]:
    """Anchors of a page's headings, as they are made of their words."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_commands_of_the_paper_page_exist() -> None:
    text = (ROOT / "docs" / "paper.md").read_text()
    commands = re.findall(r"`iclens ([^`]+)`", text)
    assert len(commands) > 10
    for command in commands:
        name, *rest = command.split()
        assert name in COMMANDS, command
        if name == "theory":
            assert rest[0] in THEORY, command
        if name == "run":
            assert rest[0] in presets(), command


def test_numbers_of_the_paper_page_are_those_of_the_results() -> None:
    results = (ROOT / "docs" / "results.md").read_text()
    rows = re.findall(r"^\| .* \| ([^|]+) \|$", (ROOT / "docs" / "paper.md").read_text(), re.M)
    said = [number for row in rows for number in re.findall(r"\d*\.\d+", row)]
    assert len(said) > 12
    assert [number for number in said if number not in results] == []


def test_every_claim_has_a_verdict() -> None:
    text = (ROOT / "docs" / "paper.md").read_text()
    rows = re.findall(r"^\| .* \| ([^|]+) \|$", text, re.M)
    told = [row for row in rows if row not in ("here", "---")]
    without = [
        row for row in told if not re.match(r"\*\*(agrees|partly|disagrees|not tested)", row)
    ]
    assert without == [
        "the references, exact",
        "they do, in the minimal model and in the transformers",
    ]


def test_reference_names_all_that_is_exported() -> None:
    index = (ROOT / "docs" / "reference" / "index.md").read_text()
    assert [name for name in iclens.__all__ if f"{{py:obj}}`{name}`" not in index] == []


def test_what_a_position_kind_has_to_change_is_there() -> None:
    page = (ROOT / "docs" / "extend" / "positions.md").read_text()
    steps = page[page.index("In this order:") : page.index("What tells that it is right")]
    names = set(re.findall(r"`([A-Za-z_.]+)`", steps))
    classes = {name.split(".")[0] for name in names if name[0].isupper()} - {"Literal", "None"}
    assert classes == {"TransformerConfig", "Transformer", "Attention"}
    for name in names:
        owner, _, member = name.partition(".")
        if member and owner in classes:
            assert member in _members(owner), name
    functions = {n for n in names if n.islower() and "." not in n} - {"since"}
    assert functions == {"_every_edge", "forward", "rotate", "attend", "_check_edges", "no_lag"}
    tree = ast.parse((ROOT / "src/iclens/transformer.py").read_text())
    order = [n.name for n in tree.body if isinstance(n, ast.FunctionDef)]
    assert {"_every_edge", "forward", "rotate", "attend", "_check_edges"} <= set(order)
    assert order.index("_every_edge") < order.index("forward") < order.index("_check_edges")
    from iclens.circuits.interventions import no_lag

    assert callable(no_lag)
    assert "function forwardPass(" in (ROOT / "src/iclens/report/assets/model.js").read_text()
    for path in re.findall(r"`((?:src|tests)/[^`]+)`", page):
        assert (ROOT / path).is_file(), path


def _members(owner: str) -> set[str]:
    tree = ast.parse((ROOT / "src/iclens/transformer.py").read_text())
    (found,) = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == owner]
    names = {n.name for n in found.body if isinstance(n, ast.FunctionDef)}
    return names | {
        n.target.id
        for n in found.body
        if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
    }


def test_notebooks_are_kept_without_outputs() -> None:
    paths = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
    assert len(paths) == 2
    for path in paths:
        cells = [c for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code"]
        assert [c for c in cells if c["outputs"] or c["execution_count"]] == []


@pytest.mark.slow
def test_pictures_of_words_are_as_drawn(tmp_path: Path) -> None:
    words = runpy.run_path(str(ROOT / "docs" / "words.py"))
    drawn = words["pictures"]()
    kept = {path.stem: path.read_text() for path in words["FOLDER"].glob("words-*.svg")}
    assert drawn == kept


# --- the check of the built site


GOOD = '<html><body><h1 id="top">A</h1><a href="b.html#x">b</a><img src="a.svg" alt="A"></body>'


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        (GOOD, ""),
        (GOOD.replace("#x", "#y"), "no place 'y'"),
        (GOOD.replace("b.html", "c.html"), "no file"),
        (GOOD.replace('"a.svg"', '"https://example.org/a.svg"'), "from the network"),
        (GOOD.replace(' alt="A"', ""), "no alternative text"),
        (GOOD + '<a href="http://example.org">c</a>', "expected https"),
        (GOOD + '<link rel="stylesheet" href="//example.org/f.css">', "from the network"),
        (GOOD + "<style>@import 'https://example.org/f.css';</style>", "from the network"),
        (GOOD + '<script src="gone.js"></script>', "no file"),
    ],
)
def test_the_built_site_is_checked(tmp_path: Path, page: str, expected: str) -> None:
    (tmp_path / "a.html").write_text(page)
    (tmp_path / "a.svg").write_text("<svg/>")
    (tmp_path / "b.html").write_text('<p id="x"></p>')
    found = problems(tmp_path)
    assert [expected in problem for problem in found] == [True] * bool(expected)

"""The code blocks of the README and the documentation, and how they are run as they stand.

A page's blocks run in its own, at first empty folder, in the order of the page: `python` in one
namespace, `sh` with `iclens` on the path, `toml` as (part of) a recipe.  A `text` block that comes
after one is what it printed.  A comment on the line before a block says if it is otherwise:

    <!-- environment: interop -->   run by tests/interop_env
    <!-- not run: REASON -->        run by nobody
    <!-- as seen once: REASON -->   an output that is not compared
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from iclens.lab.recipe import parse_recipe

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
KINDS = ("python", "sh", "toml", "text")
DIRECTIVES = ("{toctree}", "{eval-rst}", "{modules}")

TRAINED = {
    "make quick": ("quick", "iclens run quick"),
    "iclens run quick": ("quick", "iclens run quick"),
    "iclens run tiny": ("tiny", "iclens run tiny"),
}
"""Commands that find a copy of a run that was trained already: its name, and what is run on it."""
ELSEWHERE = {"make docs": ".ci/run"}
"""Commands that are run by other means, and where."""


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    """Of its first line of code, from 1."""
    kind: str
    code: str
    note: str = ""
    """What the comment before it says, such as `not run`."""
    reason: str = ""

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def name(self) -> str:
        """Its page and first line, which stay when others move."""
        return f"{self.page.relative_to(ROOT)}: {' '.join(self.code.splitlines()[0].split())}"


def blocks(page: Path) -> list[Block]:
    """All fenced blocks of a page.  Raises `ValueError` for a fence that is not closed."""
    found: list[Block] = []
    lines = page.read_text(encoding="utf-8").splitlines()
    place = 0
    while place < len(lines):
        opened = re.match(r"(\s*)(`{3,}|~{3,}|:{3,})\s*(\S*)", lines[place])
        place += 1
        if opened is None:
            continue
        indent, fence, kind = opened.groups()
        ends = [i for i in range(place, len(lines)) if lines[i].strip() == fence]
        if not ends:
            raise ValueError(f"{page}:{place}: the block is not closed")
        code = "".join(line.removeprefix(indent) + "\n" for line in lines[place : ends[0]])
        before = lines[place - 2].strip() if place > 1 else ""
        said = re.fullmatch(r"<!-- ([a-z ]+): (.+) -->", before)
        note, reason = said.groups() if said else ("", "")
        found.append(Block(page, place + 1, kind, code, note, reason))
        place = ends[0] + 1
    return found


def needs(page: Path) -> set[str]:
    """Names of the trained runs that a page's commands want."""
    return {
        TRAINED[command][0]
        for block in blocks(page)
        if block.kind == "sh" and block.note == ""
        for line in block.code.splitlines()
        for command in TRAINED
        if (line == command or line.startswith(f"{command} "))
        and not re.search(r"--(out|plan)\b", line)
    }


def _is(command: str, line: str) -> bool:
    return line == command or line.startswith(f"{command} ")


def _elsewhere(line: str) -> bool:
    """Whether a command does not work on the trained run."""
    return re.search(r"--(out|plan)\b", line) is not None


def run_page(
    page: Path, folder: Path, runs: Mapping[str, Path], environment: str = ""
) -> Iterator[str]:
    """Run a page's blocks in a folder; yields the place of each that was run.

    Those of an environment are run if it is named, beside all others.
    `runs` are trained runs by name.  Raises `AssertionError`, naming the place, if a command fails
    or prints something else than the page says.
    """
    namespace: dict[str, Any] = {"__name__": "__main__"}
    (folder / ".venv").symlink_to(Path(sys.executable).parents[1], target_is_directory=True)
    printed: str | None = None
    for block in blocks(page):
        own = block.reason if block.note == "environment" else ""
        if block.note == "not run" or block.kind in DIRECTIVES or own not in ("", environment):
            printed = None
            continue
        if block.kind == "python":
            printed = _run_python(block, folder, namespace)
        elif block.kind == "sh":
            printed = _run_shell(block, folder, runs)
        elif block.kind == "toml":
            parse_recipe(block.code, where=block.place)
            printed = None
        elif printed is not None and block.note != "as seen once":
            problem = difference(block.code, printed)
            assert not problem, f"{block.place}: {problem}; printed was\n{printed}"
            printed = None
        else:
            continue
        yield block.place


def _run_python(block: Block, folder: Path, namespace: dict[str, Any]) -> str:
    program = compile("\n" * (block.line - 1) + block.code, str(block.page), "exec")
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()) as out:
        exec(program, namespace)
    return out.getvalue()


def _run_shell(block: Block, folder: Path, runs: Mapping[str, Path]) -> str:
    lines = []
    for line in block.code.splitlines():
        if line.split(" #")[0].strip() in ELSEWHERE:
            continue
        for command, (name, real) in TRAINED.items():
            if _is(command, line):
                place = folder / "runs" / name
                if not _elsewhere(line) and not place.exists():
                    shutil.copytree(runs[name], place)
                line = real + line.removeprefix(command)
        lines.append(line)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", "\n".join(lines)],
        cwd=folder,
        env=os.environ | {"PATH": path, "MPLBACKEND": "Agg"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, f"{block.place}: code {done.returncode}\n{done.stderr}"
    return done.stdout


def difference(expected: str, printed: str) -> str:
    """What a page shows that was not printed; empty where it was.

    A line `...` stands for any lines.  Words must be the same; numbers may differ by half, for
    another machine trains other digits.
    """
    rows = [line.split() for line in printed.splitlines() if line.strip()]
    pieces: list[list[list[str]]] = [[]]
    for line in expected.splitlines():
        if line.strip() == "...":
            pieces.append([])
        elif line.strip():
            pieces[-1].append(line.split())
    at = 0
    for number, piece in enumerate(pieces):
        last = number == len(pieces) - 1
        starts = range(at, len(rows) - len(piece) + 1)
        if last and piece:
            starts = range(max(at, len(rows) - len(piece)), len(rows) - len(piece) + 1)
        if number == 0:
            starts = range(0, 1)
        fits = [
            start
            for start in starts
            if len(rows[start : start + len(piece)]) == len(piece)
            and all(map(_same, piece, rows[start:]))
        ]
        if number == 0 and last and len(rows) != len(piece):
            fits = []
        if not fits:
            shown = " / ".join(" ".join(line) for line in piece)
            return f"the page shows {shown!r}"
        at = fits[0] + len(piece)
    return ""


NUMBER = re.compile(r"\d*\.?\d+(?:e[+-]?\d+)?")


def _same(expected: list[str], printed: list[str]) -> bool:
    one, other = " ".join(expected), " ".join(printed)
    if NUMBER.sub("#", one) != NUMBER.sub("#", other):
        return False
    pairs = zip(NUMBER.findall(one), NUMBER.findall(other), strict=True)
    return all(_near(float(a), float(b)) for a, b in pairs)


def _near(a: float, b: float) -> bool:
    return abs(a - b) <= max(abs(a), abs(b)) / 2 + 0.1

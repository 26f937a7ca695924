"""Data flows one way: chains -> predictors -> ... -> cli."""

from __future__ import annotations

import ast
from pathlib import Path

import iclens

ROOT = Path(iclens.__file__).parent
RANKS = {
    name: rank
    for rank, names in enumerate(
        [
            ["names", "interrupts", "revision"],
            ["chains", "separation"],
            ["predictors"],
            ["transformer"],
            ["training"],
            ["phases", "circuits", "theory"],
            ["scoring"],
            ["lab"],
            ["interop"],
            ["report"],
            ["cli"],
        ]
    )
    for name in names
}


def room(parts: list[str]) -> str | None:
    return parts[1] if len(parts) > 1 and parts[0] == "iclens" else None


def backward_arrows(source: str, path: Path) -> list[str]:
    """Imports in `source`, the text of the module at `path`, that point against the flow."""
    here = path.relative_to(ROOT).parts[0].removesuffix(".py")
    wrong = []
    for node in ast.walk(ast.parse(source)):
        modules: list[str] = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            modules = [node.module or ""]
            if node.module == "iclens":  # a module, or a public name that a module has
                names = [alias.name for alias in node.names]
                modules = [iclens._HOME.get(name, f"iclens.{name}") for name in names]
        for module in modules:
            there = room(module.split("."))
            if there in RANKS and there != here and RANKS[there] >= RANKS[here]:
                wrong.append(f"{path}:{node.lineno}: {here} imports {there}")
    return wrong


def test_imports_follow_the_data() -> None:
    wrong = []
    for path in sorted(ROOT.rglob("*.py")):
        if path.name == "__init__.py" and path.parent == ROOT:
            continue  # the public names
        wrong += backward_arrows(path.read_text(), path)
    assert not wrong, "\n".join(wrong)


def test_every_room_is_known() -> None:
    rooms = {path.stem for path in ROOT.iterdir() if path.suffix == ".py"} | {
        path.name for path in ROOT.iterdir() if (path / "__init__.py").exists()
    }
    assert rooms - {"__init__", "recipes"} <= set(RANKS)


def test_a_backward_arrow_is_named_with_its_line() -> None:
    source = "import jax\nfrom iclens.lab.store import Run\n"
    assert backward_arrows(source, ROOT / "phases.py") == [
        f"{ROOT / 'phases.py'}:2: phases imports lab"
    ]
    assert len(backward_arrows("from iclens import open_run", ROOT / "phases.py")) == 1
    sibling = "from iclens import theory"
    assert len(backward_arrows(sibling, ROOT / "phases.py")) == 1

"""How the site is built: `make docs` writes it into build/docs.

Docstrings are plain text: a name in single backticks becomes a link where it is documented, and an
indented block, such as a formula, is kept as it is.
"""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Iterable
from importlib import import_module
from typing import Any

from docutils.nodes import Node
from sphinx.application import Sphinx
from sphinx.util.nodes import make_refnode

import iclens

project = "iclens"
author = "the iclens developers"
copyright = author
release = version = iclens.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc"]
exclude_patterns = ["**.ipynb_checkpoints"]
nitpicky = True  # every reference must lead somewhere; make docs takes warnings for errors

html_theme = "furo"
html_title = "iclens"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}

myst_heading_anchors = 3
myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist"]

nb_execution_mode = "force"
nb_execution_timeout = 240  # seconds for a cell
nb_execution_raise_on_error = True
nb_execution_show_tb = True
nb_merge_streams = True

default_role = "py:obj"
add_module_names = False
python_use_unqualified_type_names = True
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True}

autodoc_type_aliases = {
    name: name for name in ("ArrayLike", "PRNGKeyArray", "Predictor", "States", "Diversity")
}
autodoc_mock_imports = ["nnsight", "torch", "transformer_lens", "transformers", "wandb"]
autoclass_content = "both"
maximum_signature_line_length = 76
ELSEWHERE = re.compile(
    r"(jax|jaxlib|jaxtyping|numpy|xarray|optax|eqx|equinox|torch|collections|pathlib)\..*"
    r"|Array(Like)?|Bool|Float|Int|Integer|Key|PRNGKeyArray|UInt32|ndarray"
    r"|TypeAliasForwardRef|States|iclens\.lab\.(files\.Tree|recipe\.Config)"
)
"""Types that are named in signatures and documented by other libraries, or are a mere name here."""


def plain_text(
    app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]
) -> None:
    """Plain text as reStructuredText: only `code` and *emphasis* are marked."""
    written: list[str] = []
    block = False
    for line in lines:
        indented = line.startswith("    ")
        if indented and not block:
            written += ["", ".. code-block:: text", ""]
        block = indented or (block and not line.strip())
        written.append(line if indented else _escaped(line))
    lines[:] = written


def no_values(app: Sphinx, what: str, name: str, thing: Any, skip: bool, options: Any) -> bool:
    """Numbers and tables of a module are read beside its code."""
    return skip or (what == "module" and isinstance(thing, int | float | dict))


def _escaped(line: str) -> str:
    code_or_emphasis = r"(`[^`]*`|(?<![\w*])\*\w[\w -]*\*(?![\w*]))"
    pieces = re.split(code_or_emphasis, line)
    return "".join(
        piece if number % 2 else re.sub(r"([*|\\])", r"\\\1", piece)
        for number, piece in enumerate(pieces)
    )


def modules(app: Sphinx, page: str, source: list[str]) -> None:
    """A block `{modules}` is a section for each module, of a package for each that is in it."""
    source[0] = re.sub(r"```\{modules\}\n(.*?)```", _sections, source[0], flags=re.S)


def _sections(block: re.Match[str]) -> str:
    names: list[str] = []
    for name in block[1].split():
        inside = getattr(import_module(name), "__path__", [])
        found = [f"{name}.{module.name}" for module in pkgutil.iter_modules(inside)]
        names += [inner for inner in found if "._" not in inner] or [name]
    return "\n\n".join(
        f"## {name}\n\n```{{eval-rst}}\n.. automodule:: {name}\n```" for name in names
    )


def find(app: Sphinx, env: Any, node: Any, shown: Node) -> Node | None:
    """Where a name leads that its own module does not have: to the one thing that bears it."""
    if node.get("refdomain") != "py":
        return None
    target = node["reftarget"]
    domain = env.domains["py"]
    members = () if "." in target else ("attribute", "method", "property")  # may be parameters
    found: Iterable[Any] = [
        entry
        for name, entry in domain.objects.items()
        if name.endswith(f".{target}") and entry.objtype not in members
    ]
    places = {(entry.docname, entry.node_id) for entry in found if not entry.aliased}
    if len(places) == 1:
        (page, anchor) = places.pop()
        return make_refnode(app.builder, node["refdoc"], page, anchor, shown, target)
    plain = node["reftype"] == "obj" or ELSEWHERE.fullmatch(target)
    return shown if plain else None


def setup(app: Sphinx) -> None:
    app.connect("autodoc-skip-member", no_values)
    app.connect("autodoc-process-docstring", plain_text)
    app.connect("missing-reference", find)
    app.connect("source-read", modules)

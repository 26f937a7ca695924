"""Pages whose code wants the libraries of this environment, run from beginning to end."""

from __future__ import annotations

from pathlib import Path

import pytest

from blocks import PAGES, blocks, run_page

HERE = [page for page in PAGES if any(b.reason == "interop" for b in blocks(page))]


@pytest.mark.parametrize("page", HERE, ids=lambda page: page.name)
def test_code_runs_as_it_stands(page: Path, tmp_path: Path, tiny_run) -> None:
    assert list(run_page(page, tmp_path, {"tiny": tiny_run.path}, environment="interop"))

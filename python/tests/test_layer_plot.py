# SPDX-License-Identifier: Apache-2.0
"""The picture of docs/transformers.md is drawn from its table."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "python" / "benchmarks" / "plot_transformers_layer.py"

pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="the benchmarks are not here")


@pytest.fixture
def script() -> dict:
    return runpy.run_path(str(SCRIPT))


def test_the_page_has_all_rows(script):
    table = script["rows"]((ROOT / "docs" / "transformers.md").read_text())
    names = {(row.layer, row.by, row.what) for row in table}
    assert len(names) == len(table) == 10
    for row in table:
        assert (row.out_of_memory_at is None) == (row.by == "winnow" and len(row.figures) == 7)


def test_out_of_memory_ends_a_row(script):
    page = "| layer | by | | 2k | 4k | 8k |\n|---|---|---|---|---|---|\n"
    page += "| a | eager | both | 1.5 ms, 2.0 | out of memory | |\n"
    (row,) = script["rows"](page)
    assert row == ("a", "eager", "both", [(2048, 1.5, 2.0)], 4096)


def test_it_draws(script, tmp_path):
    pytest.importorskip("matplotlib")
    table = script["rows"]((ROOT / "docs" / "transformers.md").read_text())
    script["plot"](table, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size < 150 * 1024

# SPDX-License-Identifier: Apache-2.0
"""docs/performance.md: its tables are written from the raw files of what was measured."""

import importlib
import json
import re
import stat
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "python" / "benchmarks"

pytestmark = pytest.mark.skipif(not BENCHMARKS.exists(), reason="the benchmarks are not here")

ORIGIN = {"commit": "abc1234", "date": "2026-11-18", "device": "NVIDIA H200, driver 580"}
BENCH = {
    "runs_on": "NVIDIA H200 (sm_90)",
    "matrix_product": {"flops_per_second": 8e14},
    "measured": [
        {
            "call": f"op_{direction}",
            "kernel": "sm90",
            "median_seconds": 2.0e-3,
            "fastest_seconds": 1.987654321e-3,
            "slowest_seconds": 2.04e-3,
            "repeats": 9,
            "flops": 1.2e12,
            "tokens": 4096,
        }
        for direction in ("forward", "backward")
    ],
}


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("performance_tables")


@pytest.fixture
def program(tmp_path):
    """In the place of winnow: prints BENCH, and refuses --heads 3."""
    file = tmp_path / "winnow"
    words = f"case \"$*\" in *'--heads 3'*) echo no >&2; exit 1;; esac; echo '{json.dumps(BENCH)}'"
    file.write_text(f"#!/bin/sh\n{words}\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return str(file)


def table(script, **rows: str):
    return script.Table("op", "op", rows, calls="forward")


def test_what_is_measured_becomes_a_table(script, program, tmp_path, monkeypatch, capsys):
    tables = [table(script, long="--keys 64"), table(script, long="--keys 64")]
    monkeypatch.setattr(script, "TABLES", tables)
    monkeypatch.setattr(script, "origin", lambda: dict(ORIGIN))
    file = tmp_path / "gpu.json"
    assert script.measure(file, program) == 0
    figures = json.loads(file.read_text())
    (run,) = figures["runs"]  # each command once
    assert run["command"] == "winnow bench op --backend cuda --repeat 9 --tokens 4096 --keys 64"
    assert run["measured"][0]["fastest_seconds"] == 1.98765e-3
    assert script.table_of(tables[0], figures).splitlines() == [
        "Commit abc1234, 2026-11-18, NVIDIA H200, driver 580; G 800 to 800 TFLOP/s; `winnow bench "
        "op --backend cuda --repeat 9 --tokens 4096` and the options of the row.",
        "",
        "| shape | options | kernel | time | fastest to slowest | TFLOP/s | of G |",
        "|---|---|---|---|---|---|---|",
        "| long | `--keys 64` | sm90 | 2.00 ms | 1.99 to 2.04 | 600 | 0.750 |",
    ]


def test_a_command_that_fails_leaves_the_others(script, program, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(script, "TABLES", [table(script, bad="--heads 3", good="--heads 4")])
    file = tmp_path / "gpu.json"
    assert script.measure(file, program) == 1
    assert len(json.loads(file.read_text())["runs"]) == 1
    assert "--heads 3: RuntimeError('no')" in capsys.readouterr().err


def test_the_race_becomes_a_table(script):
    race = {"race": "forward", "ms": {"winnow": 2.0, "peer": 3.0}}
    race |= {"fastest_ms": {"winnow": 1.9, "peer": 2.9}, "slowest_ms": {"winnow": 2.1, "peer": 3.1}}
    text = script.peers_table(ORIGIN | {"versions": {"peer": "1.2"}, "results": [race]})
    assert "peer 1.2" in text
    row = "| forward | 2.00 ms | 1.90 to 2.10 | peer | 3.00 ms | 2.90 to 3.10 | 1.50 |"
    assert text.splitlines()[-1] == row


def test_the_races_have_a_summary(script, monkeypatch):
    ratios = {"2048 keys, smooth": 1.5, "4096 keys, smooth": 1.25}
    ratios |= {"2048 keys, independent": 1.125, "4096 keys, independent": 1.0}
    races = [{"race": f"index, {name}", "ratio": ratio} for name, ratio in ratios.items()]
    monkeypatch.setattr(script, "SUMMARY", [("indexer", "a peer", "index", (2048, 4096))])
    file = ORIGIN | {"versions": {"peer": "1.2"}, "results": races}
    lines = script.summary_table({"the indexer": file}).splitlines()
    assert lines[2] == "| indexer | 2k / 4k | a peer | 1.50 / 1.25 | 1.12 / 1.00 |"
    assert lines[-1] == "Taken: the indexer at commit abc1234, 2026-11-18, with peer 1.2."


def test_the_cpu_has_a_table(script):
    product = {"what": "sgemm", "flops_per_second": 2e11, "one_thread_flops_per_second": 1e11}
    sizes = {"case": "small", "tokens": 128, "keys": 8192, "kernel": "simd", "scaling": 1.9}
    times = {"median_seconds": 0.2, "fastest_seconds": 0.19, "slowest_seconds": 0.21}
    rates = {"flops": 4e10, "flops_per_second": 2e11, "of_matrix_product": 1.0}
    measured = [{"call": "op"} | sizes | times | rates, {"call": "bytes"} | sizes | times]
    bench = {"runs_on": "AVX3", "matrix_product": product, "measured": measured}
    lines = script.cpu_table(ORIGIN | {"bench": bench}).splitlines()
    assert "sgemm: 200 GFLOP/s, 2.00 times that of one thread" in lines[0]
    shared = "small | 128 x 8192 | simd | 200 ms | 190 to 210"
    assert lines[-2] == f"| op | {shared} | 200 | 1.00 | 1.90 |"
    assert lines[-1] == f"| bytes | {shared} | bytes alone | bytes alone | 1.90 |"


def test_times_have_a_unit_that_fits(script):
    assert script.in_unit(1.22, 1.19) == ["1.22 s", "1.19"]
    assert script.in_unit(1.0e-4, 9.99e-5) == ["0.100 ms", "0.0999"]
    assert script.in_unit(2.5e-5, 1.2e-4) == ["25.0 us", "120"]


def test_only_what_is_between_the_markers_changes(script):
    page = "a\n<!-- table: op -->\nold\n<!-- end of table -->\nb\n"
    new = script.with_table(page, "op", "new\n")
    assert new == "a\n<!-- table: op -->\n\nnew\n\n<!-- end of table -->\nb\n"
    assert script.with_table(new, "op", "new\n") == new
    with pytest.raises(SystemExit, match="0 places"):
        script.with_table(page, "other", "")


def test_the_page_is_what_was_measured(script):
    page = (ROOT / "docs" / "performance.md").read_text()
    places = re.findall(r"<!-- table: (\w+) -->", page)
    assert sorted(places) == sorted(
        ["peers", "index_peers", *script.CPU, *script.EAGER, *(each.name for each in script.TABLES)]
    )
    assert script.written(page) == page, "run python/benchmarks/performance_tables.py write"
    readme = (ROOT / "README.md").read_text()
    assert script.written_readme(readme) == readme, "the same for README.md"

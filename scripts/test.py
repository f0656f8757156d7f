# SPDX-License-Identifier: Apache-2.0
"""Runs the C++ tests of the named builds, then the Python tests, and counts them all.

    test.py [--slow] dev release

Tests that are marked slow run with --slow only. The Python tests use the library of the last build.
The last line printed is "N passed, N failed, N skipped"; the exit code is 0 only if nothing failed
and each run had tests.
"""

import argparse
import contextlib
import io
import multiprocessing
import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# The Python tests that take longest, which begin first; others follow by name.
LONGEST = [
    "test_parallel",
    "test_tool",
    "test_torch",
    "test_parallel_errors",
    "test_ops",
    "test_main",
]


def outcomes(report: Path) -> Counter:
    """Passed, failed and skipped cases of a report by GoogleTest or pytest; none without one."""
    count = Counter()
    try:
        cases = ElementTree.parse(report).iter("testcase")
    except (FileNotFoundError, ElementTree.ParseError):
        return count
    for case in cases:
        if case.find("failure") is not None or case.find("error") is not None:
            count["failed"] += 1
        elif case.find("skipped") is not None or case.get("status") == "notrun":
            count["skipped"] += 1
        else:
            count["passed"] += 1
    return count


def fresh_folder(path: Path) -> Path:
    """An empty folder: a report of an earlier run must not hide a crash in this one."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path


def run_ctest(preset: str, slow: bool) -> Counter:
    build = ROOT / "build" / preset
    reports = fresh_folder(build / "test_reports")
    summary = reports / "ctest.xml"
    print(f"== C++ tests, {preset}", flush=True)
    code = subprocess.call(
        ["ctest", "--test-dir", build, "-j2", "--output-on-failure", "--no-tests=error"]
        + ["--output-junit", summary]
        + ([] if slow else ["--label-exclude", "^slow$"]),
        env=os.environ | {"UBSAN_OPTIONS": "print_stacktrace=1"},
    )
    count = Counter()
    entries = ElementTree.parse(summary).iter("testcase") if summary.exists() else []
    for entry in entries:
        cases = outcomes(reports / f"{entry.get('name')}.xml")
        ok = entry.get("status") == "run"
        if "_test." in entry.get("name"):
            # A crash leaves no report; a leak or a crash at exit leaves one without a failure.
            if not cases:
                print(f"{entry.get('name')} crashed or holds no tests")
            if not cases or (not ok and not cases["failed"]):
                cases["failed"] += 1
        elif (skipped := entry.find("skipped")) is not None and "SKIP_" in skipped.get("message"):
            cases["skipped"] += 1  # by its output; one that was not built is skipped too, and fails
        else:
            cases["passed" if ok else "failed"] += 1
        count += cases
    if code != 0 and not count["failed"]:
        count["failed"] += 1
    return count


def run_file(file: Path, report: Path, slow: bool) -> tuple[str, int]:
    """What pytest prints about a file, and its exit code; many files in one process, so that torch
    is imported once."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        code = pytest.main(
            ["-q", str(file), f"--junitxml={report}"] + ([] if slow else ["-m", "not slow"])
        )
    return output.getvalue(), code


def run_pytest(preset: str, slow: bool) -> Counter:
    """In two processes side by side, as ctest runs two: a free one takes the next file."""
    build = ROOT / "build" / preset
    reports = fresh_folder(build / "test_reports" / "python")
    os.chdir(ROOT)
    os.environ["WINNOW_LIBRARY"] = str(build / "libwinnow.so")
    os.environ["PYTHONPATH"] = str(ROOT / "python")  # of processes that tests start
    sys.path.insert(0, str(ROOT / "python"))  # of the two
    files = sorted((ROOT / "python" / "tests").glob("test_*.py"))
    files.sort(key=lambda file: LONGEST.index(file.stem) if file.stem in LONGEST else len(LONGEST))
    print("== Python tests", flush=True)
    count = Counter()
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as processes:
        runs = {}
        for file in files:
            report = reports / f"{file.stem}.xml"
            runs[processes.submit(run_file, file, report, slow)] = report
        for run in as_completed(runs):
            cases = outcomes(runs[run])
            try:
                text, code = run.result()
            except BrokenProcessPool:  # also of files that it or the other was to take later
                text, code = f"{runs[run].stem}: a process died\n", 1
            print(text, end="", flush=True)
            # Also when pytest died before its report. All tests of a file may be slow.
            no_tests = code == pytest.ExitCode.NO_TESTS_COLLECTED
            if code != 0 and not no_tests and not cases["failed"]:
                cases["failed"] += 1
            count += cases
    if not count:
        count["failed"] += 1
    return count


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--slow", action="store_true", help="run the slow tests too")
    parser.add_argument("presets", nargs="+", metavar="PRESET")
    options = parser.parse_args()
    count = Counter()
    for preset in options.presets:
        count += run_ctest(preset, options.slow)
    count += run_pytest(options.presets[-1], options.slow)
    print(f"{count['passed']} passed, {count['failed']} failed, {count['skipped']} skipped")
    return 1 if count["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())

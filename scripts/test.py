# SPDX-License-Identifier: Apache-2.0
"""Runs the C++ tests of the named builds, then the Python tests, and counts them all.

    test.py [--slow] dev release

Tests that are marked slow run with --slow only. The Python tests use the library of the last build.
The last line printed is "N passed, N failed, N skipped"; the exit code is 0 only if nothing failed
and each run had tests.
"""

import argparse
import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


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
        else:
            cases["passed" if ok else "failed"] += 1
        count += cases
    if code != 0 and not count["failed"]:
        count["failed"] += 1
    return count


def run_pytest(preset: str, slow: bool) -> Counter:
    """In two processes side by side, as ctest runs two: each takes every other file."""
    build = ROOT / "build" / preset
    reports = build / "test_reports"
    environment = os.environ | {
        "WINNOW_LIBRARY": str(build / "libwinnow.so"),
        "PYTHONPATH": str(ROOT / "python"),
    }
    files = sorted((ROOT / "python" / "tests").glob("test_*.py"))
    print("== Python tests", flush=True)
    halves = [
        subprocess.Popen(
            [sys.executable, "-m", "pytest", "-q", *files[half::2]]
            + [f"--junitxml={reports}/pytest{half}.xml"]
            + ([] if slow else ["-m", "not slow"]),
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for half in range(2)
    ]
    count = Counter()
    for half, process in enumerate(halves):
        print(process.communicate()[0], flush=True)
        cases = outcomes(reports / f"pytest{half}.xml")
        # Also when pytest found no tests or died before its report.
        if process.returncode != 0 and not cases["failed"]:
            cases["failed"] += 1
        count += cases
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

# SPDX-License-Identifier: Apache-2.0
"""Checks that each folder includes only what the layers allow.

src/ is one include root, so the compiler would accept any header of any folder.
"""

import re
import sys
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SUFFIXES = {".h", ".cc", ".cu", ".cuh"}

CUDA_OPERATOR = ["winnow/", "core/", "backend_operators.h", "cuda/common/", "cuda/hopper/"]

# Folder, file or pattern -> the project headers it may include, besides those of its own folder.
# The longest matching key counts.
ALLOWED = {
    "include/winnow": [],
    "src/backend.h": ["winnow/", "core/"],
    "src/backend_operators.h": ["winnow/", "backend.h"],
    "src/c_abi.cc": ["winnow/"],
    "src/core": ["winnow/"],
    "src/ops": ["winnow/", "core/", "backend.h"],
    "src/reference": ["winnow/", "core/", "backend.h", "backend_operators.h"],
    "src/cpu": ["winnow/", "core/", "backend.h", "backend_operators.h"],
    # Folders of operators include each other only as listed; common and hopper know no operator.
    "src/cuda": ["winnow/", "core/", "backend.h", "backend_operators.h"],
    "src/cuda/common": ["winnow/", "core/"],
    "src/cuda/hopper": ["core/numerics.h"],
    "src/cuda/*/*": CUDA_OPERATOR,
    "src/cuda/index_loss": [*CUDA_OPERATOR, "cuda/index_topk/gradient.cuh"],
    "src/parallel": ["winnow/", "core/", "cuda/common/runtime.h"],
    "emulator": [],
    "harness": ["winnow/"],
    "tools": ["winnow/", "harness/"],
    "examples": ["winnow/", "harness/"],
    "tests": ["winnow/", "harness/", "core/"],  # core: it has no public face to be tested by
    "tests/plan_test.cc": ["winnow/", "harness/", "tests/", "tools/plan/"],
    "tests/dump*": ["winnow/", "harness/", "tests/", "tools/compare/"],
    "tests/rank_layer.h": ["winnow/", "harness/", "tests/", "tools/plan/"],
    "tests/emulator_test.cc": ["emulator/"],  # likewise
    "tests/hopper_*": ["winnow/", "cuda/hopper/", "cuda/common/tensor_map.h"],
}
INCLUDE_ROOTS = ["include", "src", "."]
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')


def rule_for(path: str) -> str | None:
    matches = [key for key in ALLOWED if fnmatch(path, key) or path.startswith(key + "/")]
    return max(matches, key=len, default=None)


def own_folder(rule: str, path: str) -> str:
    """The prefix by which files under the rule's folder name each other; of a pattern all but the
    last part names a folder."""
    if "*" in rule:
        rule = "/".join(path.split("/")[: rule.count("/")])
    folder = re.sub(r"^(include|src)/", "", rule)
    return folder + "/" if not Path(folder).suffix else folder


def mistake(rule: str, path: str, bracket: str, header: str) -> str | None:
    """What is wrong with one include, or None."""
    if bracket == "<":
        if any((ROOT / base / header).exists() for base in INCLUDE_ROOTS):
            return f"<{header}> is a header of this project: quote it"
        if rule == "include/winnow" and not re.fullmatch(r"[a-z0-9_]+", header):
            return f"<{header}>: public headers include the standard library only"
        return None
    allowed = [own_folder(rule, path), *ALLOWED[rule]]
    if not any(header == name or (name[-1] == "/" and header.startswith(name)) for name in allowed):
        return f'"{header}": {rule} may include only {", ".join(allowed)}'
    if not any((ROOT / base / header).exists() for base in INCLUDE_ROOTS):
        return f'"{header}" does not exist under include/, src/ or the root'
    return None


def main() -> int:
    tops = sorted({key.split("/")[0] for key in ALLOWED})
    files = [path for top in tops for path in sorted((ROOT / top).rglob("*"))]
    mistakes = 0
    for path in files:
        if path.suffix not in SUFFIXES:
            continue
        name = path.relative_to(ROOT).as_posix()
        rule = rule_for(name)
        if rule is None:
            print(f"{name}: scripts/check_includes.py has no rule for this folder")
            mistakes += 1
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            include = INCLUDE.match(line)
            text = include and mistake(rule, name, *include.groups())
            if text:
                print(f"{name}:{number}: {text}")
                mistakes += 1
    return 1 if mistakes else 0


if __name__ == "__main__":
    sys.exit(main())

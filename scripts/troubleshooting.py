# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of docs/troubleshooting.md from the library's refusals and docs/refusals.toml.

    troubleshooting.py [--check]

With --check nothing is written; the exit code is 1 if the page is not what would be written.
"""

import re
import sys
from pathlib import Path

import tomllib

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "troubleshooting.md"

MARK = "<!-- From here on written by scripts/troubleshooting.py"
TITLES = {
    "Tensors.": "Tensors",
    "Numbers and words.": "Numbers and words",
    "One argument against another.": "One argument against another",
    "Legal, but not here: the sentences of why_not.": "Legal, but not here",
    "The same of single kernels and of the cuda backend.": "Legal, but not on this machine",
    "Of communicators: parts that this build or this machine does not have.": "Communicators",
    "What explain says of kernels beside the one that was asked for.": "What explain adds",
    "Running out of memory.": "Running out of memory",
}  # by the beginning of the comment over a group of sentences


def sentences(header: str) -> dict[str, tuple[str, str]]:
    """By name: the comment over the group of a sentence, and the sentence."""
    found, group = {}, ""
    pattern = (
        r"\n\n// (?P<group>.+)"
        r'|inline constexpr char (?P<name>\w+)\[\] =(?P<text>(?:\s*"[^"\n]*")+);'
    )
    body = header[header.index("namespace winnow::refusal") :]
    for match in re.finditer(pattern, body):
        if match["group"]:
            group = match["group"]
        else:
            found[match["name"]] = group, "".join(re.findall(r'"([^"]*)"', match["text"]))
    return found


def title(comment: str) -> str:
    return next(text for start, text in TITLES.items() if comment.startswith(start))


def tables(header: str, cures: dict[str, dict[str, str]]) -> str:
    found = sentences(header)
    if missing := sorted(set(found) - set(cures)):
        sys.exit(f"docs/refusals.toml: no entry for {', '.join(missing)}")
    if unknown := sorted(set(cures) - set(found)):
        sys.exit(f"docs/refusals.toml: no such sentence: {', '.join(unknown)}")
    text, group = "", None
    for name, (own_group, sentence) in found.items():
        if own_group != group:
            group = own_group
            text += f"\n## {title(group)}\n\n| sentence | meaning | cure |\n|---|---|---|\n"
        shown = sentence.replace("{}", "…")
        text += f"| `{shown}` | {cures[name]['meaning']} | {cures[name]['cure']} |\n"
    return text


def main() -> int:
    old = PAGE.read_text()
    mark = old.index(MARK)
    head = old[: old.index("\n", mark) + 1]
    header = (ROOT / "src" / "core" / "refusals.h").read_text()
    cures = tomllib.loads((ROOT / "docs" / "refusals.toml").read_text())
    text = head + tables(header, cures)
    if sys.argv[1:] == ["--check"]:
        return 0 if old == text else 1
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""Plots the measured table of docs/transformers.md: time and peak memory of one attention layer.

    python python/benchmarks/plot_transformers_layer.py [docs/transformers.md] [--out FILE]

The figures are those of transformers_layer.py, as the page has them, so that table and picture
cannot differ. A line ends where the next size was out of memory, marked by a cross.
"""

import argparse
import re
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).resolve().parents[2] / "docs" / "transformers.md"
CELL = re.compile(r"([\d.]+) ms, ([\d.]+)")
COLOURS = {"eager": "tab:red", "SDPA": "tab:orange", "winnow": "tab:blue"}


class Row(NamedTuple):
    layer: str
    by: str
    what: str  # forward or both
    figures: list[tuple[int, float, float]]  # tokens, milliseconds, GiB
    out_of_memory_at: int | None  # tokens


def rows(page: str) -> list[Row]:
    """The rows of the table whose cells have a time and a size."""
    found = []
    sizes: list[int] = []
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if cells[0] == "layer" and cells[-1].endswith("k"):
            sizes = [1024 * int(cell.removesuffix("k")) for cell in cells[3:]]
        elif sizes and CELL.fullmatch(cells[3] if len(cells) > 3 else ""):
            figures, end = [], None
            for tokens, cell in zip(sizes, cells[3:], strict=True):
                if match := CELL.fullmatch(cell):
                    figures.append((tokens, float(match[1]), float(match[2])))
                elif cell == "out of memory":
                    end = tokens
            found.append(Row(cells[0], cells[1], cells[2], figures, end))
    return found


def plot(table: list[Row], path: Path) -> None:
    from matplotlib import pyplot

    layers = sorted({row.layer for row in table}, reverse=True)
    figure, panels = pyplot.subplots(2, len(layers), figsize=(10, 7), sharex=True, sharey="row")
    for column, layer in enumerate(layers):
        for row in table:
            if row.layer != layer:
                continue
            line = {"color": COLOURS[row.by], "linestyle": "-" if row.what == "both" else ":"}
            label = f"{row.by}, {'forward + backward' if row.what == 'both' else 'forward'}"
            for which in (0, 1):
                panel = panels[which][column]
                tokens, values = ([x[i] for x in row.figures] for i in (0, which + 1))
                panel.plot(tokens, values, marker="o", markersize=3, label=label, **line)
                if row.out_of_memory_at:
                    panel.plot(tokens[-1], values[-1], marker="x", markersize=9, **line)
        panels[0][column].set_title(f"one layer of {layer}, bf16, H200")
        panels[1][column].set_xlabel("tokens")
        panels[0][column].legend(fontsize=7)
    for (panel, *others), name in zip(panels, ("ms", "peak GiB"), strict=True):
        panel.set_ylabel(name)
        for each in (panel, *others):
            each.set_xscale("log", base=2)
            each.set_yscale("log")
            each.grid(alpha=0.3)
    ticks = [tokens for tokens, *_ in max((row.figures for row in table), key=len)]
    panels[0][0].set_xticks(ticks, [f"{tokens // 1024}k" for tokens in ticks])
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("page", type=Path, nargs="?", default=PAGE)
    parser.add_argument("--out", type=Path, default=PAGE.with_name("transformers_layer.png"))
    given = parser.parse_args()
    table = rows(given.page.read_text())
    if not table:
        raise SystemExit(f"{given.page} has no table of measured figures")
    plot(table, given.out)
    print(f"plotted {len(table)} rows into {given.out}")


if __name__ == "__main__":
    main()

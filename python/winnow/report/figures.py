# SPDX-License-Identifier: Apache-2.0
"""Figures as SVG text that takes its colours from the style of the page, for light and dark."""

import io
import itertools
import re
from html import escape
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot  # noqa: E402
from matplotlib.ticker import FixedLocator, LogLocator, NullFormatter, NullLocator  # noqa: E402

from winnow.report.measure import exponent  # noqa: E402

# Colours that stand for variables of the style sheet: matplotlib has to be given some.
_VARIABLES = {
    "#010101": "currentColor",
    "#020202": "var(--grid)",
    "#030303": "var(--first)",
    "#040404": "var(--second)",
    "#050505": "var(--third)",
    "#060606": "var(--page)",
}
INK, GRID, FIRST, SECOND, THIRD, PAGE = _VARIABLES

pyplot.rcParams.update(
    {
        "svg.fonttype": "none",
        "svg.hashsalt": "winnow",
        "font.family": "DejaVu Sans",
        "font.size": 10,
        "text.color": INK,
        "axes.edgecolor": INK,
        "axes.labelcolor": INK,
        "axes.facecolor": "none",
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "grid.color": GRID,
        "legend.frameon": False,
        "xtick.color": INK,
        "ytick.color": INK,
        "figure.facecolor": "none",
        "savefig.facecolor": "none",
    }
)


def _svg(figure, name: str, title: str, description: str) -> str:
    """The figure as an element of HTML, with names of its own and a text for screen readers."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    pyplot.close(figure)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r"url\(#", f"url(#{name}-", text)
    text = re.sub(r'href="#', f'href="#{name}-', text)
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, variable)
    labels = f'role="img" aria-labelledby="{name}-title {name}-desc" focusable="false"'
    head = (
        f'<title id="{name}-title">{escape(title)}</title>'
        f'<desc id="{name}-desc">{escape(description)}</desc>'
    )
    return re.sub(r"<svg([^>]*)>", rf"<svg\1 {labels}>\n{head}", text, count=1)


def _plain(value: float, _: float | None = None) -> str:
    """Three digits, without powers of ten."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _plain_ticks(axis, of_minor: bool) -> None:
    """Of a logarithmic axis: 200, not 2 x 10^2."""
    axis.set_major_formatter(_plain)
    axis.set_minor_locator(LogLocator(subs=(2, 5) if of_minor else (1,)))
    axis.set_minor_formatter(_plain if of_minor else NullFormatter())


def step_times(stages: list[dict[str, Any]], name: str) -> str:
    """Bars: the time of every call of a step."""
    named = [(stage["call"], 1e3 * stage["seconds"]) for stage in stages][::-1]
    longest = max(time for _, time in named)
    figure, axes = pyplot.subplots(figsize=(7.6, 0.42 * len(named) + 0.9), layout="constrained")
    bars = axes.barh([call for call, _ in named], [time for _, time in named], color=FIRST)
    axes.bar_label(bars, [_plain(time) for _, time in named], padding=4)
    axes.set(xlabel="time, ms", xlim=(0, 1.12 * longest))
    axes.grid(axis="y", visible=False)
    told = ", ".join(f"{call} {_plain(time)} ms" for call, time in named[::-1])
    return _svg(figure, name, "Time of every call of the step", told)


def roofline(points: list[dict[str, Any]], flops: float, bytes_per_second: float, name: str) -> str:
    """Achieved FLOP/s over FLOP per byte of memory traffic, beside a copy and a matrix product."""
    figure, axes = pyplot.subplots(figsize=(7.6, 4.6), layout="constrained")
    ridge = flops / bytes_per_second
    intensities = [point["intensity"] for point in points]
    left, right = min(*intensities, ridge) / 3, 3 * max(*intensities, ridge)
    axes.plot(
        [left, ridge, right],
        [left * bytes_per_second / 1e9, flops / 1e9, flops / 1e9],
        color=INK,
        label="memory copy, then matrix product",
    )
    order = sorted(points, key=lambda point: point["intensity"])
    markers = itertools.cycle("os^vDPX*")  # no texts beside points, which may lie close together
    for point, marker in zip(order, markers, strict=False):
        place = point["intensity"], point["flops_per_second"] / 1e9
        axes.plot(*place, marker, color=FIRST, markersize=8, label=point["call"])
    lowest = min(point["flops_per_second"] for point in points) / 1e9
    axes.set(
        xscale="log", yscale="log", xlabel="FLOP per byte of the call's tensors, each counted once"
    )
    axes.set(ylabel="GFLOP/s", xlim=(left, right), ylim=(lowest / 4, 2.5 * flops / 1e9))
    _plain_ticks(axes.xaxis, of_minor=False)
    _plain_ticks(axes.yaxis, of_minor=True)
    figure.legend(loc="outside lower center", ncols=2, fontsize=9)
    told = ", ".join(f"{p['call']} {p['share']:.2f} of copy and product" for p in order)
    return _svg(figure, name, "Achieved against a measured copy and product", told)


def over_length(points: list[dict[str, Any]], key: str, unit: float, label: str, name: str) -> str:
    """Measured points of sparse and dense over the sequence length, each with its exponent."""
    figure, axes = pyplot.subplots(figsize=(7.6, 4), layout="constrained")
    told = []
    series = (("dense", SECOND, "s"), ("sparse", FIRST, "o"))
    for kind, colour, marker in series:
        chosen = [(p["tokens"], p[key] / unit) for p in points if p["kind"] == kind and p[key]]
        if len(chosen) < 2:
            continue
        power = exponent(chosen)
        axes.plot(
            *zip(*chosen, strict=True), marker=marker, color=colour, label=f"{kind}: n^{power:.2f}"
        )
        told.append(f"{kind} grows as tokens to the power {power:.2f}")
    lengths = sorted({p["tokens"] for p in points})
    axes.set(xscale="log", yscale="log", xlabel="sequence length n, tokens", ylabel=label)
    axes.xaxis.set_major_locator(FixedLocator(lengths))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(_plain)
    _plain_ticks(axes.yaxis, of_minor=True)
    axes.legend(loc="upper left")
    return _svg(figure, name, f"{label} over sequence length", "; ".join(told))


def heat_map(selection: dict[str, Any], name: str) -> str:
    """Which keys the rows of a packed batch chose; documents are blocks."""
    counts, cell = selection["counts"], selection["cell"]
    tokens = sum(selection["documents"])
    figure, axes = pyplot.subplots(figsize=(7.6, 6.4), layout="constrained")
    shown = [[count / cell**2 if count else float("nan") for count in row] for row in counts]
    extent = (0, tokens, tokens, 0)
    image = axes.imshow(shown, extent=extent, cmap="viridis", vmin=0, vmax=1, interpolation="none")
    bar = figure.colorbar(image, ax=axes, shrink=0.8)
    bar.set_label(f"share of the {cell} x {cell} pairs in a cell that are selected")
    begin = 0
    for number, length in enumerate(selection["documents"], 1):
        frame = pyplot.Rectangle((begin, begin), length, length, fill=False, edgecolor=INK)
        axes.add_patch(frame)
        on_the_right = begin + length < 0.6 * tokens  # both sides of a block are empty
        axes.annotate(
            f"document {number}",
            (begin + length if on_the_right else begin, begin + length / 2),
            xytext=(6 if on_the_right else -6, 0),
            textcoords="offset points",
            va="center",
            ha="left" if on_the_right else "right",
        )
        begin += length
    axes.grid(visible=False)
    axes.set(xlabel="key, row of the batch", ylabel="query, row of the batch")
    lengths = ", ".join(map(str, selection["documents"]))
    told = (
        f"Documents of {lengths} rows. Selected keys lie in the block of the query's own document,"
        " on or left of the diagonal, in passages that are like the query."
    )
    return _svg(figure, name, "Keys that every query selected", told)

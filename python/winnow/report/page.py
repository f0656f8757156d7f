# SPDX-License-Identifier: Apache-2.0
"""The page of a report: sections of tables and figures from the files that were given."""

import json
from collections import Counter
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from winnow.report import figures

_STYLE = """
:root { color-scheme: light dark; --page: #ffffff; --ink: #1c2024; --soft: #5c656e; --grid: #d9dee3;
  --first: #1f6fb2; --second: #b2541f; --third: #2e8540; --line: #c4ccd4; }
@media (prefers-color-scheme: dark) { :root { --page: #14171a; --ink: #e6e9ec; --soft: #a3adb6;
  --grid: #363d44; --first: #6cb2f0; --second: #f0a06c; --third: #7ccf8e; --line: #4a535b; } }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, "DejaVu Sans", sans-serif; }
main, header, nav { max-width: 46rem; margin: 0 auto; padding: 0 1rem; }
h1 { margin: 1.5rem 0 0.5rem; } h2 { margin: 2.5rem 0 0.5rem; }
nav ul { display: flex; flex-wrap: wrap; gap: 0.25rem 1.25rem; padding: 0; list-style: none; }
a { color: var(--first); }
a:focus-visible, .scroll:focus-visible { outline: 3px solid var(--first); }
.skip { position: absolute; left: -999rem; } .skip:focus { left: 1rem; top: 0.5rem; }
figure { margin: 1rem 0; }
figure svg { display: block; width: 100%; height: auto; color: var(--ink); }
figcaption, caption { color: var(--soft); font-size: 0.875rem; text-align: left;
  padding: 0.25rem 0; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-size: 0.875rem; }
th, td { padding: 0.2rem 0.75rem 0.2rem 0; border-bottom: 1px solid var(--line); text-align: left; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
"""


class Section(NamedTuple):
    name: str  # the anchor
    title: str
    body: str


class ReportError(ValueError):
    """A file that no report can be made of."""


def read(path: Path) -> dict[str, Any]:
    """The JSON of `winnow run`, of `winnow bench`, or of `measure`."""
    try:
        data = json.loads(path.read_text())
    except OSError as error:
        raise ReportError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise ReportError(f"{path} is not JSON: {error}") from None
    if not isinstance(data, dict) or not {"stages", "measured", "sweep"} & set(data):
        raise ReportError(
            f"{path}: must come from `winnow run --json`, `winnow bench --json` or `python -m"
            " winnow report --measure --keep`"
        )
    return data


class _Anchors:
    """Gives each section a name that no other has; those of its figure begin with it."""

    def __init__(self) -> None:
        self._count: Counter[str] = Counter()

    def __call__(self, name: str) -> str:
        self._count[name] += 1
        return name if self._count[name] == 1 else f"{name}-{self._count[name]}"


def _sections(files: list[dict[str, Any]]) -> list[Section]:
    runs = [data for data in files if "stages" in data]
    benches = [data for data in files if "measured" in data]
    measured = [data for data in files if "sweep" in data]
    anchor = _Anchors()
    sections = [
        *(_machine(data, anchor("machine")) for data in measured),
        _kernels(runs, benches),
        *(_step(data, anchor("step")) for data in runs),
        *_rooflines(benches, measured, anchor),
        *(section for data in measured for section in _over_length(data["sweep"], anchor)),
        *(_accuracy(data, anchor("accuracy")) for data in runs),
        *(_selection(data["selection"], anchor("selection")) for data in measured),
    ]
    return [section for section in sections if section.body]


def page(files: list[dict[str, Any]]) -> str:
    """The whole page. Of several files with the same contents all are shown."""
    try:
        sections = _sections(files)
    except (KeyError, TypeError) as error:
        raise ReportError(f"a file lacks what a report needs: {error}") from error
    links = "".join(f'<li><a href="#{s.name}">{escape(s.title)}</a></li>' for s in sections)
    bodies = "\n".join(
        f'<section aria-labelledby="{s.name}"><h2 id="{s.name}">{escape(s.title)}</h2>\n{s.body}'
        "</section>"
        for s in sections
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>winnow report</title>
<style>{_STYLE}</style>
</head>
<body>
<a class="skip" href="#content">Skip to the content</a>
<header><h1>winnow report</h1></header>
<nav aria-label="Sections"><ul>{links}</ul></nav>
<main id="content" tabindex="-1">
{bodies}
</main>
</body>
</html>
"""


def _table(caption: str, head: list[str], rows: list[list[Any]]) -> str:
    """Columns of numbers, or of numbers with a unit, are aligned to the right."""
    if not rows:
        return ""
    numeric = [all(_is_number(row[i]) for row in rows) for i in range(len(head))]

    def cells(tag: str, values: list[Any], more: str = "") -> str:
        classes = [' class="number"' if number else "" for number in numeric]
        return "".join(
            f"<{tag}{more}{c}>{escape(str(value))}</{tag}>"
            for value, c in zip(values, classes, strict=True)
        )

    body = "\n".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    heads = cells("th", head, ' scope="col"')
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(caption, True)}">'
        f"<table><caption>{escape(caption)}</caption><thead><tr>{heads}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>\n"
    )


def _is_number(value: Any) -> bool:
    return str(value)[:1].isdigit() or value in ("", "-")


def _figure(svg: str, caption: str) -> str:
    return f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>\n"


def _time(seconds: float) -> str:
    for unit, name in ((1, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= unit or name == "us":
            return f"{seconds / unit:.3g} {name}"
    raise AssertionError


def _bytes(count: float | None) -> str:
    if count is None:
        return "-"
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count:.0f} B"


def _gigaflops(data: dict[str, Any]) -> str:
    return f"{data['flops_per_second'] / 1e9:.3g}" if data.get("flops_per_second") else "-"


def _machine(data: dict[str, Any], name: str) -> Section:
    rows = [[what, value] for what, value in data["machine"].items()]
    return Section(name, "Machine and versions", _table("Where it ran", ["", ""], rows))


def _kernels(runs: list[dict[str, Any]], benches: list[dict[str, Any]]) -> Section:
    rows: list[list[str]] = []
    for data, calls in [(run, run["stages"]) for run in runs] + [
        (bench, bench["measured"]) for bench in benches
    ]:
        for call in calls:
            row = [call["call"], data["backend"], call["kernel"], data["runs_on"]]
            if row not in rows:
                rows.append(row)
    head = ["call", "backend", "kernel", "on"]
    return Section("kernels", "Kernels that ran", _table("Kernel of every call", head, rows))


def _step(data: dict[str, Any], name: str) -> Section:
    stages = data["stages"]
    if not stages:
        raise ReportError("the stages of a run are empty: there is no step to show")
    documents = ", ".join(map(str, data["documents"]))
    title = f"A training step, {data['case']}"
    total = sum(stage["seconds"] for stage in stages)
    caption = (
        f"{data['rows']} rows in packed documents of {documents}, {data['query_rows']} of them"
        f" queries; {_time(total)} in all on {data['backend']} ({data['runs_on']})."
    )
    rows = [
        [s["call"], _time(s["seconds"]), _gigaflops(s), _bytes(s["workspace_bytes"])]
        for s in stages
    ]
    memory = [
        [m["what"], _bytes(m["bytes"]), m["instead_of"], _bytes(m["dense_bytes"])]
        for m in data["memory"]
    ]
    return Section(
        name,
        title,
        _figure(figures.step_times(stages, name), caption)
        + _table("Calls of the step", ["call", "time", "GFLOP/s", "workspace"], rows)
        + _table("Memory", ["what", "bytes", "instead of", "dense bytes"], memory),
    )


def _tensor_bytes(call: dict[str, Any]) -> float | None:
    """The bytes of the tensors that a call reads and writes, each once; None if it has no FLOPs."""
    tokens, keys, slots = call["tokens"], call["keys"], call["tokens"] * call["topk"]
    q = 2 * tokens * call["heads"] * call["qk_dim"]
    out = 2 * tokens * call["heads"] * call["v_dim"]
    kv = 2 * keys * call["qk_dim"]
    index_q = 2 * tokens * call["index_heads"] * call["index_dim"]
    index_k = 2 * keys * call["index_dim"]
    by_call = {
        "sparse_attention_forward": q + kv + out + 4 * slots,
        "sparse_attention_backward": 2 * q + 3 * kv + 2 * out + 4 * slots,
        "index_topk_forward": index_q + index_k + 8 * slots,
        "index_topk_backward": 2 * index_q + 3 * index_k + 8 * slots,
        "index_target": q + kv + 8 * slots,
        "dense_index_loss_forward": q + kv + index_q + index_k,
        "dense_index_loss_backward": q + kv + 2 * index_q + 3 * index_k,
    }
    return by_call.get(call["call"])


def _rooflines(
    benches: list[dict[str, Any]], measured: list[dict[str, Any]], anchor: _Anchors
) -> Iterator[Section]:
    if not measured:
        return
    bandwidth = measured[0]["memory_bandwidth"]
    for bench in benches:
        product = bench["matrix_product"]
        points = []
        for call in bench["measured"]:
            size = _tensor_bytes(call)
            if size is None or call.get("dtype") != "bf16" or not call.get("flops"):
                continue
            intensity = call["flops"] / size
            roof = min(product["flops_per_second"], intensity * bandwidth["bytes_per_second"])
            points.append(call | {"intensity": intensity, "share": call["flops_per_second"] / roof})
        if not points:
            continue
        case = bench["measured"][0]["case"]
        caption = (
            f"Measured on this machine: {product['what']},"
            f" {product['flops_per_second'] / 1e9:.3g} GFLOP/s in the same run;"
            f" {bandwidth['what']},"
            f" {bandwidth['bytes_per_second'] / 1e9:.3g} GB/s read and written."
            " A kernel that multiplies bf16 may exceed a product in fp32 (sgemm)."
        )
        rows = [
            [
                p["call"],
                p["tokens"],
                p["keys"],
                _time(p["median_seconds"]),
                f"{p['fastest_seconds'] / p['median_seconds']:.2f} - "
                f"{p['slowest_seconds'] / p['median_seconds']:.2f}",
                _gigaflops(p),
                f"{p['share']:.2f}",
            ]
            for p in points
        ]
        head = [
            "call",
            "queries",
            "keys",
            "median",
            "fastest - slowest",
            "GFLOP/s",
            "of copy and product",
        ]
        name = anchor("roofline")
        svg = figures.roofline(
            points, product["flops_per_second"], bandwidth["bytes_per_second"], name
        )
        yield Section(
            name,
            f"Roofline, {case}, {bench['backend']}",
            _figure(svg, caption) + _table("Times and shares of copy and product", head, rows),
        )


def _over_length(sweep: dict[str, Any], anchor: _Anchors) -> Iterator[Section]:
    points = sweep["points"]
    about = (
        f"One layer, forward and backward, one document, bf16, {sweep['heads']} heads of"
        f" {sweep['dim']} channels. Sparse: indexer of {sweep['index_heads']} x"
        f" {sweep['index_dim']}, {sweep['topk']} keys a query, and its loss. Dense: the same"
        " kernels with all keys of the window selected."
    )
    rows = [
        [f"{p['tokens']:,}", p["kind"], _time(p["seconds"]), _bytes(p["peak_bytes"])]
        for p in points
    ]
    head = ["tokens", "attention", "time", "peak memory"]
    name = anchor("cost")
    time = figures.over_length(points, "seconds", 1e-3, "time, ms", name)
    yield Section(
        name,
        "Cost against sequence length",
        _figure(time, f"{about} Medians; the exponents are fitted to the points.")
        + _table("Measured points", head, rows),
    )
    if any(p["peak_bytes"] for p in points):
        name = anchor("memory")
        memory = figures.over_length(points, "peak_bytes", 1 << 20, "peak memory, MiB", name)
        caption = (
            "How much more memory there is at the most during the call than before it; the lists of"
            " indices count, which for dense have one slot for every key."
        )
        yield Section(name, "Memory against sequence length", _figure(memory, caption))


def _error(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"  # JSON has null for what is not finite


def _accuracy(data: dict[str, Any], name: str) -> Section:
    rows = [
        [e["what"], _error(e.get("max")), _error(e.get("rms")), _error(e.get("limit")), e["result"]]
        for e in data["errors"]
    ]
    caption = (
        f"Errors against the reference in double, {data['compared_query_rows']} of"
        f" {data['query_rows']} queries, sums over queries at {data['compared_keys']} keys"
    )
    head = ["result", "largest error", "rms", "limit", "within"]
    return Section(name, "Accuracy", _table(caption, head, rows))


def _selection(selection: dict[str, Any], name: str) -> Section:
    caption = (
        f"Each query selects at most {selection['topk']} keys of its own document. The inputs are"
        " made up: passages of 16 rows about one of eight topics."
    )
    return Section(
        name, "What the queries selected", _figure(figures.heat_map(selection, name), caption)
    )

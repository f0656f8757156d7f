# SPDX-License-Identifier: Apache-2.0
"""Measures the tables of docs/performance.md, and writes them from what was measured.

    python3 python/benchmarks/performance_tables.py measure FILE.json [--winnow PROGRAM]
    python3 python/benchmarks/performance_tables.py measure-cpu FILE.json [--winnow PROGRAM]
    python3 python/benchmarks/performance_tables.py write

`measure` runs every command behind the tables on this machine's GPU, about two minutes on an H200,
and writes commit, date, device and the times of each; it needs neither torch nor a compiler, and
`run.sh tables FILE.json` does it from a bundle of scripts/gpu_bundle.sh. `measure-cpu` runs the
list of `winnow bench` on this machine's CPU. `write` puts the tables of docs/performance/h200.json
and cpu-*.json, and of peers-*.json and eager-*.json, which against_peers.py and against_eager.py
write, between their markers in the page, and a summary of the races with peers into README.md;
without such a file its tables stay as they are.
"""

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from origin import ROOT, origin

README = ROOT / "README.md"
PAGE = ROOT / "docs" / "performance.md"
FIGURES = ROOT / "docs" / "performance" / "h200.json"
PEERS = ROOT / "docs" / "performance" / "peers-h200.json"
INDEX_PEERS = ROOT / "docs" / "performance" / "peers-index-h200.json"
CPU = {  # by table
    "cpu_avx2": ROOT / "docs" / "performance" / "cpu-avx2.json",
    "cpu_avx512": ROOT / "docs" / "performance" / "cpu-avx512.json",
}
EAGER = {
    "eager_avx2": ROOT / "docs" / "performance" / "eager-avx2.json",
    "eager_avx512": ROOT / "docs" / "performance" / "eager-avx512.json",
    "eager_avx512_without_bf16": ROOT / "docs" / "performance" / "eager-avx512-without-bf16.json",
}
KEPT = ("call", "kernel", "median_seconds", "fastest_seconds", "slowest_seconds", "repeats")


@dataclass(frozen=True)
class Table:
    name: str  # of the markers
    op: str  # empty: the options begin with one
    rows: dict[str, str]  # options of winnow bench by what they measure
    calls: str = ""  # a part of the names of the calls that it shows

    def command(self, options: str) -> str:
        tokens = "" if "--tokens" in options else " --tokens 4096"
        words = f"winnow bench {self.op} --backend cuda --repeat 9{tokens} {options}"
        return " ".join(words.split())


ATTENTION = {  # forward and backward
    "H 64, 576/512, K 2048, 4k keys": "--case glm-5.2 --keys 4096",
    "8k keys": "--case glm-5.2 --keys 8192",
    "32k keys": "--case glm-5.2 --keys 32768",
    "32k keys, neighbours": "--case glm-5.2 --keys 32768 --slots neighbours",
    "32k keys, shuffled": "--case glm-5.2 --keys 32768 --slots shuffled",
    "128k keys": "--case glm-5.2 --keys 131072",
    "128k keys, neighbours": "--case glm-5.2 --keys 131072 --slots neighbours",
    "H 128, 576/512, K 2048, 8k keys": "--case deepseek-v3.2 --keys 8192",
    "H 128, 32k keys": "--case deepseek-v3.2 --keys 32768",
    "H 64, 512, K 640, sink, 8k keys": "--case deepseek-v4-flash --keys 6554",
    "32k keys and pools": "--case deepseek-v4-flash --keys 26214",
    "H 128, 512, K 1152, sink, 8k keys": "--case deepseek-v4-pro --keys 6554",
    "H 128, 32k keys and pools": "--case deepseek-v4-pro --keys 26214",
    "H 16, 576/512, K 2048, 4k keys": "--case glm-5.2 --keys 4096 --heads 16",
    "H 8, 4k keys": "--case glm-5.2 --keys 4096 --heads 8",
    "H 32, 4k keys": "--case glm-5.2 --keys 4096 --heads 32",
    "H 16, 128/128": "--case glm-5.2 --keys 4096 --heads 16 --qk-dim 128 --v-dim 128",
    "H 64, 256/256": "--case glm-5.2 --keys 4096 --heads 64 --qk-dim 256 --v-dim 256",
}
DETERMINISTIC = {
    "deterministic, 8k keys": "--case glm-5.2 --keys 8192 --backward --deterministic",
    "deterministic, 32k keys": "--case glm-5.2 --keys 32768 --backward --deterministic",
    "deterministic, 128k keys, 1 GiB of workspace": "--case glm-5.2 --keys 131072 --backward "
    "--deterministic --limit 1024",
}
SELECTION = {  # bf16 and fp8
    "32 x 128, 4k keys": "--keys 4096 --forward",
    "without scores": "--keys 4096 --forward --without-scores",
    "32k keys": "--keys 32768 --forward",
    "128k keys": "--keys 131072 --forward",
    "64 x 128, 32k keys": "--keys 32768 --index-heads 64 --forward",
    "64 x 128, 128k keys": "--keys 131072 --index-heads 64 --forward",
    "32 x 128, 16k rows in 8 documents": "--tokens 16384 --keys 16384 --documents 8 --forward",
    "16k rows in 16 documents of 1024": "--tokens 16384 --keys 16384 --documents 16 "
    "--even-documents --forward",
}
GENERAL = "--keys 4096 --kernel general"
PATTERNS = ("smooth10", "smooth1000", "recency", "outliers", "ties")
TABLES = [
    Table("sparse_attention_forward", "sparse_attention", ATTENTION, "forward"),
    Table("sparse_attention_backward", "sparse_attention", ATTENTION | DETERMINISTIC, "backward"),
    Table(
        "value_projection",
        "value_projection",
        {
            "64 heads, 512 to 256": "--case glm-5.2",
            "16 heads": "--case glm-5.2 --heads 16",
            "8 heads": "--case glm-5.2 --heads 8",
            "128 heads, 512 to 128": "--case deepseek-v3.2",
        },
    ),
    Table("index_topk", "index_topk", SELECTION),
    Table(
        "index_topk_data",
        "index_topk",
        {pattern: f"--keys 32768 --data {pattern} --forward" for pattern in PATTERNS},
    ),
    Table(
        "index_topk_backward",
        "index_topk",
        {
            "32 x 128, K 2048, 8k keys": "--keys 8192 --backward",
            "32k keys": "--keys 32768 --backward",
            "32k keys, neighbours": "--keys 32768 --slots neighbours --backward",
            "8k keys, deterministic": "--keys 8192 --backward --deterministic",
        },
    ),
    Table(
        "index_target",
        "index_target",
        {
            "H 64, 576, K 2048, 8k keys": "--case glm-5.2 --keys 8192",
            "32k keys": "--case glm-5.2 --keys 32768",
            "H 128, 32k keys": "--case deepseek-v3.2 --keys 32768",
            "H 16, 32k keys": "--case glm-5.2 --keys 32768 --heads 16",
            "H 64, 512, K 640": "--case deepseek-v4-flash --keys 6554",
        },
    ),
    Table(
        "dense_index_loss",
        "dense_index_loss",
        {"8192 rows, H 64, 576, 32 index heads": "--case glm-5.2 --tokens 8192 --keys 8192"},
    ),
    Table(
        "general",
        "",
        {
            "H 64, 576/512, K 2048, 4k keys": f"sparse_attention --case glm-5.2 {GENERAL}",
            "H 16": f"sparse_attention --case glm-5.2 --heads 16 {GENERAL}",
            "H 128, 512, K 1152, sink": f"sparse_attention --case deepseek-v4-pro {GENERAL}",
            "32 x 128, K 2048, 4k keys": f"index_topk {GENERAL}",
            "64 heads, 512 to 256": f"value_projection {GENERAL}",
            "H 64, 576, K 2048": f"index_target {GENERAL}",
        },
    ),
]

# The races of README.md: work, against whom, their names without keys and data, and the keys.
SUMMARY = [
    (
        "indexer scores and exact top-k, 32 heads",
        "cuDNN's scores and top-k",
        "scores and top-k, bf16, 32 x 128",
        (32768, 131072),
    ),
    (
        "the same in fp8",
        "DeepGEMM's scores, cuDNN's top-k",
        "scores and top-k, fp8, 32 x 128",
        (32768, 131072),
    ),
    (
        "attention forward, 64 heads",
        "FlashMLA",
        "forward, H 64, 576/512, K 2048",
        (32768, 131072),
    ),
    ("the same with 128 heads", "FlashMLA", "forward, H 128, 576/512, K 2048", (32768,)),
    (
        "attention backward, 64 heads",
        "cuDNN",
        "backward, H 64, 576/512, K 2048",
        (8192, 32768, 131072),
    ),
    ("the same with 128 heads", "cuDNN", "backward, H 128, 576/512, K 2048", (8192,)),
]
# Its columns: what they show, and what the races of the indexer and of attention call that.
SUMMARY_DATA = {
    "smooth scores, selected lists": ("smooth", "selected"),
    "independent scores, random lists": ("independent", "random"),
}


# ---- Measuring.


def commands() -> list[str]:
    """Of all tables, each once."""
    listed = (table.command(options) for table in TABLES for options in table.rows.values())
    return list(dict.fromkeys(listed))


def short(value: float) -> float:
    return float(f"{value:.6g}")


def run(command: str, program: str) -> dict:
    done = subprocess.run([program, *command.split()[1:], "--json"], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(done.stderr.strip())
    bench = json.loads(done.stdout)
    measured = []
    for each in bench["measured"]:
        if "why_not" in each:
            raise RuntimeError(each["why_not"])
        figures = {name: each[name] for name in KEPT} | {"flops": each["flops"]}
        measured.append({k: short(v) if isinstance(v, float) else v for k, v in figures.items()})
    product = bench["matrix_product"] or {}  # null without cuBLAS
    return {
        "command": command,
        "runs_on": bench["runs_on"],
        "product_flops_per_second": short(product["flops_per_second"]),
        "measured": measured,
    }


def measure(file: Path, program: str) -> int:
    figures: dict = origin() | {"runs": []}
    start, failed, listed = time.monotonic(), 0, commands()
    for number, command in enumerate(listed, 1):
        try:
            figures["runs"].append(each := run(command, program))
            figures["device"] = figures["device"] or each["runs_on"]
        except (RuntimeError, KeyError) as error:
            failed += 1
            print(f"{command}: {error!r}", file=sys.stderr)
        file.write_text(json.dumps(figures, indent=1) + "\n")  # what there is, if this one is ended
        print(f"{number}/{len(listed)}  {time.monotonic() - start:.0f} s  {command}", flush=True)
    return 1 if failed else 0


def measure_cpu(file: Path, program: str) -> int:
    """The list of `winnow bench`, which needs no commands of its own."""
    command = [program, "bench", "--scaling", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        print(done.stderr.strip(), file=sys.stderr)
        return 1
    file.write_text(json.dumps(origin() | {"bench": json.loads(done.stdout)}, indent=1) + "\n")
    return 0


# ---- Writing.


def in_unit(*seconds: float) -> list[str]:
    """Three digits each, in the unit that fits the first."""
    units = ((0.9995, 1.0, "s"), (0.9995e-4, 1e3, "ms"), (0.0, 1e6, "us"))
    factor, unit = next((factor, unit) for least, factor, unit in units if seconds[0] >= least)
    values = [each * factor for each in seconds]
    digits = [f"{x:#.3g}".rstrip(".") if x < 999.5 else f"{x:.0f}" for x in values]
    return [f"{digits[0]} {unit}", *digits[1:]]


def teraflops(rate: float) -> str:
    return f"{rate * 1e-12:.0f}" if rate >= 99.5e12 else f"{rate * 1e-12:.3g}"


def line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |\n"


def head(names: list[str]) -> str:
    return line(names) + "|" + "---|" * len(names) + "\n"


def table_of(table: Table, figures: dict) -> str:
    runs = {each["command"]: each for each in figures["runs"]}
    shown: list[tuple[str, str, dict, float]] = []
    for shape, options in table.rows.items():
        if (found := runs.get(table.command(options))) is None:
            raise SystemExit(f"not measured: {table.command(options)}")
        for each in found["measured"]:
            if table.calls in each["call"]:
                shown.append((shape, options, each, found["product_flops_per_second"]))
    several = len({each["call"] for _, _, each, _ in shown}) > 1
    products = [product * 1e-12 for *_, product in shown]
    text = f"Commit {figures['commit']}, {figures['date']}, {figures['device']}; "
    text += f"G {min(products):.0f} to {max(products):.0f} TFLOP/s; "
    text += f"`{table.command('')}` and the options of the row.\n\n"
    text += head(
        ["shape", "options"]
        + ["call"] * several
        + ["kernel", "time", "fastest to slowest", "TFLOP/s", "of G"]
    )
    for shape, options, each, product in shown:
        median, fastest, slowest = in_unit(
            each["median_seconds"], each["fastest_seconds"], each["slowest_seconds"]
        )
        rate = each["flops"] / each["median_seconds"]
        text += line(
            [shape, f"`{options}`"]
            + [each["call"]] * several
            + [each["kernel"], median, f"{fastest} to {slowest}"]
            + [teraflops(rate), f"{rate / product:.3f}"]
        )
    return text


def cpu_table(figures: dict) -> str:
    bench = figures["bench"]
    product = bench["matrix_product"]
    rate = product["flops_per_second"] * 1e-9
    scaling = product["flops_per_second"] / product["one_thread_flops_per_second"]
    text = f"Commit {figures['commit']}, {figures['date']}, {bench['runs_on']}; "
    text += f"`winnow bench --scaling`; {product['what']}: {rate:.0f} GFLOP/s, "
    text += f"{scaling:.2f} times that of one thread.\n\n"
    text += head(
        ["call", "case", "queries x keys", "kernel", "time", "fastest to slowest"]
        + ["GFLOP/s", "of product", "scaling"]
    )
    for each in bench["measured"]:
        times = [each[f"{which}_seconds"] for which in ("median", "fastest", "slowest")]
        median, fastest, slowest = in_unit(*times)
        has_products = each.get("flops", 0) > 0
        text += line(
            [each["call"], each["case"], f"{each['tokens']} x {each['keys']}", each["kernel"]]
            + [median, f"{fastest} to {slowest}"]
            + ([f"{each['flops_per_second'] * 1e-9:.0f}"] if has_products else ["bytes alone"])
            + ([f"{each['of_matrix_product']:.2f}"] if has_products else ["bytes alone"])
            + [f"{each['scaling']:.2f}"]
        )
    return text


def peers_table(races: dict) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in races["versions"].items())
    text = f"Commit {races['commit']}, {races['date']}, {races['device']}; {versions}.\n\n"
    both = ["fastest to slowest", "peer", "its time", "fastest to slowest"]
    text += head(["work", "winnow", *both, "speed-up"])
    for race in races["results"]:
        for name in list(race["ms"])[1:]:
            cells = []
            for who in ("winnow", name):
                times = [race[each][who] * 1e-3 for each in ("ms", "fastest_ms", "slowest_ms")]
                median, fastest, slowest = in_unit(*times)
                cells += [median, f"{fastest} to {slowest}"]
            ours, theirs = race["ms"]["winnow"], race["ms"][name]
            text += line([race["race"], *cells[:2], name, *cells[2:], f"{theirs / ours:.2f}"])
    return text


def summary_table(races_of: dict[str, dict]) -> str:
    """How many times as fast as the fastest peer winnow is, by the files of races."""
    ratios = {race["race"]: race["ratio"] for file in races_of.values() for race in file["results"]}

    def ratio(race: str, data: tuple[str, ...]) -> str:
        for each in data:
            if f"{race}, {each}" in ratios:
                return f"{ratios[f'{race}, {each}']:.2f}"
        raise SystemExit(f"not raced: {race}, {' or '.join(data)}")

    text = head(["work", "keys", "against", *SUMMARY_DATA])
    for work, against, race, keys in SUMMARY:
        cells = [
            " / ".join(ratio(f"{race}, {each} keys", data) for each in keys)
            for data in SUMMARY_DATA.values()
        ]
        text += line([work, " / ".join(f"{each // 1024}k" for each in keys), against, *cells])
    origins = []
    for what, races in races_of.items():
        versions = ", ".join(f"{name} {version}" for name, version in races["versions"].items())
        origins.append(f"{what} at commit {races['commit']}, {races['date']}, with {versions}")
    return f"{text}\nTaken: {'; '.join(origins)}.\n"


def with_table(page: str, name: str, text: str) -> str:
    begin, end = f"<!-- table: {name} -->\n", "<!-- end of table -->"
    pattern = re.escape(begin) + ".*?" + re.escape(end)
    page, count = re.subn(pattern, lambda _: f"{begin}\n{text}\n{end}", page, flags=re.DOTALL)
    if count != 1:
        raise SystemExit(f"the page has {count} places for the table {name}")
    return page


def tables() -> Iterator[tuple[str, str]]:
    """Names and texts of the page's tables that were measured."""
    if FIGURES.exists():
        measured = json.loads(FIGURES.read_text())
        for table in TABLES:
            yield table.name, table_of(table, measured)
    for name, races in ({"peers": PEERS, "index_peers": INDEX_PEERS} | EAGER).items():
        if races.exists():
            yield name, peers_table(json.loads(races.read_text()))
    for name, figures in CPU.items():
        if figures.exists():
            yield name, cpu_table(json.loads(figures.read_text()))


def written(page: str) -> str:
    """The page with the tables of docs/performance."""
    for name, text in tables():
        page = with_table(page, name, text)
    return page


def written_readme(page: str) -> str:
    """README.md with the summary of the races."""
    if not (PEERS.exists() and INDEX_PEERS.exists()):
        return page
    races = {"the indexer": INDEX_PEERS, "attention": PEERS}
    summary = summary_table({what: json.loads(file.read_text()) for what, file in races.items()})
    return with_table(page, "races", summary)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands: Callable = parser.add_subparsers(dest="command", required=True).add_parser
    for name, build, what in (
        ("measure", "cuda", "run every command behind the CUDA tables, write FILE"),
        ("measure-cpu", "release", "run the list of `winnow bench` on the CPU, write FILE"),
    ):
        measuring = commands(name, help=what)
        measuring.add_argument("file", type=Path, metavar="FILE")
        measuring.add_argument("--winnow", default=f"build/{build}/winnow", metavar="PROGRAM")
    commands("write", help="write the tables of docs/performance.md and README.md")
    given = parser.parse_args()
    if given.command == "measure":
        return measure(given.file, given.winnow)
    if given.command == "measure-cpu":
        return measure_cpu(given.file, given.winnow)
    PAGE.write_text(written(PAGE.read_text()))
    README.write_text(written_readme(README.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())

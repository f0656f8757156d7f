# SPDX-License-Identifier: Apache-2.0
"""`python -m winnow report`: what is on the page, and how a browser lays it out."""

import errno
import html.parser
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

import winnow
from winnow import _lib
from winnow.__main__ import main
from winnow.report import measure, page

ROOT = Path(__file__).resolve().parents[2]
CHROMIUM = shutil.which("chromium")

CALL = {"kernel": "simd", "seconds": 0.25, "workspace_bytes": 4096}
RUN = {
    "backend": "cpu",
    "runs_on": "AVX2 on 2 threads",
    "case": "glm-5.2",
    "rows": 64,
    "documents": [40, 24],
    "query_rows": 64,
    "stages": [
        CALL | {"call": "index_topk_forward", "flops_per_second": 2e9},
        CALL | {"call": "index_loss"},
    ],
    "memory": [{"what": "workspace", "bytes": 2048.0, "instead_of": "scores", "dense_bytes": 9e9}],
    "compared_query_rows": 16,
    "compared_keys": 8,
    "errors": [{"what": "out", "result": "ok", "max": 1e-3, "rms": 5e-4, "limit": 4e-3}],
}
SIZES = {"tokens": 64, "keys": 128, "heads": 4, "qk_dim": 64, "v_dim": 64, "topk": 16}
SIZES |= {"index_heads": 2, "index_dim": 32, "dtype": "bf16", "case": "glm-5.2", "kernel": "simd"}
TIMES = {"median_seconds": 0.5, "fastest_seconds": 0.4, "slowest_seconds": 0.6}
BENCH = {
    "backend": "cpu",
    "runs_on": "AVX2 on 2 threads",
    "matrix_product": {"flops_per_second": 1e11, "what": "sgemm"},
    "measured": [
        SIZES | TIMES | {"call": call, "flops": 4e10, "flops_per_second": 8e10}
        for call in ("sparse_attention_forward", "index_topk_forward", "value_projection_forward")
    ],
}


@pytest.fixture(scope="module")
def measured():
    """Real measurements, of short sequences."""
    return measure.measure("cpu", (64, 128))


@pytest.fixture(scope="module")
def text(measured):
    return page.page([RUN, BENCH, measured])


class _Elements(html.parser.HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict]] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def all(self, tag: str) -> list[dict]:
        return [attributes for name, attributes in self.found if name == tag]


def test_the_page_has_every_section(text):
    titles = re.findall(r"<h2 id=\"\S+\">(.*?)</h2>", text)
    assert titles == [
        "Machine and versions",
        "Kernels that ran",
        "A training step, glm-5.2",
        "Roofline, glm-5.2, cpu",
        "Cost against sequence length",
        "Memory against sequence length",
        "Accuracy",
        "What the queries selected",
    ]
    assert "AVX2 on 2 threads" in text and "index_loss" in text


def test_elements_are_closed_and_named(text):
    elements = _Elements(text)
    assert not elements.open
    names = [a["id"] for _, a in elements.found if "id" in a]
    assert len(names) == len(set(names))
    for svg in elements.all("svg"):
        assert svg["role"] == "img" and set(svg["aria-labelledby"].split()) <= set(names)
    assert len(elements.all("svg")) == len(re.findall("<desc id", text)) == 5
    assert len(elements.all("table")) == len(elements.all("caption"))
    for link in elements.all("a"):
        assert link["href"].removeprefix("#") in names
    assert elements.all("html") == [{"lang": "en"}]


def test_shares_say_of_what(text):
    assert ">of copy and product</th>" in text
    (told,) = re.findall(r"<desc id=\"roofline-\S*>(.*?)</desc>", text)
    assert re.fullmatch(r"(\w+ [\d.]+ of copy and product(, |$))+", told)


def test_sections_of_one_kind_have_names_of_their_own(measured):
    """Whether their titles are the same or not."""
    other = RUN | {"case": "deepseek-v3.2"}
    text = page.page([RUN, other, RUN, BENCH, BENCH, measured, measured])
    elements = _Elements(text)
    names = [a["id"] for _, a in elements.found if "id" in a]
    assert len(names) == len(set(names))
    assert {"step", "step-2", "step-3", "accuracy-3", "roofline-2", "cost-2"} <= set(names)
    for svg in elements.all("svg"):
        assert set(svg["aria-labelledby"].split()) <= set(names)
    used = re.findall(r'url\(#([^)]+)\)|href="#([^"]+)"', text)
    assert used and {a or b for a, b in used} <= set(names)


def test_an_error_that_is_not_finite_is_a_dash():
    error = RUN["errors"][0] | {"max": None, "result": "failed"}
    assert '<td class="number">-</td>' in page.page([RUN | {"errors": [error]}])


def test_nothing_is_loaded_and_colours_are_the_page_s(text):
    elements = _Elements(text)
    assert not [tag for tag, _ in elements.found if tag in ("script", "link", "iframe")]
    for _, attributes in elements.found:
        for name in ("src", "xlink:href", "href"):
            assert attributes.get(name, "#").startswith(("#", "data:image/png;base64,"))
    drawn = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert "prefers-color-scheme: dark" in text
    for svg in drawn[:-1]:  # the last has the colours of its cells
        assert "currentColor" in svg and not re.search(r"(fill|stroke): #(?!f{6})", svg)


def test_exponents_are_those_of_the_points():
    assert measure.exponent([(n, 3 * n**1.5) for n in (2, 8, 50)]) == pytest.approx(1.5)


def test_a_selection_stays_in_its_document(measured):
    selection = measured["selection"]
    cell, begin = selection["cell"], 0
    for length in selection["documents"]:
        rows = range(begin // cell, (begin + length) // cell)
        for row in rows:
            chosen = [s for s, count in enumerate(selection["counts"][row]) if count]
            assert chosen and rows[0] <= chosen[0] and chosen[-1] <= row
        begin += length


def test_the_command_writes_a_page(tmp_path, capsys):
    for name, data in (("run", RUN), ("bench", BENCH)):
        (tmp_path / f"{name}.json").write_text(json.dumps(data))
    output = tmp_path / "report.html"
    files = [str(tmp_path / "run.json"), str(tmp_path / "bench.json")]
    assert main(["report", *files, "--output", str(output)]) == 0
    assert "A training step" in output.read_text()
    assert capsys.readouterr().out == f"wrote {output}\n"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot read"),
        ("{", "is not JSON"),
        ("[]", "must come from"),
        ('{"version": 1}', "must come from"),
        ('{"stages": [{}]}', "a file lacks what a report needs"),
        ('{"stages": []}', "the stages of a run are empty"),
    ],
)
def test_other_files_are_refused(tmp_path, capsys, content, said):
    file = tmp_path / "file.json"
    if content is not None:
        file.write_text(content)
    assert main(["report", str(file), "--output", str(tmp_path / "report.html")]) == 1
    assert said in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()


def test_a_failed_write_leaves_the_page_that_was_there(tmp_path, monkeypatch, capsys):
    (tmp_path / "run.json").write_text(json.dumps(RUN))
    output = tmp_path / "report.html"
    output.write_text("before")

    def refuse(*paths):
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "replace", refuse)
    assert main(["report", str(tmp_path / "run.json"), "--output", str(output)]) == 1
    assert capsys.readouterr().err == f"winnow: cannot write {output}: no space\n"
    assert output.read_text() == "before"
    assert {path.name for path in tmp_path.iterdir()} == {"run.json", "report.html"}


def test_a_failed_write_without_a_number_says_why(tmp_path, monkeypatch, capsys):
    (tmp_path / "run.json").write_text(json.dumps(RUN))
    output = tmp_path / "report.html"

    def refuse(*paths):
        raise OSError("the disk is gone")

    monkeypatch.setattr(os, "replace", refuse)
    assert main(["report", str(tmp_path / "run.json"), "--output", str(output)]) == 1
    assert capsys.readouterr().err == f"winnow: cannot write {output}: the disk is gone\n"


def test_a_folder_that_is_not_there_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(measure, "measure", lambda device: {})
    words = ["report", "--measure", "--keep", str(tmp_path / "none" / "kept.json")]
    assert main(words) == 1
    told = f"winnow: cannot write {tmp_path}/none/kept.json: No such file or directory\n"
    assert capsys.readouterr().err == told


@pytest.mark.skipif("cuda" in winnow.backends(), reason="the cuda backend is here")
def test_a_device_that_is_not_here_is_named(capsys):
    assert main(["report", "--measure", "--device", "cuda"]) == 1
    assert capsys.readouterr().err == f"winnow: {_lib.backend_why_not('cuda')}\n"


def test_links_and_devices_stay_what_they_are(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps(RUN))
    page_file, link = tmp_path / "page.html", tmp_path / "link.html"
    link.symlink_to(page_file)
    for output in (link, Path(os.devnull)):
        assert main(["report", str(tmp_path / "run.json"), "--output", str(output)]) == 0
    assert link.is_symlink() and "A training step" in page_file.read_text()
    assert Path(os.devnull).is_char_device()


def test_a_page_for_stdout_goes_where_stdout_goes(tmp_path, capfd):
    (tmp_path / "run.json").write_text(json.dumps(RUN))
    print("before")
    assert main(["report", str(tmp_path / "run.json"), "--output", "/dev/stdout"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0] == "before" and lines[-1] == "wrote /dev/stdout"
    assert "A training step" in "".join(lines[1:-1])


def test_an_error_of_measuring_is_not_blamed_on_a_file(tmp_path, monkeypatch):
    def fail(device):
        raise KeyError("of measuring")

    monkeypatch.setattr(measure, "measure", fail)
    with pytest.raises(KeyError, match="of measuring"):
        main(["report", "--measure", "--output", str(tmp_path / "report.html")])


# In the page as it is laid out: texts of a figure that touch each other, blocks that overlap, and
# what sticks out of the window.
_LAYOUT = """
<script>
const wrong = [];
const meet = (a, b) => a.left < b.right - 1 && b.left < a.right - 1
  && a.top < b.bottom - 1 && b.top < a.bottom - 1;
function compare(elements, what) {
  const boxes = elements.map(e => [e.textContent.trim().slice(0, 40), e.getBoundingClientRect()])
    .filter(([text, box]) => box.width > 0 && box.height > 0);
  boxes.forEach(([text, box], i) => boxes.slice(i + 1).forEach(([other, b]) => {
    if (meet(box, b)) wrong.push(`${what}: ${text} | ${other}`);
  }));
  return boxes.length;
}
let seen = 0;
for (const svg of document.querySelectorAll('svg')) {
  seen += compare([...svg.querySelectorAll('text')], svg.querySelector('title').textContent);
  const frame = svg.getBoundingClientRect();
  for (const text of svg.querySelectorAll('text')) {
    const box = text.getBoundingClientRect();
    if (box.left < frame.left - 1 || box.right > frame.right + 1)
      wrong.push(`cut off: ${text.textContent}`);
  }
}
seen += compare([...document.querySelectorAll('h1, h2, nav, .scroll, figure')], 'page');
if (document.documentElement.scrollWidth > innerWidth) wrong.push('wider than the window');
document.title = JSON.stringify({seen, wrong});
</script>
"""


def _chromium(*options: str) -> str:
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    ran = subprocess.run([*command, *options], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="`make test-report` installs chromium")
@pytest.mark.parametrize("width", [420, 900, 1400])
def test_nothing_overlaps_in_a_browser(text, tmp_path, width):
    file = tmp_path / "page.html"
    file.write_text(text.replace("</body>", _LAYOUT + "</body>"))
    dom = _chromium(f"--window-size={width},4000", "--dump-dom", file.as_uri())
    found = json.loads(re.search(r"<title>(\{.*?\})</title>", dom)[1].replace("&amp;", "&"))
    assert found["seen"] > 60 and not found["wrong"]


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="`make test-report` installs chromium")
def test_light_and_dark_are_readable(text, tmp_path):
    """Screenshots: the page's colour is light or dark, and the ink the opposite."""
    from PIL import Image

    file = tmp_path / "page.html"
    file.write_text(text)
    folder = ROOT / "build" / "report"
    folder.mkdir(parents=True, exist_ok=True)
    for scheme, number in (("light", 1), ("dark", 0)):
        shot = folder / f"{scheme}.png"
        _chromium(
            f"--blink-settings=preferredColorScheme={number}",
            "--window-size=900,5200",
            f"--screenshot={shot}",
            file.as_uri(),
        )
        grey = Image.open(shot).convert("L")
        (count, commonest), (darkest, brightest) = max(grey.getcolors()), grey.getextrema()
        assert count > 0.5 * grey.width * grey.height
        assert commonest > 240 if scheme == "light" else commonest < 40
        assert brightest - darkest > 180

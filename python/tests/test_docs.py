# SPDX-License-Identifier: Apache-2.0
"""Pages of docs: the list of refusals is whole, and what docs/your-layer.md says of DDP is so."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tomllib
import torch
from cases import offsets
from torch.nn.parallel import DistributedDataParallel

import winnow

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "troubleshooting.py"
MKDOCS = ROOT / ".venv-docs" / "bin" / "mkdocs"


def test_every_refusal_has_a_meaning_and_a_cure():
    told = subprocess.run([sys.executable, SCRIPT, "--check"], capture_output=True, text=True)
    assert told.returncode == 0, f"run scripts/troubleshooting.py\n{told.stderr}"


def test_a_refusal_without_a_cure_is_named():
    spec = importlib.util.spec_from_file_location("troubleshooting", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    header = (ROOT / "src" / "core" / "refusals.h").read_text()
    cures = tomllib.loads((ROOT / "docs" / "refusals.toml").read_text())
    assert len(script.sentences(header)) == header.count("inline constexpr char ")
    with pytest.raises(SystemExit, match="no entry for overlap"):
        script.tables(header, {name: cure for name, cure in cures.items() if name != "overlap"})
    with pytest.raises(SystemExit, match="no such sentence: softmax"):
        script.tables(header, cures | {"softmax": cures["overlap"]})


def test_links_between_pages_lead_somewhere():
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.relative_to(ROOT)}: {target}"


class _Indexer(torch.nn.Module):
    """A loss of its own for the rows of each rank, summed, and how many count."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.project = torch.nn.Linear(16, 16, bias=False)

    def forward(self, x):
        index_q = self.project(x).view(-1, 2, 8)
        weights = torch.ones(len(x), 2)
        packing = winnow.Packing(offsets([len(x)]))
        selection = winnow.index_topk(index_q, x[:, :8], weights, packing, topk=4)
        q, kv = x.view(-1, 1, 16), x
        lse = winnow.sparse_attention(q, kv, selection).lse
        options = {"scale": 0.25, "reduction": "sum", "with_count": True}
        return winnow.index_loss(selection, q, kv, lse, **options)


def _rows(rank: int) -> torch.Tensor:
    return torch.randn(7 + 12 * rank, 16, generator=torch.Generator().manual_seed(rank))


def _averaged(program: str) -> torch.Tensor:
    names: dict = {}
    exec(program, names)
    rank = torch.distributed.get_rank()
    model = DistributedDataParallel(_Indexer())
    names["mean_over_ranks"](*model(_rows(rank))).backward()
    return model.module.project.weight.grad


def test_gradients_that_ddp_averages_are_those_of_the_mean(two_ranks):
    """With the function of the page, on ranks with 7 and 19 rows."""
    page = (ROOT / "docs" / "your-layer.md").read_text()
    program = re.search(
        r"^import torch\nimport torch.dist.*?^    return total \*.*?\n", page, re.M | re.S
    )
    alone = _Indexer()
    (total, count), (other, more) = (alone(_rows(rank)) for rank in range(2))
    ((total + other) / (count + more)).backward()
    for gradient in two_ranks(_averaged, program[0]):
        torch.testing.assert_close(gradient, alone.project.weight.grad)


@pytest.mark.slow
@pytest.mark.skipif(not MKDOCS.exists(), reason="`make docs` installs MkDocs")
def test_the_site_is_searched_without_a_server(tmp_path):
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    command = [MKDOCS, "build", "--quiet", "--strict", "--site-dir", tmp_path]
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    pages = list(tmp_path.glob("**/*.html"))
    assert len(pages) > 15
    for page in pages:
        loaded = re.findall(
            r'<(?:script|link|img)[^>]+(?:src|href)="(https?:[^"]+)', page.read_text()
        )
        assert not loaded, page.name
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("`make test-report` installs chromium")
    command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += ["--virtual-time-budget=20000", f"{(tmp_path / 'index.html').as_uri()}?q=workspace"]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=300).stdout
    assert re.search(r"[1-9]\d* matching documents", dom)

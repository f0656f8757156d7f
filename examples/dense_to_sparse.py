# SPDX-License-Identifier: Apache-2.0
"""Makes a dense decoder sparse: dense training, warm-up of its indexer, sparse training.

    python examples/dense_to_sparse.py [--device cuda] [--width glm-5.2] [--plot sparse.png]

The text is made here. Every document has a language of its own, in which each symbol has one
successor; one symbol in eight is drawn at random instead. So to know what comes next, a row has to
find earlier places of its symbol. Shows how much of dense attention the selected keys have (recall
of mass), and what it costs to attend to them alone. docs/training-the-indexer.md explains it.
"""

import argparse
import sys
import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad
from torch.utils.checkpoint import checkpoint

import winnow


@dataclass(frozen=True)
class Width:
    """Sizes of the batch and of the layer."""

    documents: int  # per batch
    tokens: int  # per document
    symbols: int
    hidden: int
    heads: int
    qk_dim: int
    latent: int  # the first channels of a key, which are its value
    head_dim: int
    index_heads: int
    index_dim: int
    topk: int
    bf16: bool
    rate: float  # of learning


WIDTHS = {
    "toy": Width(8, 256, 24, 64, 4, 48, 32, 16, 4, 32, 32, False, 5e-3),
    "glm-5.2": Width(1, 8192, 512, 6144, 64, 576, 512, 256, 32, 128, 2048, True, 3e-4),
}
STEPS = {"dense": 250, "warm-up": 150, "sparse": 100}
ROWS = 512  # of dense attention at a time


class Batch:
    """Documents of one length; `targets` is the next symbol, or -100 (ignored) at the end."""

    def __init__(self, size: Width, generator: torch.Generator, device: str) -> None:
        shape = (size.documents, size.tokens)
        successors = torch.rand(size.documents, size.symbols, generator=generator).argsort(1)
        drawn = torch.randint(size.symbols, shape, generator=generator)
        jumps = torch.rand(shape, generator=generator) < 1 / 8
        text = [drawn[:, 0]]
        for t in range(1, size.tokens):
            follows = successors.gather(1, text[-1][:, None])[:, 0]
            text.append(torch.where(jumps[:, t], drawn[:, t], follows))
        symbols = torch.stack(text, 1).to(device)
        self.symbols = symbols.flatten()
        self.previous = pad(symbols[:, :-1], (1, 0), value=size.symbols).flatten()
        self.targets = pad(symbols[:, 1:], (0, 1), value=-100).flatten()
        cu_seqlens = torch.arange(size.documents + 1, dtype=torch.int32) * size.tokens
        self.packing = winnow.Packing(cu_seqlens.to(device), tokens=symbols.numel())
        # The rows that see more keys than a selection holds: others have all that they see.
        begin, end = self.packing.windows()
        self.choosing_rows = (end - begin > size.topk).nonzero()[:, 0]


class Attention(nn.Module):
    """Multi-query latent attention, whose values are a part of its keys, and its indexer."""

    def __init__(self, size: Width) -> None:
        super().__init__()
        self.size, self.scale = size, size.qk_dim**-0.5
        self.q = nn.Linear(size.hidden, size.heads * size.qk_dim, bias=False)
        self.kv = nn.Linear(size.hidden, size.qk_dim, bias=False)
        self.w_v = nn.Parameter(torch.randn(size.heads, size.head_dim, size.latent))
        self.out = nn.Linear(size.heads * size.head_dim, size.hidden, bias=False)
        self.index_q = nn.Linear(size.hidden, size.index_heads * size.index_dim, bias=False)
        self.index_k = nn.Linear(size.hidden, size.index_dim, bias=False)
        self.index_weights = nn.Linear(size.hidden, size.index_heads, bias=False)

    def indexer(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and weights of the indexer, whose loss does not reach the model."""
        size, x = self.size, x.detach()
        q = self.index_q(x).view(-1, size.index_heads, size.index_dim)
        weights = self.index_weights(x).float() * (size.index_heads * size.index_dim) ** -0.5
        return q, self.index_k(x), weights

    def dense_rows(self, q: Tensor, kv: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """Attention and its lse for rows of every document, from row `first` on."""
        s = torch.arange(kv.shape[1], device=kv.device)
        logits = self.scale * torch.einsum("bthd,bsd->bhts", q, kv).float()
        logits = logits.masked_fill(s > first + s[: q.shape[1], None], -torch.inf)
        lse = logits.logsumexp(-1)
        p = (logits - lse[..., None]).exp().to(kv.dtype)
        return torch.einsum("bhts,bsc->bthc", p, kv[..., : self.size.latent]), lse.transpose(1, 2)

    def dense(self, q: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
        """Dense attention in plain torch, some rows at a time, so that long documents fit."""
        size = self.size
        q = q.view(size.documents, size.tokens, size.heads, size.qk_dim)
        kv = kv.view(size.documents, size.tokens, size.qk_dim)
        parts = [
            checkpoint(self.dense_rows, q[:, first : first + ROWS], kv, first, use_reentrant=False)
            for first in range(0, size.tokens, ROWS)
        ]
        out, lse = (torch.cat(x, 1).flatten(0, 1) for x in zip(*parts, strict=True))
        return out, lse.contiguous()

    def forward(self, x: Tensor, batch: Batch, stage: str, measured: bool):
        """Returns the result, the loss of the indexer, and the recall of mass if measured."""
        size, packing, scale = self.size, batch.packing, self.scale
        q, kv = self.q(x).view(-1, size.heads, size.qk_dim), self.kv(x)
        loss, recall = x.new_zeros(()), None
        if stage == "sparse":
            selection = winnow.index_topk(*self.indexer(x), packing, topk=size.topk)
            out, lse, _ = winnow.sparse_attention(q, kv, selection, v_dim=size.latent, scale=scale)
            loss = winnow.index_loss(selection, q, kv, lse, scale=scale)
            if measured:  # there is no dense attention: a few rows get one
                rows = batch.choosing_rows
                rows = rows[torch.randint(len(rows), (64,), device=rows.device)]
                recall = winnow.metrics.on_rows(selection, q, kv, packing, rows, scale=scale).recall
        else:
            out, lse = self.dense(q, kv)
        if stage == "warm-up":
            indexer = self.indexer(x)
            loss = winnow.dense_index_loss(q, kv, *indexer, packing, scale=scale, lse=lse)
            if measured:
                selection = winnow.index_topk(*indexer, packing, topk=size.topk, with_scores=False)
                recall = winnow.metrics.recall_of_mass(selection, q, kv, lse, scale=scale)
                recall = recall[batch.choosing_rows]
        w_v = (self.w_v * size.latent**-0.5).to(out.dtype)
        return self.out(winnow.value_projection(out, w_v).flatten(1)), loss, recall


class Decoder(nn.Module):
    def __init__(self, size: Width) -> None:
        super().__init__()
        self.symbols = nn.Embedding(size.symbols, size.hidden)
        self.previous = nn.Embedding(size.symbols + 1, size.hidden)
        self.attention = Attention(size)
        wide = 4 * size.hidden
        self.feed_forward = nn.Sequential(
            nn.Linear(size.hidden, wide), nn.GELU(), nn.Linear(wide, size.hidden)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(size.hidden) for _ in range(3))
        self.head = nn.Linear(size.hidden, size.symbols)

    def trained_parameters(self, stage: str) -> list[nn.Parameter]:
        """Dense: the model; warm-up: the indexer; sparse: all. The others are frozen."""
        for name, parameter in self.named_parameters():
            of_indexer = ".index_" in name
            parameter.requires_grad_(stage == "sparse" or of_indexer == (stage == "warm-up"))
        return [parameter for parameter in self.parameters() if parameter.requires_grad]

    def forward(self, batch: Batch, stage: str, measured: bool = False):
        """Returns the loss of the text, that of the indexer, and the recall of mass."""
        x = self.symbols(batch.symbols) + self.previous(batch.previous)
        out, index_loss, recall = self.attention(self.norms[0](x), batch, stage, measured)
        x = x + out
        x = x + self.feed_forward(self.norms[1](x))
        loss = cross_entropy(self.head(self.norms[2](x)).float(), batch.targets)
        return loss, index_loss, None if recall is None else recall.mean().item()


def show_progress(stage: str, step: int, steps: int, text: str) -> None:
    done = 20 * (step + 1) // steps
    line = f"{stage:8}[{'#' * done}{'.' * (20 - done)}] {step + 1:4}/{steps}  {text}"
    print(f"\r{line}\033[K", end="\n" * (step + 1 == steps), file=sys.stderr, flush=True)


def terminal_plot(title: str, points: list[tuple[int, float]], height=8, width=72) -> None:
    low, high = min(y for _, y in points), max(y for _, y in points)
    first, last = points[0][0], points[-1][0]
    canvas = [[" "] * width for _ in range(height)]
    for x, y in points:
        line = round((high - y) / max(high - low, 1e-9) * (height - 1))
        canvas[line][(x - first) * (width - 1) // max(last - first, 1)] = "*"
    print(f"\n{title}, steps {first} to {last}, {low:.3f} to {high:.3f}")
    print("\n".join("|" + "".join(line).rstrip() for line in canvas))


def plot(curves: dict[str, list[tuple[int, float]]], steps: list[int], path: str) -> None:
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(3, 1, figsize=(8, 8), sharex=True, layout="tight")
    for panel, (name, points) in zip(panels, curves.items(), strict=True):
        panel.plot(*zip(*points, strict=True), linewidth=0.9)
        panel.set_ylabel(name)
        for end in (steps[0], steps[0] + steps[1]):
            panel.axvline(end, color="grey", linestyle=":")
    panels[0].set_title("dense training | warm-up of the indexer | sparse training")
    panels[-1].set(ylim=(0, 1), xlabel="step")
    figure.savefig(path, dpi=100)


def main(arguments: list[str] | None = None) -> dict[str, list[tuple[int, float]]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--width", choices=WIDTHS, default="toy")
    parser.add_argument("--steps", type=int, nargs=3, default=list(STEPS.values()), metavar="N")
    parser.add_argument("--plot", default="dense_to_sparse.png", help="where the picture goes")
    given = parser.parse_args(arguments)
    size, device = WIDTHS[given.width], given.device
    torch.manual_seed(1)
    model = Decoder(size).to(device)
    text = torch.Generator().manual_seed(2)
    held_out = Batch(size, torch.Generator().manual_seed(3), device)
    curves = {"loss of the text": [], "KL of the indexer": [], "recall of mass": []}
    with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=size.bf16):
        for stage, steps in zip(STEPS, given.steps, strict=True):
            optimizer = torch.optim.AdamW(model.trained_parameters(stage), lr=size.rate)
            start = time.perf_counter()
            for step in range(steps):
                measured = step % 5 == 0 or step == steps - 1
                loss, index_loss, recall = model(Batch(size, text, device), stage, measured)
                optimizer.zero_grad()
                (index_loss if stage == "warm-up" else loss + index_loss).backward()
                optimizer.step()
                values = (loss.item(), index_loss.item() or None, recall)
                at = len(curves["loss of the text"])
                for points, value in zip(curves.values(), values, strict=True):
                    points += [] if value is None else [(at, value)]
                latest = (f"{name} {x[-1][1]:.3f}" for name, x in curves.items() if x)
                show_progress(stage, step, steps, ", ".join(latest))
            with torch.no_grad():
                dense, sparse = (model(held_out, kind)[0].item() for kind in ("dense", "sparse"))
            print(f"{stage}: {time.perf_counter() - start:.0f} s, loss of held-out text", end=" ")
            print(f"{dense:.3f}, with {size.topk} keys of up to {size.tokens} {sparse:.3f}")
    for title, points in curves.items():
        terminal_plot(title, points)
    try:
        plot(curves, given.steps, given.plot)
    except ModuleNotFoundError:
        print("no picture: matplotlib is not installed")
    return curves


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Trains a two-layer decoder to copy: with winnow, and with dense attention in plain torch.

    python examples/train_tiny.py [--device cuda] [--steps 400] [--plot train_tiny.png]

A document is a random word, a separator, and the same word again; documents of different lengths
are packed into one batch. Both models start from the same weights and see the same batches. The
model with winnow attends to all keys during warm-up, while its indexers learn from attention which
keys matter, and then to at most 8 of up to 49. Prints losses and accuracies, and plots the losses
if matplotlib is installed.
"""

import argparse
import time

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import winnow

LETTERS, SEPARATOR = 16, 16
SHORTEST, LONGEST = 8, 24  # letters per word
DOCUMENTS = 16  # per batch
WIDTH, HEADS, LATENT, ROPE = 64, 4, 32, 16
SCALE = (LATENT + ROPE) ** -0.5
INDEX_HEADS, INDEX_DIM, TOPK = 4, 16, 8


class Batch:
    """Packed documents; `targets` is the next letter within the copy, else -100 (ignored)."""

    def __init__(self, generator: torch.Generator, device: str) -> None:
        letters, positions, targets, lengths = [], [], [], [0]
        for _ in range(DOCUMENTS):
            n = int(torch.randint(SHORTEST, LONGEST + 1, (), generator=generator))
            word = torch.randint(LETTERS, (n,), generator=generator)
            letters += [word, torch.tensor([SEPARATOR]), word]
            # Positions in the copy start at LONGEST for every word: its letter i is at
            # LONGEST + 1 + i.
            positions += [torch.arange(n), torch.arange(LONGEST, LONGEST + 1 + n)]
            targets += [torch.full((n,), -100), word, torch.tensor([-100])]
            lengths.append(2 * n + 1)
        self.letters, self.positions, self.targets = (
            torch.cat(x).to(device) for x in (letters, positions, targets)
        )
        cu_seqlens = torch.tensor(lengths).cumsum(0).int().to(device)
        self.packing = winnow.Packing(cu_seqlens, tokens=len(self.letters))


class Attention(nn.Module):
    """Multi-head latent attention with one shared key per token, and its lightning indexer."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, HEADS * (LATENT + ROPE), bias=False)
        self.kv = nn.Linear(WIDTH, LATENT + ROPE, bias=False)
        self.w_v = nn.Parameter(torch.randn(HEADS, WIDTH // HEADS, LATENT) * LATENT**-0.5)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.index_q = nn.Linear(WIDTH, INDEX_HEADS * INDEX_DIM, bias=False)
        self.index_k = nn.Linear(WIDTH, INDEX_DIM, bias=False)
        self.index_weights = nn.Linear(WIDTH, INDEX_HEADS, bias=False)

    def forward(self, x: Tensor, packing: winnow.Packing, topk: int | None):
        """Dense attention in plain torch if topk is None; then the index loss is 0."""
        q, kv = self.q(x).view(-1, HEADS, LATENT + ROPE), self.kv(x)
        if topk is None:
            out, index_loss = self.dense(q, kv, packing), x.new_zeros(())
        else:
            out, index_loss = self.sparse(x.detach(), q, kv, packing, topk)
        return self.out(out.flatten(1)), index_loss

    def dense(self, q: Tensor, kv: Tensor, packing: winnow.Packing) -> Tensor:
        begin, end = packing.windows()
        s = torch.arange(len(kv), device=kv.device)
        seen = (begin[:, None] <= s) & (s < end[:, None])
        logits = SCALE * torch.einsum("thd,sd->hts", q, kv)
        p = logits.masked_fill(~seen, -torch.inf).softmax(-1)
        out = torch.einsum("hts,sc->thc", p, kv[:, :LATENT])
        return torch.einsum("thc,hdc->thd", out, self.w_v)

    def sparse(self, x: Tensor, q: Tensor, kv: Tensor, packing: winnow.Packing, topk: int):
        index_q = self.index_q(x).view(-1, INDEX_HEADS, INDEX_DIM)
        weights = self.index_weights(x) * (INDEX_HEADS * INDEX_DIM) ** -0.5
        selection = winnow.index_topk(index_q, self.index_k(x), weights, packing, topk=topk)
        out, lse, _ = winnow.sparse_attention(q, kv, selection, v_dim=LATENT, scale=SCALE)
        index_loss = winnow.index_loss(selection, q, kv, lse, scale=SCALE)
        return winnow.value_projection(out, self.w_v), index_loss


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(LETTERS + 1, WIDTH)
        self.positions = nn.Embedding(2 * LONGEST + 1, WIDTH)
        self.attention = nn.ModuleList(Attention() for _ in range(2))
        self.feed_forward = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(2)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(5))
        self.head = nn.Linear(WIDTH, LETTERS)

    def forward(self, batch: Batch, topk: int | None) -> tuple[Tensor, Tensor]:
        """Returns the logits of every row and the summed loss of both indexers."""
        x = self.letters(batch.letters) + self.positions(batch.positions)
        index_loss = x.new_zeros(())
        for i in range(2):
            out, loss = self.attention[i](self.norms[2 * i](x), batch.packing, topk)
            x = x + out
            x = x + self.feed_forward[i](self.norms[2 * i + 1](x))
            index_loss = index_loss + loss
        return self.head(self.norms[4](x)), index_loss


def train(name: str, steps: int, device: str) -> dict[str, list[float]]:
    """Trains one model and returns its losses at every step."""
    torch.manual_seed(1)
    model = Decoder().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(2)
    losses: dict[str, list[float]] = {"letters": [], "indexers": []}
    start = time.perf_counter()
    for step in range(steps):
        all_keys = 2 * LONGEST + 1
        topk = None if name == "dense" else all_keys if step < steps // 4 else TOPK
        batch = Batch(generator, device)
        logits, index_loss = model(batch, topk)
        loss = cross_entropy(logits, batch.targets)
        optimizer.zero_grad()
        (loss + index_loss).backward()
        optimizer.step()
        losses["letters"].append(loss.item())
        losses["indexers"].append(index_loss.item())
        if step % max(steps // 8, 1) == 0 or step == steps - 1:
            known = batch.targets >= 0
            right = (logits.argmax(1) == batch.targets)[known].float().mean().item()
            print(
                f"{name:7} step {step:4}  loss {loss.item():.4f}  index loss "
                f"{index_loss.item():.4f}  copied {right:6.1%}  keys {topk or 'all'}"
            )
    print(f"{name:7} {time.perf_counter() - start:.1f} s")
    return losses


def plot(curves: dict[str, dict[str, list[float]]], path: str) -> None:
    from matplotlib import pyplot

    _, panels = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True)
    for panel, (name, losses) in zip(panels, curves.items(), strict=True):
        panel.plot(losses["letters"], label="next letter")
        if name == "winnow":
            panel.plot(losses["indexers"], label="indexers", linewidth=0.8)
            fewer_keys = {"label": f"{TOPK} keys from here", "color": "grey", "linestyle": ":"}
            panel.axvline(len(losses["letters"]) // 4, **fewer_keys)
        panel.set(title=f"{name} attention", xlabel="step", yscale="log")
        panel.legend()
    panels[0].set_ylabel("loss")
    pyplot.tight_layout()
    pyplot.savefig(path, dpi=120)
    print(f"plotted {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--plot", default="train_tiny.png", help="where the picture goes")
    given = parser.parse_args()
    if given.device == "cpu":
        torch.set_num_threads(1)  # matrices this small do not gain from more threads
    curves = {name: train(name, given.steps, given.device) for name in ("dense", "winnow")}
    try:
        plot(curves, given.plot)
    except ModuleNotFoundError:
        print("no plot: matplotlib is not installed")


if __name__ == "__main__":
    main()

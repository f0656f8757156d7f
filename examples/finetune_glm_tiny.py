# SPDX-License-Identifier: Apache-2.0
"""Trains a tiny GLM-5 of transformers on a text, with winnow's sparse attention.

    python examples/finetune_glm_tiny.py [--device cuda] [--steps 400] [--plot losses.png]

The model is a GlmMoeDsaForCausalLM over bytes with random weights: three layers, of which the
second uses the selection of the first, 32 of up to 256 keys a row. A batch is packed: pieces of the
text follow each other in a row, and their position ids say where they begin. Its indexers learn
from attention. Then it goes on with two words of the text, and the losses are plotted if matplotlib
is installed.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor
from tqdm import trange
from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

import winnow.transformers

TEXT = Path(__file__).with_suffix(".txt")
PIECES = (160, 256, 96)  # tokens of the documents of a batch


def tiny_model() -> GlmMoeDsaForCausalLM:
    config = GlmMoeDsaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        mlp_layer_types=["dense", "sparse", "dense"],
        indexer_types=["full", "shared", "full"],
        q_lora_rank=64,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        index_n_heads=8,
        index_head_dim=32,
        index_topk=32,
        pad_token_id=0,
        eos_token_id=None,
    )
    return GlmMoeDsaForCausalLM(config)


def packed(tokens: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """Random pieces of the text in one row. The first token of a piece is nobody's target."""
    pieces, positions, labels = [], [], []
    for length in PIECES:
        length = min(length, len(tokens))
        first = int(torch.randint(len(tokens) - length + 1, (), generator=generator))
        piece = tokens[first : first + length]
        pieces.append(piece)
        positions.append(torch.arange(length))
        labels.append(torch.cat([torch.tensor([-100]), piece[1:]]))
    parts = {"input_ids": pieces, "position_ids": positions, "labels": labels}
    return {name: torch.cat(part)[None] for name, part in parts.items()}


def train(
    model: GlmMoeDsaForCausalLM, tokens: Tensor, steps: int, device: str
) -> dict[str, list[float]]:
    """The losses of every step: of the text, and of the indexers."""
    winnow.transformers.enable(model.train(), train_indexer=True)
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses: dict[str, list[float]] = {"text": [], "indexers": []}
    for _ in (bar := trange(steps)):
        batch = {name: x.to(device) for name, x in packed(tokens, generator).items()}
        loss = model(**batch, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        of_indexers = sum(model.winnow_losses).item()
        losses["indexers"].append(of_indexers)
        losses["text"].append(loss.item() - of_indexers)
        bar.set_postfix({name: f"{values[-1]:.3f}" for name, values in losses.items()})
    return losses


def plot(losses: dict[str, list[float]], path: str) -> None:
    from matplotlib import pyplot

    for name, values in losses.items():
        pyplot.plot(values, label=name)
    pyplot.xlabel("step")
    pyplot.ylabel("loss")
    pyplot.legend()
    pyplot.savefig(path, dpi=120)
    print(f"plotted {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--text", type=Path, default=TEXT, help="a file to train on")
    parser.add_argument("--plot", default="losses.png", help="where the picture goes")
    given = parser.parse_args()
    torch.manual_seed(0)
    if given.device == "cpu":
        torch.set_num_threads(1)  # matrices this small do not gain from more threads
    model = tiny_model().to(given.device)
    losses = train(model, torch.tensor(list(given.text.read_bytes())), given.steps, given.device)
    prompt = torch.tensor([list(b"Alice was")], device=given.device)
    written = model.eval().generate(prompt, max_new_tokens=60, do_sample=False)
    print(bytes(written[0].tolist()).decode(errors="replace"))
    try:
        plot(losses, given.plot)
    except ModuleNotFoundError:
        print("no plot: matplotlib is not installed")


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Runs models of transformers and records what tests compare: selections, logits, gradients."""

import functools

import torch
from torch import Tensor, nn


def index_modules(model: nn.Module) -> list[nn.Module]:
    return [x for x in model.modules() if type(x).__name__.endswith("Indexer")]


class Selections:
    """Records what the indexers of a model select, layer by layer."""

    def __init__(self, model: nn.Module) -> None:
        self.layers: list[Tensor] = []
        self.hooks = [x.register_forward_hook(self._record) for x in index_modules(model)]

    def _record(self, module, inputs, output) -> None:
        self.layers.append(output)

    def __enter__(self):
        return self

    def __exit__(self, *error) -> None:
        for hook in self.hooks:
            hook.remove()

    def without_future(self) -> list[Tensor]:
        """Eager's lists contain keys that its mask hides where there are fewer than topk."""
        return [
            torch.where(indices > torch.arange(indices.shape[1])[:, None], -1, indices)
            for indices in self.layers
        ]


class Replay:
    """Makes the indexers of an enabled model return given selections."""

    def __init__(self, model: nn.Module, layers: list[Tensor]) -> None:
        self.selected = dict(zip(index_modules(model), layers, strict=True))

    def __enter__(self):
        self.forwards = [(x, x.__dict__["forward"]) for x in self.selected]
        for indexer, indices in self.selected.items():
            indexer.forward = functools.partial(lambda indices, *_, **__: indices, indices)

    def __exit__(self, *error) -> None:
        for indexer, forward in self.forwards:
            indexer.forward = forward


def gradients(model: nn.Module, ids: Tensor, **inputs) -> tuple[Tensor, dict[str, Tensor]]:
    """The logits, and the gradient of every parameter that has one."""
    model.zero_grad()
    out = model(ids, labels=ids, use_cache=False, **inputs)
    out.loss.backward()
    found = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    model.zero_grad()
    return out.logits.detach(), found


def relative(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def largest_error(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert actual.keys() == expected.keys()
    return max(relative(actual[name], expected[name]) for name in expected)


def state(model: nn.Module) -> dict:
    """Everything that enable may touch."""
    return {
        name: (module.__dict__.copy(), getattr(module, "config", None))
        for name, module in model.named_modules()
    }

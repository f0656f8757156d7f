# SPDX-License-Identifier: Apache-2.0
"""Hugging Face models with DeepSeek-style sparse attention, run and trained by winnow.

    import winnow.transformers

    winnow.transformers.enable(model)       # until winnow.transformers.disable(model)
    with winnow.transformers.enabled(model):
        model.generate(...)

The models of transformers compute the scores of all keys for every indexer head, a mask
[batch, 1, rows, keys], and keys and values for every attention head. Enabled, they select by
index_topk and attend to the latents of the selected keys, in forward, backward and generation.
docs/transformers.md lists families and versions, and what runs as in eager attention.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

import transformers
from packaging.version import Version
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

from winnow.transformers.attention import attention
from winnow.transformers.families import FAMILIES, Replace
from winnow.transformers.rows import padding_mask
from winnow.transformers.teaching import Teaching

__all__ = ["disable", "enable", "enabled"]

_OLDEST = "5.18"
_PATCHES = "_winnow_patches"

# Here, since an enabled model that pickle has loaded is not enabled again.
AttentionInterface.register("winnow", attention)
AttentionMaskInterface.register("winnow", padding_mask)


class _Absent:
    """What an attribute was that did not exist. A class, which copies of a model share."""


def enable(model: nn.Module, *, train_indexer: bool = False) -> nn.Module:
    """Makes a model of transformers run sparse, in place, and returns it.

    Enabling an enabled model changes nothing. Parameters, buffers, the state dict and the plans for
    parallel execution stay as they are.

    Args:
        model: a model of one of the supported families, or a module that contains one (an adapter
            of PEFT, a compiled or a wrapped model).
        train_indexer: after every forward of `model` with gradients, model.winnow_losses has the
            index_loss of every indexing layer, with the attention of all layers that use its
            selection as the target, and the output's loss contains their sum. Gradients reach the
            indexers alone. Without it no indexer is trained, as in transformers.
    """
    _check_version()
    if _PATCHES in model.__dict__:
        if train_indexer and not hasattr(model, "winnow_losses"):
            raise ValueError(
                "enable: train_indexer True: the model was enabled without it: disable it first"
            )
        return model
    found = [(module, replace) for module in model.modules() if (replace := _replace_of(module))]
    if not found:
        raise ValueError(
            f"enable: model is a {type(model).__name__}: must have layers of"
            f" {', '.join(sorted(FAMILIES))}"
        )
    patches: list[tuple[Any, str, Any]] = []
    configs = {}
    for module, replace in found:
        for part, name, function in replace(module):
            place = _place(part, name)
            patches.append((part, name, part.__dict__.get(place, _Absent)))
            # Not a MethodType, which pickle takes for the class's method of that name.
            setattr(part, place, partial(function, part))
        configs[id(module.config)] = module.config
    if train_indexer:
        patches += _teach(model, [part for part, *_ in patches])
    for config in configs.values():
        patches.append((config, "_attn_implementation", config._attn_implementation))
        config._attn_implementation = "winnow"
    model.__dict__[_PATCHES] = patches
    return model


def disable(model: nn.Module) -> nn.Module:
    """Makes an enabled model run as it did before, in place, and returns it."""
    for part, name, previous in model.__dict__.pop(_PATCHES, ()):
        if isinstance(part, dict):  # of hooks
            del part[name]
            continue
        place = _place(part, name)
        if previous is not _Absent:
            setattr(part, place, previous)
        elif place == name:
            delattr(part, name)
        else:  # wrapped while enabled
            setattr(part, place, MethodType(getattr(type(part), name), part))
    return model


@contextmanager
def enabled(model: nn.Module, *, train_indexer: bool = False) -> Iterator[nn.Module]:
    """`enable` for the time of a with block; a model that was enabled before stays so."""
    was_enabled = _PATCHES in model.__dict__
    try:
        yield enable(model, train_indexer=train_indexer)
    finally:
        if not was_enabled:
            disable(model)


def _teach(model: nn.Module, parts: list[nn.Module]) -> list[tuple[Any, Any, Any]]:
    """Makes the parts of a model share a Teaching that runs with its forward; what to undo."""
    teaching = Teaching()
    for part in set(parts):
        part.winnow_teaching = teaching
    before = model.register_forward_pre_hook(teaching.begin)
    after = model.register_forward_hook(teaching.end)
    model.winnow_losses = []
    return [
        *((part, "winnow_teaching", _Absent) for part in set(parts)),
        (model._forward_pre_hooks, before.id, _Absent),
        (model._forward_hooks, after.id, _Absent),
        (model, "winnow_losses", _Absent),
    ]


def _place(part: Any, name: str) -> str:
    """Where the method of that name stands: Accelerate, with which a device_map loads, keeps the
    forward of a module elsewhere and wraps it, to move tensors and to bring weights."""
    wrapped = name == "forward" and "_old_forward" in part.__dict__
    return "_old_forward" if wrapped else name


def _check_version() -> None:
    if Version(transformers.__version__) < Version(_OLDEST):
        raise ImportError(
            f"enable: transformers {transformers.__version__}: must be {_OLDEST} or newer; older"
            " ones cache keys and values of every head"
        )


def _replace_of(module: nn.Module) -> Replace | None:
    """What a module of a supported family gets replaced; None for other modules."""
    for cls in type(module).__mro__:
        package, _, file = cls.__module__.rpartition(".")
        classes = FAMILIES.get(package.removeprefix("transformers.models."), {})
        if file.startswith("modeling_") and cls.__name__ in classes:
            return classes[cls.__name__]
    return None

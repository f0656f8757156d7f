# SPDX-License-Identifier: Apache-2.0
"""enable(model, train_indexer=True): the losses of indexers against eager's attention."""

import copy
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers", minversion="5.22")
from model_runs import gradients, index_modules, largest_error, state  # noqa: E402
from tiny_models import made, token_ids  # noqa: E402

import winnow.transformers  # noqa: E402
from winnow.transformers import deepseek_v4, glm5_next, indexers  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
TOKENS = 38


def all_slots(attention: Tensor) -> Tensor:
    return attention


def pools(attention: Tensor) -> Tensor:
    """Of DeepSeek-V4, behind the rows; winnow has one more slot, whose pool is incomplete."""
    return nn.functional.pad(attention[..., TOKENS:], (0, 1))


def sums_of_pools(attention: Tensor) -> Tensor:
    """Of GLM-5.3, whose pools are tokens of attention."""
    return attention[..., : TOKENS // 4 * 4].unflatten(-1, (-1, 4)).sum(-1)


# By family: attention to the indexer's slots, and the layers that use each selection.
CASES = {
    "deepseek_v32": (all_slots, [[0], [1], [2]]),
    "glm_moe_dsa": (all_slots, [[0, 1], [2]]),
    "deepseek_v4": (pools, [[2]]),
    "glm5_next": (sums_of_pools, [[1, 2]]),
}


@pytest.fixture(params=CASES)
def case(request) -> tuple[nn.Module, object, list[list[int]]]:
    return made(request.param), *CASES[request.param]


def ids() -> Tensor:
    return token_ids(2, TOKENS)


def eager_attention(model: nn.Module) -> dict[int, Tensor]:
    """By layer: attention [batch, rows, keys], summed over heads."""
    found, hooks = {}, []
    for module in model.modules():
        if hasattr(module, "o_proj") or hasattr(module, "o_b_proj"):

            def record(module, inputs, output):
                if isinstance(output, tuple):  # not of linear attention
                    found[module.layer_idx] = output[1].double().sum(1)

            hooks.append(module.register_forward_hook(record))
    with torch.no_grad():
        model(ids(), use_cache=False)
    for hook in hooks:
        hook.remove()
    return found


def expected_loss(inputs, selected: Tensor, attention: Tensor) -> Tensor:
    """KL(attention || softmax of scores) over the selected slots, mean over rows that count."""
    q, k, weights = (x.detach().double() for x in inputs)
    scores = torch.einsum("bshd,btd->bsht", q, k).relu()
    scores = torch.einsum("bsht,bsh->bst", scores, weights)
    chosen = torch.zeros(*scores.shape[:2], scores.shape[2] + 1, dtype=torch.bool)
    chosen.scatter_(-1, torch.where(selected < 0, scores.shape[2], selected).long(), True)
    chosen = chosen[..., :-1]
    target = attention.masked_fill(~chosen, 0)
    log_q = scores.masked_fill(~chosen, -torch.inf).log_softmax(-1)
    p = target / target.sum(-1, keepdim=True)
    terms = torch.where(p > 0, p * (p.log() - log_q), 0.0)
    return terms.sum(-1)[chosen.sum(-1) >= 2].mean()


def test_losses_are_those_of_eagers_attention(case, monkeypatch):
    model, slots, users = case
    seen, own = [], indexers.topk_slots

    def record(indexer, inputs, *others):
        selected = own(indexer, inputs, *others)
        seen.append((inputs, selected))
        return selected

    for module in (indexers, deepseek_v4, glm5_next):
        monkeypatch.setattr(module, "topk_slots", record)
    found = eager_attention(model)
    with winnow.transformers.enabled(model, train_indexer=True):
        model(ids(), use_cache=False)
        losses = model.winnow_losses
    assert len(losses) == len(seen) == len(users)
    for loss, (inputs, selected), layers in zip(losses, seen, users, strict=True):
        target = slots(sum(found[layer] for layer in layers))
        expected = expected_loss(inputs, selected, target)
        assert abs(loss.item() - expected.item()) < 1e-4 * max(1, abs(expected.item()))


def test_attention_that_runs_as_eager_teaches_too(case, monkeypatch):
    model, *_ = case
    with winnow.transformers.enabled(model, train_indexer=True):
        model(ids(), use_cache=False)
        expected = model.winnow_losses
        for name in ("attention", "deepseek_v4"):
            path = f"winnow.transformers.{name}"
            monkeypatch.setattr(sys.modules[path], "why_eager", lambda *_: "of this test")
        model(ids(), use_cache=False)
        for loss, other in zip(model.winnow_losses, expected, strict=True):
            assert other > 0 and abs(loss / other - 1) < 1e-4


def test_attention_with_dropout_does_not_teach(case, told):
    model, _, users = case
    model = copy.deepcopy(model).train()
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.5
    with winnow.transformers.enabled(model, train_indexer=True):
        with pytest.warns(UserWarning, match="attention_dropout 0.5: layers with dropout teach no"):
            model(ids(), use_cache=False)
        assert model.winnow_losses == [0] * len(users)
        model.eval()
        model(ids(), use_cache=False)
        assert all(loss > 0 for loss in model.winnow_losses)


def test_gradients_reach_the_indexers_alone(case):
    model, *_ = case
    with winnow.transformers.enabled(model.train()):
        _, expected = gradients(model, ids())
    with winnow.transformers.enabled(model, train_indexer=True):
        _, found = gradients(model, ids())
        model.gradient_checkpointing_enable()
        _, recomputed = gradients(model, ids())
        model.gradient_checkpointing_disable()
    model.eval()
    of_indexers = {name for name in found if ".indexer." in name}
    assert of_indexers and all(found[name].abs().sum() > 0 for name in of_indexers)
    others = {name: x for name, x in found.items() if name not in of_indexers}
    assert largest_error(others, expected) < 1e-5
    assert largest_error(recomputed, found) < 1e-5


def test_the_outputs_loss_has_the_sum(case):
    model, *_ = case
    with winnow.transformers.enabled(model):
        plain = model(ids(), labels=ids()).loss
        assert not hasattr(model, "winnow_losses")
    with winnow.transformers.enabled(model, train_indexer=True):
        loss = model(ids(), labels=ids()).loss
        assert torch.allclose(loss, plain + sum(model.winnow_losses), rtol=1e-5)
        with torch.no_grad():
            assert torch.equal(model(ids(), labels=ids()).loss, plain)
            assert model.winnow_losses == []


def test_padding_does_not_count():
    model, mask = made("deepseek_v32"), torch.ones(2, TOKENS, dtype=torch.long)
    mask[0, -7:] = 0
    with winnow.transformers.enabled(model, train_indexer=True):
        model(ids(), attention_mask=mask)
        first = model.winnow_losses[0].item()
        changed = ids()
        changed[0, -7:] = 5
        model(changed, attention_mask=mask)
        assert model.winnow_losses[0].item() == first


def test_disable_restores_everything(case):
    model, *_ = case
    before = state(model)
    winnow.transformers.enable(model, train_indexer=True)
    winnow.transformers.disable(model)
    assert state(model) == before


def test_a_model_enabled_without_training_is_not_trained_silently():
    model = made("deepseek_v32")
    with winnow.transformers.enabled(model):
        with pytest.raises(ValueError, match="train_indexer True: the model was enabled without"):
            winnow.transformers.enable(model, train_indexer=True)


def test_reentrant_checkpointing_says_that_nothing_is_trained():
    model = copy.deepcopy(made("deepseek_v32")).train()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    with winnow.transformers.enabled(model, train_indexer=True):
        with pytest.warns(UserWarning, match="use_reentrant=False"):
            model(ids())
    assert model.__dict__.get("winnow_losses") is None


def test_a_layer_alone_is_disabled_again():
    model = copy.deepcopy(made("deepseek_v32"))
    layer = model.model.layers[0].self_attn
    layer.config._attn_implementation = None
    winnow.transformers.disable(winnow.transformers.enable(layer))
    assert layer.config._attn_implementation is None


def test_an_indexer_learns():
    model = copy.deepcopy(made("deepseek_v32"))
    winnow.transformers.enable(model, train_indexer=True)
    parameters = [x for indexer in index_modules(model) for x in indexer.parameters()]
    optimizer, losses = torch.optim.Adam(parameters, lr=3e-3), []
    for _ in range(6):
        model(ids(), use_cache=False)
        loss = torch.stack(model.winnow_losses).sum()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.9 * losses[0]


def test_the_example_learns_a_text():
    example = runpy.run_path(str(ROOT / "examples" / "finetune_glm_tiny.py"))
    text = torch.tensor(list(example["TEXT"].read_bytes()))
    torch.manual_seed(0)
    losses = example["train"](example["tiny_model"](), text, 25, "cpu")
    assert losses["text"][0] > 5 and losses["text"][-1] < 3.5
    assert losses["indexers"][-1] < max(losses["indexers"])


def test_programs_in_the_documentation_run():
    page = (ROOT / "docs" / "transformers.md").read_text()
    programs = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    assert programs
    for program in programs:
        exec(compile(program, "transformers.md", "exec"), {})


def test_a_model_can_be_copied_after_a_step():
    model = made("glm_moe_dsa")
    with winnow.transformers.enabled(model, train_indexer=True):
        model(ids(), use_cache=False)
        other = copy.deepcopy(model)
        assert all(loss.requires_grad for loss in model.winnow_losses)
        assert [x.item() for x in other.winnow_losses] == [x.item() for x in model.winnow_losses]
        assert not any(loss.requires_grad for loss in other.winnow_losses)

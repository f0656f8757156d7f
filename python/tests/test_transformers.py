# SPDX-License-Identifier: Apache-2.0
"""winnow.transformers against the models' own eager attention, on tiny models of every family."""

import copy
import subprocess
import sys

import pytest
import torch
from cases import bf16, f32, f64
from torch import Tensor, nn

transformers = pytest.importorskip("transformers", minversion="5.22")
from model_runs import (  # noqa: E402
    Replay,
    Selections,
    gradients,
    largest_error,
    relative,
    state,
)
from tiny_models import (  # noqa: E402
    FAMILIES,
    TOKENS,
    TOPK,
    fresh,
    made,
    padded,
    token_ids,
)
from transformers import DeepseekV32ForCausalLM, LlamaConfig, LlamaForCausalLM  # noqa: E402

import winnow.transformers  # noqa: E402
from winnow.transformers import indexers, latent  # noqa: E402

LOGIT_LIMIT = {f32: 1e-4, bf16: 2e-2}


# Those with tests of their own have other pools and caches.
@pytest.fixture(params=sorted(set(FAMILIES) - {"deepseek_v4", "glm5_next"}))
def family(request) -> str:
    return request.param


@pytest.fixture
def model(family) -> nn.Module:
    """A tiny model in fp32; tests leave it as they found it."""
    return made(family)


def test_logits_and_gradients_are_those_of_eager(model):
    ids = token_ids()
    with Selections(model) as selections:
        logits, expected = gradients(model, ids)
    with winnow.transformers.enabled(model), Replay(model, selections.without_future()):
        actual, found = gradients(model, ids)
    assert (actual - logits).abs().max() < LOGIT_LIMIT[f32]
    assert largest_error(found, expected) < 1e-3
    assert any("kv_b_proj" in name for name in found)
    assert not any("indexer" in name for name in found)


def test_chunks_of_rows_change_nothing(monkeypatch):
    model, ids = made("glm_moe_dsa"), token_ids()
    with winnow.transformers.enabled(model, train_indexer=True):
        logits, expected = gradients(model, ids)
        losses = model.winnow_losses
        row_bytes = 2 * (256 + 2 * 512) * 4
        monkeypatch.setattr(latent, "_CHUNK_BYTES", 7 * row_bytes)
        assert len(list(latent._chunks(torch.empty(2, 40, 2, 256), torch.empty(2, 1, 512)))) == 12
        actual, found = gradients(model, ids)
        assert [x.item() for x in model.winnow_losses] == [x.item() for x in losses]
    assert (actual - logits).abs().max() < 1e-6
    assert largest_error(found, expected) < 1e-5


def test_bf16_logits_are_those_of_eager(family):
    model, ids = copy.deepcopy(made(family, with_experts=False)).to(bf16), token_ids()
    with torch.no_grad():
        with Selections(model) as selections:
            logits = model(ids, use_cache=False).logits
        with winnow.transformers.enabled(model), Replay(model, selections.without_future()):
            actual = model(ids, use_cache=False).logits
    assert relative(actual, logits) < LOGIT_LIMIT[bf16]


def test_selections_agree_where_the_boundary_is_clear(model, monkeypatch):
    ids, seen = token_ids(), []

    def select(indexer, inputs, *others):
        seen.append(inputs)
        return selected(indexer, inputs, *others)

    selected = indexers.select
    monkeypatch.setattr(indexers, "select", select)
    with torch.no_grad(), Selections(model) as selections:
        model(ids, use_cache=False)
        with winnow.transformers.enabled(model):
            model(ids, use_cache=False)
    q, k, weights = (x.double() for x in seen[0])
    scores = torch.einsum("bshd,btd->bsht", q, k).relu()
    scores = torch.einsum("bsht,bsh->bst", scores, weights)
    future = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    ranked = scores.masked_fill(future, -torch.inf).sort(-1, descending=True).values
    gap = ranked[..., TOPK - 1] - ranked[..., TOPK]
    clear = torch.nan_to_num(gap, nan=torch.inf) > 1e-5 * scores.abs().amax()
    eager, ours = selections.layers[0], selections.layers[len(seen)]
    rows = torch.arange(TOKENS)[:, None]
    eager = torch.where(eager > rows, -1, eager).sort(-1, descending=True).values
    ours = ours.sort(-1, descending=True).values
    assert clear[:, TOPK:].float().mean() > 0.9
    assert (eager == ours).all(-1)[clear].all()


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("positions", ["counted", "slots"])
def test_padding_changes_no_real_row(model, side, positions):
    ids, mask = token_ids(), padded(side)
    given = {"attention_mask": mask}
    if positions == "counted":  # as generate makes them
        given["position_ids"] = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)
    with torch.no_grad():
        expected = model(ids, **given).logits
        with winnow.transformers.enabled(model):
            actual = model(ids, **given).logits
    assert (actual - expected)[mask.bool()].abs().max() < LOGIT_LIMIT[f32]


def test_padding_inside_a_document_is_never_selected(model):
    ids, mask = token_ids(), torch.ones(2, TOKENS, dtype=torch.long)
    mask[:, 10:20] = 0
    positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)
    with torch.no_grad():
        expected = model(ids, attention_mask=mask, position_ids=positions).logits
        with winnow.transformers.enabled(model), Selections(model) as selections:
            actual = model(ids, attention_mask=mask, position_ids=positions).logits
    assert (actual - expected)[mask.bool()].abs().max() < LOGIT_LIMIT[f32]
    for indices in selections.layers:
        assert not ((indices >= 10) & (indices < 20))[mask.bool()].any()


@pytest.mark.parametrize("use_cache", [False, True])
def test_packed_documents_are_those_alone(model, use_cache):
    lengths = [13, 20, 7]
    ids = token_ids(batch=1)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    with torch.no_grad(), winnow.transformers.enabled(model):
        with Selections(model) as packed:
            together = model(ids, position_ids=positions, use_cache=use_cache).logits
        first = 0
        for length in lengths:
            rows = slice(first, first + length)
            with Selections(model) as alone:
                logits = model(ids[:, rows], use_cache=False).logits
            for own, all_rows in zip(alone.layers, packed.layers, strict=True):
                assert torch.equal(torch.where(own < 0, own, own + first), all_rows[:, rows])
            assert (logits - together[:, rows]).abs().max() < LOGIT_LIMIT[f32]
            first += length


def generated(model: nn.Module, tokens: int, **options) -> Tensor:
    """Greedy, without the padding token: its embedding is 0, and so all of its scores tie."""
    options |= {"attention_mask": padded("left"), "do_sample": False, "suppress_tokens": [0]}
    return model.generate(token_ids(), max_new_tokens=tokens, **options)


def test_generation_is_that_of_eager(model):
    expected = generated(model, 8)
    with winnow.transformers.enabled(model):
        assert torch.equal(generated(model, 8), expected)
        static = {"cache_implementation": "static", "disable_compile": True}
        assert torch.equal(generated(model, 8, **static), expected)


@pytest.mark.slow
def test_long_generation_is_that_of_eager(model):
    expected = generated(model, 64)
    with winnow.transformers.enabled(model):
        assert torch.equal(generated(model, 64), expected)


def test_a_prompt_in_pieces_is_the_prompt(model):
    ids = token_ids()
    with torch.no_grad(), winnow.transformers.enabled(model):
        whole = model(ids).logits
        cache = transformers.DynamicCache(config=model.config)
        pieces = [model(part, past_key_values=cache).logits for part in ids.split(15, dim=1)]
    assert (torch.cat(pieces, dim=1) - whole).abs().max() < LOGIT_LIMIT[f32]


def test_checkpointing_gives_the_same_gradients(model):
    ids, mask = token_ids(), padded("right")
    with winnow.transformers.enabled(model.train()):
        _, expected = gradients(model, ids, attention_mask=mask)
        model.gradient_checkpointing_enable()
        _, found = gradients(model, ids, attention_mask=mask)
        model.gradient_checkpointing_disable()
    model.eval()
    assert largest_error(found, expected) < 1e-6


def test_disable_restores_everything(model):
    before, config = state(model), model.config.get_text_config()
    names = list(model.state_dict())
    winnow.transformers.enable(model)
    assert config._attn_implementation == "winnow"
    assert list(model.state_dict()) == names
    winnow.transformers.enable(model)
    winnow.transformers.disable(model)
    assert state(model) == before
    assert config._attn_implementation == "eager"
    winnow.transformers.disable(model)


def test_a_copy_of_an_enabled_model_is_its_own():
    model, ids = made("glm_moe_dsa"), token_ids()
    with torch.no_grad(), winnow.transformers.enabled(model):
        other = copy.deepcopy(model)
        expected = model(ids).logits
        with torch.no_grad():
            other.model.layers[0].self_attn.indexer.wk.weight.neg_()
        assert torch.equal(model(ids).logits, expected)
        assert not torch.equal(other(ids).logits, expected)


@pytest.mark.parametrize("train_indexer", [False, True])
def test_a_copy_of_an_enabled_model_can_be_disabled(train_indexer):
    model, ids = made("glm_moe_dsa"), token_ids()
    with torch.no_grad():
        expected = model(ids).logits
        with winnow.transformers.enabled(model, train_indexer=train_indexer):
            other = copy.deepcopy(model)
            winnow.transformers.disable(other)
            assert torch.equal(other(ids).logits, expected)
            assert model.config._attn_implementation == "winnow"
        assert not hasattr(other, "winnow_losses")


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_pickled_model_is_enabled_in_another_process(tmp_path, family):
    model, ids = fresh(family), token_ids()
    file = tmp_path / "model.pt"
    with torch.no_grad(), winnow.transformers.enabled(model):
        torch.save((model, ids, model(ids).logits), file)
    with torch.no_grad():
        eager = model(ids).logits
    code = f"""
import torch
model, ids, expected = torch.load({str(file)!r}, weights_only=False)
torch.set_num_threads(1)
with torch.no_grad():
    assert torch.equal(model(ids).logits, expected)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    other, *_ = torch.load(file, weights_only=False)
    with torch.no_grad():
        assert torch.equal(winnow.transformers.disable(other)(ids).logits, eager)


def test_another_attention_implementation_of_an_enabled_model_is_refused(family):
    model = fresh(family)
    with winnow.transformers.enabled(model):
        model.set_attn_implementation("eager")
        with pytest.raises(RuntimeError, match="implementation is 'eager', but the model is enab"):
            model(token_ids())


def test_a_mask_of_the_users_own_runs_as_eager(told):
    model, ids = made("deepseek_v32"), token_ids()
    causal = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril() & (torch.rand(TOKENS) > 0.3)
    causal |= torch.eye(TOKENS, dtype=torch.bool)
    lowest = torch.finfo(f32).min
    mask = torch.zeros(()).where(causal, lowest).expand(2, 1, TOKENS, TOKENS)
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).logits
        with winnow.transformers.enabled(model), pytest.warns(UserWarning, match="4 dimensions"):
            actual = model(ids, attention_mask=mask).logits
    assert (actual - expected).abs().max() < LOGIT_LIMIT[f32]


def test_dropout_runs_as_eager(told):
    model, ids = copy.deepcopy(made("deepseek_v32")), token_ids()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    with winnow.transformers.enabled(model.train()):
        with pytest.warns(UserWarning, match="attention_dropout 0.5: sparse attention has none"):
            torch.manual_seed(3)
            actual = model(ids).logits
    torch.manual_seed(3)
    assert relative(actual.detach(), model(ids).logits.detach()) < 1e-5


def test_float64_runs_as_eager(family, told):
    model, ids = copy.deepcopy(made(family, with_experts=False)).double(), token_ids()
    with torch.no_grad():
        expected = model(ids).logits
        with winnow.transformers.enabled(model), pytest.warns(UserWarning, match="float64"):
            actual = model(ids).logits
    assert actual.dtype == f64
    assert (actual - expected).abs().max() < LOGIT_LIMIT[f32]


def test_widths_that_are_no_multiple_of_8_run_as_eager(told):
    widths = dict(kv_lora_rank=36, qk_rope_head_dim=28, qk_nope_head_dim=20, v_head_dim=20)
    model, ids = fresh("glm_moe_dsa", **widths), token_ids()
    with torch.no_grad():
        expected = model(ids).logits
        with winnow.transformers.enabled(model):
            with pytest.warns(UserWarning, match="values of 36 channels: must be a multiple of 8"):
                actual = model(ids).logits
    assert (actual - expected).abs().max() < LOGIT_LIMIT[f32]


@pytest.mark.parametrize("own_mask", [False, True])
def test_selections_come_to_the_device_of_attention(told, own_mask):
    """Also where it runs as eager: the meta device is another one everywhere."""
    model = copy.deepcopy(made("deepseek_v32"))
    with winnow.transformers.enabled(model):
        layer = model.model.layers[0].self_attn.to("meta")
        heads, rows, latent = layer.num_heads, 5, layer.kv_lora_rank
        q = torch.empty(1, heads, rows, layer.qk_head_dim, device="meta")
        k = torch.empty(1, 1, rows, latent, device="meta")
        rope = torch.empty(1, 1, rows, layer.qk_rope_head_dim, device="meta")
        mask = torch.ones(1, 1, rows if own_mask else 1, rows, dtype=torch.bool, device="meta")
        indices = torch.zeros(1, rows, TOPK, dtype=torch.int32)
        out, _ = winnow.transformers.attention(layer, q, k, rope, mask, 1.0, indices=indices)
    assert out.shape == (1, rows, heads, layer.v_head_dim)


@pytest.mark.parametrize("name", FAMILIES)
def test_an_indexer_may_have_any_width(name):
    model, ids = fresh(name, index_head_dim=100), token_ids()
    with torch.no_grad():
        expected = model(ids).logits
        with winnow.transformers.enabled(model):
            actual = model(ids).logits
    assert (actual - expected).abs().max() < LOGIT_LIMIT[f32]


def test_autocast_runs_in_its_dtype(family):
    model, ids = made(family, with_experts=False), token_ids()
    with torch.no_grad(), torch.autocast("cpu", dtype=bf16):
        with Selections(model) as selections:
            expected = model(ids, use_cache=False).logits
        with winnow.transformers.enabled(model), Replay(model, selections.without_future()):
            actual = model(ids, use_cache=False).logits
    assert relative(actual, expected) < LOGIT_LIMIT[bf16]


def test_other_models_are_refused():
    config = LlamaConfig(
        vocab_size=8, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2,
    )  # fmt: skip
    with pytest.raises(ValueError, match="LlamaForCausalLM: must have layers of axk2, deepseek"):
        winnow.transformers.enable(LlamaForCausalLM(config))


def test_older_versions_are_refused(monkeypatch):
    monkeypatch.setattr(winnow.transformers.transformers, "__version__", "5.17.0")
    with pytest.raises(ImportError, match="transformers 5.17.0: must be 5.18 or newer"):
        winnow.transformers.enable(made("deepseek_v32"))


def test_a_config_shared_with_an_enabled_model_is_refused():
    model = made("deepseek_v32")
    other = DeepseekV32ForCausalLM(model.config)
    with winnow.transformers.enabled(model), pytest.raises(RuntimeError, match="shares its config"):
        other(token_ids())

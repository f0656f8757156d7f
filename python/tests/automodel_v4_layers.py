# SPDX-License-Identifier: Apache-2.0
"""Automodel's layers of DeepSeek-V4 and V4.1 against winnow; see test_automodel_layers.py."""

import importlib

import pytest
import torch
from automodel_shared import (  # noqa: F401
    DEVICE,
    HIDDEN,
    LIMIT,
    assert_agree,
    backend,
    gradients,
    input_of,
    installed,
)
from cases import f32
from nemo_automodel.components.models.common import BackendConfig
from nemo_automodel.components.models.deepseek_v4 import layers as v4_layers
from nemo_automodel.components.models.deepseek_v4.config import DeepseekV4Config


def v4_layer(attn: str, ratio: int) -> torch.nn.Module:
    config = v4_config(ratio)
    torch.manual_seed(4)
    layer = v4_layers.DeepseekV4Attention(config, 0, backend(attn))
    layer.init_weights(torch.device("cpu"), init_std=0.2)
    torch.nn.init.normal_(layer.sinks_param.weight)
    return layer.to(DEVICE)


def v4_config(ratio: int) -> DeepseekV4Config:
    return DeepseekV4Config(
        hidden_size=HIDDEN,
        num_hidden_layers=1,
        num_attention_heads=4,
        head_dim=32,
        qk_rope_head_dim=8,
        q_lora_rank=24,
        o_lora_rank=16,
        o_groups=2,
        compress_ratios=[ratio],
        sliding_window=16,
        index_n_heads=16,
        index_head_dim=16,
        index_topk=6,
        torch_dtype="float32",
    )


def v4_run(layer, x: torch.Tensor, d_out: torch.Tensor, packed_seq_ids: torch.Tensor | None):
    """The output and the gradient of x [batch, tokens, hidden]."""
    batch, tokens, _ = x.shape
    x = x.clone().requires_grad_()
    t = torch.arange(tokens, device=DEVICE)
    allowed = ((t <= t[:, None]) & (t[:, None] - t < 16)).expand(batch, -1, -1)
    positions = t.expand(batch, -1)
    if packed_seq_ids is not None:
        same = packed_seq_ids[:, None] == packed_seq_ids[..., None]
        positions = (same & (t <= t[:, None])).sum(-1) - 1
        allowed = same & allowed
    mask = torch.where(allowed, 0.0, torch.finfo(f32).min)[:, None]
    rotary = [
        v4_layers.DeepseekV4RotaryEmbedding(theta, 32, 0.25).to(DEVICE) for theta in (1e4, 16e4)
    ]
    out, _ = layer(
        x,
        rotary[0](x, positions),
        mask,
        position_embeddings_compress=rotary[1](x, positions),
        rotary_compress=rotary[1],
        position_ids=positions,
        **({} if packed_seq_ids is None else {"packed_seq_ids": packed_seq_ids}),
    )
    out.backward(d_out)
    return out.detach(), x.grad


class TestDeepSeekV4:
    @pytest.mark.parametrize("packed", [False, True])
    @pytest.mark.parametrize("ratio", [0, 4, 128])
    def test_attention(self, ratio, packed):
        tokens = 288
        x, d_out = (input_of(2 * tokens, seed).view(2, tokens, -1) for seed in (5, 6))
        ids = None
        if packed:
            ids = torch.tensor([[1] * 256 + [2] * 32, [1] * 128 + [2] * 160], device=DEVICE)
        oracle, layer = v4_layer("sdpa", ratio), v4_layer("tilelang", ratio)
        expected = v4_run(oracle, x, d_out, ids)
        actual = v4_run(layer, x, d_out, ids)
        assert_agree(actual, expected, layer, oracle, LIMIT)
        assert gradients(layer)["sinks_param.weight"].any()


V41_RATIOS = [
    0,
    2,
    2,
]  # a layer without pools, one that makes and selects them, one that reuses both


def v41_layers(attn: str) -> list[torch.nn.Module]:
    v41 = importlib.import_module("nemo_automodel.components.models.deepseek_v41.attention")
    config_of = importlib.import_module("nemo_automodel.components.models.deepseek_v41.config")
    config = config_of.DeepseekV41TextConfig(
        hidden_size=HIDDEN,
        num_hidden_layers=3,
        num_attention_heads=4,
        head_dim=32,
        qk_rope_head_dim=8,
        q_lora_rank=24,
        o_lora_rank=16,
        o_groups=2,
        compress_ratios=V41_RATIOS,
        kv_source_layer_ids=[1],
        index_source_layer_ids=[1],
        candidate_source_layer_id=-1,
        engram_layer_ids=[],
        sliding_window=16,
        index_n_heads=16,
        index_head_dim=32,
        index_topk=6,
        dtype="float32",
    )
    options = BackendConfig(linear="torch", attn=attn, rms_norm="torch_fp32")
    torch.manual_seed(7)
    layers = [v41.DeepseekV41Attention(config, i, options) for i in range(3)]
    for layer in layers:
        layer.reset_parameters(init_std=0.2)
        torch.nn.init.normal_(layer.attn_sink)
        if layer.indexer is not None:
            layer.indexer.attn_backend = "eager"  # its TileLang kernel is not replaced
    return [layer.to(DEVICE) for layer in layers]


def v41_run(layers, x: torch.Tensor, d_out: torch.Tensor):
    """The outputs of the layers, which pass their pools on, and the gradient of x."""
    x = x.clone().requires_grad_()
    state_of = importlib.import_module("nemo_automodel.components.models.deepseek_v41.attention")
    state, outs = state_of.DeepseekV41AttentionState(), []
    positions = torch.arange(x.shape[1], device=DEVICE)[None]
    for layer in layers:
        result = layer(x, position_ids=positions, state=state)
        state = result.state
        outs.append(result.hidden_states)
    torch.stack(outs).backward(d_out)
    return *(out.detach() for out in outs), x.grad


class TestDeepSeekV41:
    def test_attention(self):
        pytest.importorskip(
            "nemo_automodel.components.models.deepseek_v41", reason="this Automodel has no V4.1"
        )
        x = input_of(2 * 96, 8).view(2, 96, -1)
        d_out = input_of(3 * 2 * 96, 9).view(3, 2, 96, -1)
        oracle, layers = v41_layers("eager"), v41_layers("tilelang")
        expected, actual = v41_run(oracle, x, d_out), v41_run(layers, x, d_out)
        for layer, other in zip(layers, oracle, strict=True):
            assert_agree(actual, expected, layer, other, LIMIT)
            assert gradients(layer)["sinks_param.weight"].any()

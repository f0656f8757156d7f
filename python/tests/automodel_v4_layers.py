# SPDX-License-Identifier: Apache-2.0
"""Automodel's layers of DeepSeek-V4 and V4.1 against winnow; see test_automodel_layers.py."""

import pytest
import torch
from automodel_shared import (  # noqa: F401
    DEVICE,
    HIDDEN,
    LIMIT,
    assert_agree,
    gradients,
    input_of,
    installed,
)
from automodel_v4 import v4_layer, v4_step, v41_layers, v41_step

WIDTH = {
    "hidden_size": HIDDEN,
    "num_attention_heads": 4,
    "head_dim": 32,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 24,
    "o_lora_rank": 16,
    "o_groups": 2,
    "sliding_window": 16,
    "index_n_heads": 16,
    "index_topk": 6,
    "dtype": "float32",
}


class TestDeepSeekV4:
    @pytest.mark.parametrize("packed", [False, True])
    @pytest.mark.parametrize("ratio", [0, 4, 128])
    def test_attention(self, ratio, packed):
        tokens = 288
        x, d_out = (input_of(2 * tokens, seed).view(2, tokens, -1) for seed in (5, 6))
        ids = None
        if packed:
            ids = torch.tensor([[1] * 256 + [2] * 32, [1] * 128 + [2] * 160], device=DEVICE)
        oracle, layer = (
            v4_layer(attn, ratio, 0.2, **WIDTH, index_head_dim=16).to(DEVICE)
            for attn in ("sdpa", "tilelang")
        )
        expected, actual = v4_step(oracle, ids)(x, d_out), v4_step(layer, ids)(x, d_out)
        assert_agree(actual, expected, layer, oracle, LIMIT)
        assert gradients(layer)["sinks_param.weight"].any()


class TestDeepSeekV41:
    def test_attention(self):
        pytest.importorskip(
            "nemo_automodel.components.models.deepseek_v41", reason="this Automodel has no V4.1"
        )
        x = input_of(2 * 96, 8).view(2, 96, -1)
        d_out = input_of(3 * 2 * 96, 9).view(3, 2, 96, -1)
        oracle, layers = (
            v41_layers(attn, 0.2, **WIDTH, index_head_dim=32).to(DEVICE)
            for attn in ("eager", "tilelang")
        )
        expected, actual = v41_step(oracle)(x, d_out), v41_step(layers)(x, d_out)
        assert_agree(actual, expected, layers, oracle, LIMIT)
        for layer in layers:
            assert gradients(layer)["sinks_param.weight"].any()

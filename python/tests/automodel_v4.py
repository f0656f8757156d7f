# SPDX-License-Identifier: Apache-2.0
"""Layers of DeepSeek-V4 and V4.1 of the real Automodel, and a step of training with them, for the
tests and the benchmark."""

from collections.abc import Callable
from typing import Any

import torch
from nemo_automodel.components.models.common import BackendConfig
from nemo_automodel.components.models.deepseek_v4 import layers as v4
from nemo_automodel.components.models.deepseek_v4.config import DeepseekV4Config
from torch import Tensor, nn

Step = Callable[[Tensor, Tensor], tuple[Tensor, ...]]  # of x and d_out: outputs, gradient of x


def v4_layer(attn: str, ratio: int, init_std: float, **width: Any) -> nn.Module:
    """An attention layer with pools of `ratio` rows, or without pools if it is 0."""
    config = DeepseekV4Config(num_hidden_layers=1, compress_ratios=[ratio], **width)
    backend = BackendConfig(
        linear="torch", attn=attn, rms_norm="torch", experts="torch", dispatcher="torch"
    )
    torch.manual_seed(4)
    layer = v4.DeepseekV4Attention(config, 0, backend)
    layer.init_weights(torch.device("cpu"), init_std=init_std)
    nn.init.normal_(layer.sinks_param.weight)
    return layer


def v4_step(layer: nn.Module, packed_seq_ids: Tensor | None = None) -> Step:
    """A step with x [batch, tokens, hidden]; the model's own mask and rotary embeddings."""
    config = layer.config

    def step(x: Tensor, d_out: Tensor) -> tuple[Tensor, ...]:
        batch, tokens, _ = x.shape
        x = x.clone().requires_grad_()
        t = torch.arange(tokens, device=x.device)
        allowed = (t <= t[:, None]) & (t[:, None] - t < config.sliding_window)
        allowed, positions = allowed.expand(batch, -1, -1), t.expand(batch, -1)
        if packed_seq_ids is not None:
            same = packed_seq_ids[:, None] == packed_seq_ids[..., None]
            positions = (same & (t <= t[:, None])).sum(-1) - 1
            allowed = same & allowed
        mask = torch.where(allowed, 0.0, torch.finfo(x.dtype).min).to(x.dtype)[:, None]
        share = config.qk_rope_head_dim / config.head_dim
        rotary = [
            v4.DeepseekV4RotaryEmbedding(theta, config.head_dim, share).to(x.device)
            for theta in (config.rope_theta, config.compress_rope_theta)
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

    return step


def v41_layers(attn: str, init_std: float, **width: Any) -> nn.ModuleList:
    """A layer without pools, one that makes and selects pools of 2, one that reuses both."""
    from nemo_automodel.components.models.deepseek_v41.attention import DeepseekV41Attention
    from nemo_automodel.components.models.deepseek_v41.config import DeepseekV41TextConfig

    config = DeepseekV41TextConfig(
        num_hidden_layers=3,
        compress_ratios=[0, 2, 2],
        kv_source_layer_ids=[1],
        index_source_layer_ids=[1],
        candidate_source_layer_id=-1,
        engram_layer_ids=[],
        **width,
    )
    backend = BackendConfig(linear="torch", attn=attn, rms_norm="torch_fp32")
    torch.manual_seed(7)
    layers = nn.ModuleList(DeepseekV41Attention(config, i, backend) for i in range(3))
    for layer in layers:
        layer.reset_parameters(init_std=init_std)
        nn.init.normal_(layer.attn_sink)
        if layer.indexer is not None:
            layer.indexer.attn_backend = "eager"  # its TileLang kernel is not replaced
    return layers


def v41_step(layers: nn.ModuleList) -> Step:
    """A step with x [batch, tokens, hidden], d_out [3, batch, tokens, hidden]; every layer sees x,
    and passes its pools on."""
    from nemo_automodel.components.models.deepseek_v41.attention import DeepseekV41AttentionState

    def step(x: Tensor, d_out: Tensor) -> tuple[Tensor, ...]:
        x = x.clone().requires_grad_()
        state, outs = DeepseekV41AttentionState(), []
        positions = torch.arange(x.shape[1], device=x.device)[None]
        for layer in layers:
            result = layer(x, position_ids=positions, state=state)
            state = result.state
            outs.append(result.hidden_states)
        torch.stack(outs).backward(d_out)
        return *(out.detach() for out in outs), x.grad

    return step

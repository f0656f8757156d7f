# SPDX-License-Identifier: Apache-2.0
"""Automodel's GLM-5.2 layer: its torch path against winnow; see test_automodel_layers.py.

Functions whose names begin with an underscore run in the ranks.
"""

import pytest
import torch
import torch.distributed as dist
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
from cases import assert_equal, assert_within, bf16, f32
from nemo_automodel.components.models.glm_moe_dsa import layers as glm_layers
from nemo_automodel.components.models.glm_moe_dsa import model as glm_model
from ranks import Ranks
from torch.distributed.device_mesh import init_device_mesh
from transformers.models.glm_moe_dsa.configuration_glm_moe_dsa import GlmMoeDsaConfig

from winnow import automodel

TOPK = 8


def glm_config(
    dtype: torch.dtype, latent: int = 32, rope: int = 8, topk: int = TOPK
) -> GlmMoeDsaConfig:
    return GlmMoeDsaConfig(
        hidden_size=HIDDEN,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_hidden_layers=1,
        q_lora_rank=24,
        kv_lora_rank=latent,
        qk_nope_head_dim=16,
        qk_rope_head_dim=rope,
        qk_head_dim=16 + rope,
        v_head_dim=16,
        index_n_heads=16,  # with few heads many scores are 0, and torch selects any of equal ones
        index_head_dim=2 * rope,
        index_topk=topk,
        mlp_layer_types=["dense"],
        rope_parameters={"rope_theta": 10000.0, "rope_type": "default"},
        torch_dtype=str(dtype).removeprefix("torch."),
    )


def glm_layer(attn: str, config: GlmMoeDsaConfig) -> torch.nn.Module:
    layer = glm_layers.GlmMoeDsaMLA(config, backend(attn))
    torch.manual_seed(1)
    for name, parameter in layer.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return layer.to(DEVICE)


def rotations(positions: torch.Tensor, rope: int) -> torch.Tensor:
    """[..., rope / 2] complex."""
    angles = positions[..., None] * 10000.0 ** (-torch.arange(0, rope, 2) / rope)
    return torch.polar(torch.ones_like(angles), angles).to(DEVICE)


def torch_path(layer, x: torch.Tensor, d_out: torch.Tensor, lengths: list[int]):
    """Every document alone through the layer's own dense path; also the gradients of x."""
    outs, d_xs = [], []
    for document, d_document in zip(x.split(lengths), d_out.split(lengths), strict=True):
        document = document.clone().requires_grad_()
        rope = rotations(torch.arange(len(document)), layer.qk_rope_head_dim)
        out = layer(document[None], rope[None], None)[0]
        out.backward(d_document)
        outs.append(out.detach())
        d_xs.append(document.grad)
    return torch.cat(outs), torch.cat(d_xs)


def packed_path(layer, x: torch.Tensor, d_out: torch.Tensor, positions: torch.Tensor, **kwargs):
    x = x.clone().requires_grad_()
    out = layer(x, rotations(positions, rope_of(layer)), None, qkv_format="thd", **kwargs)
    out.backward(d_out)
    return out.detach(), x.grad


def rope_of(layer) -> int:
    return getattr(layer, "_orig_mod", layer).qk_rope_head_dim


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


class Float32Torch:
    """torch in which bfloat16 is float32, so that a layer rounds nothing on its way to winnow."""

    bfloat16 = f32

    def __getattr__(self, name: str):
        return getattr(torch, name)


@pytest.fixture
def unrounded(monkeypatch):
    monkeypatch.setattr(glm_layers, "torch", Float32Torch())
    monkeypatch.setattr(glm_layers, "should_use_tilelang", lambda *args, **options: True)


LENGTHS = [19, 7, 33]
OFFSETS = ints(0, 19, 26, 59)
POSITIONS = torch.cat([torch.arange(n) for n in LENGTHS])
PADDED = ints(0, 24, 32, 72)  # a rank of 2 or 4 has as many tokens as the others
PADDED_ROWS = torch.cat(
    [begin + torch.arange(n) for begin, n in zip([0, 24, 32], LENGTHS, strict=True)]
)


class TestGlm:
    def oracle(self, config):
        oracle, (x, d_out) = glm_layer("sdpa", config), (input_of(59), input_of(59, 3))
        dtype = next(oracle.parameters()).dtype
        x, d_out = x.to(dtype), d_out.to(dtype)
        return oracle, x, d_out, torch_path(oracle, x, d_out, LENGTHS)

    def test_packed_without_rounding(self, unrounded):
        oracle, x, d_out, expected = self.oracle(glm_config(f32))
        layer = glm_layer("tilelang", glm_config(f32))
        actual = packed_path(layer, x, d_out, POSITIONS, cu_seqlens=OFFSETS)
        assert_agree(actual, expected, layer, oracle, LIMIT)

    @pytest.mark.parametrize("attn", ["tilelang", "cudnn"])
    def test_packed(self, attn):
        """All keys are selected: the paths round differently, which could change a selection."""
        config = glm_config(bf16, 512, 64, topk=max(LENGTHS))
        oracle, x, d_out, expected = self.oracle(config)
        layer = glm_layer(attn, config)
        actual = packed_path(layer, x, d_out, POSITIONS, cu_seqlens=OFFSETS)
        assert_agree(actual, expected, layer, oracle, 3e-2)

    def test_padded(self, unrounded):
        oracle, x, d_out, expected = self.oracle(glm_config(f32))
        layer = glm_layer("tilelang", glm_config(f32))
        actual = self.padded(layer, x, d_out)
        assert_agree(actual, expected, layer, oracle, LIMIT)

    def padded(self, layer, x, d_out, **kwargs):
        """The rows of padding hold large values, which must not reach any other row."""
        rows = PADDED_ROWS.to(DEVICE)
        x_padded = torch.full((72, HIDDEN), 100.0, dtype=x.dtype, device=DEVICE)
        x_padded[rows] = x
        d_padded = torch.zeros_like(x_padded)
        d_padded[rows] = d_out
        positions = torch.zeros(72, dtype=torch.int64)
        positions[PADDED_ROWS] = POSITIONS
        out, d_x = packed_path(
            layer,
            x_padded,
            d_padded,
            positions,
            cu_seqlens=OFFSETS,
            cu_seqlens_padded=PADDED,
            **kwargs,
        )
        return out[rows], d_x[rows]

    def test_padding_without_keys(self, unrounded):
        """The names with cudnn let padding see nothing."""
        oracle, x, d_out, expected = self.oracle(glm_config(f32, 512, 64))
        layer = glm_layer("cudnn", glm_config(f32, 512, 64))
        padding = torch.ones(72, dtype=torch.bool, device=DEVICE)
        padding[PADDED_ROWS] = False
        metadata = glm_model.prepare_cudnn_dsa_packed_metadata(
            OFFSETS, 72, cu_seqlens_padded=PADDED, padding_mask=padding
        )
        actual = self.padded(
            layer,
            x,
            d_out,
            _cudnn_dsa_packed_metadata=metadata,
            _cudnn_dsa_topk_length=metadata.causal_lengths.clamp_max(TOPK),
            _cudnn_dsa_all_rows_nonempty=metadata.all_rows_nonempty,
            _cudnn_dsa_valid_row_indices=metadata.valid_row_indices,
        )
        assert_agree(actual, expected, layer, oracle, LIMIT)
        assert_equal(metadata.valid_row_indices.cpu(), PADDED_ROWS)

    @pytest.mark.parametrize("attn", ["tilelang", "cudnn"])
    def test_model_whose_layers_share_a_selection(self, attn, unrounded):
        """Batches as Automodel passes them: tokens, and a mask of padding."""
        ids = torch.randint(0, 50, (59,), generator=torch.Generator().manual_seed(5)).to(DEVICE)
        models = {name: self.model(name) for name in ("sdpa", attn)}
        expected = torch.cat(
            [
                models["sdpa"](
                    document[None], position_ids=torch.arange(len(document), device=DEVICE)[None]
                )[0][0]
                for document in ids.split(LENGTHS)
            ]
        )
        padded = torch.zeros(72, dtype=ids.dtype, device=DEVICE)
        padded[PADDED_ROWS] = ids
        positions = torch.zeros(72, dtype=torch.int64)
        positions[PADDED_ROWS] = POSITIONS
        padding = torch.ones(72, dtype=torch.bool, device=DEVICE)
        padding[PADDED_ROWS] = False
        out, _ = models[attn](
            padded,
            position_ids=positions.to(DEVICE),
            padding_mask=padding,
            qkv_format="thd",
            cu_seqlens=OFFSETS,
            cu_seqlens_padded=PADDED,
        )
        assert_within(out[PADDED_ROWS].detach(), expected.detach().to(torch.float64), LIMIT)

    def model(self, attn: str) -> torch.nn.Module:
        config = glm_config(f32, 512, 64)
        config.num_hidden_layers = 2
        config.mlp_layer_types = ["dense", "dense"]
        config.indexer_types = ["full", "shared"]
        config.vocab_size, config.intermediate_size = 50, 64
        model = glm_model.GlmMoeDsaModel(config, backend(attn))
        torch.manual_seed(6)
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
        return model.to(DEVICE)

    @pytest.mark.parametrize("attn", ["tilelang", "cudnn"])
    def test_compiled_whole(self, attn):
        config = glm_config(bf16, 512, 64)
        layer, x, d_out = glm_layer(attn, config), input_of(59).to(bf16), input_of(59, 3).to(bf16)
        expected = packed_path(layer, x, d_out, POSITIONS, cu_seqlens=OFFSETS)
        wanted = {n: g.clone() for n, g in gradients(layer).items()}
        layer.zero_grad()
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        actual = packed_path(compiled, x, d_out, POSITIONS, cu_seqlens=OFFSETS)
        for a, b in zip(actual, expected, strict=True):
            assert_within(a, b.to(torch.float64), 1e-2)
        for name, gradient in gradients(layer).items():
            assert_within(gradient, wanted[name].to(torch.float64), 1e-2)

    @pytest.mark.parametrize("size", [2, 4])
    def test_ranks(self, size, unrounded, tmp_path):
        oracle, x, d_out, expected = self.oracle(glm_config(f32))
        layer = glm_layer("tilelang", glm_config(f32))
        with Ranks(
            size, str(tmp_path / "store"), environment={"CUDA_VISIBLE_DEVICES": ""}
        ) as ranks:
            parts = ranks(_layer_of_rank, x.cpu(), d_out.cpu())
        rows = PADDED_ROWS
        actual = [torch.cat([part[i] for part in parts])[rows] for i in range(2)]
        for name, parameter in layer.named_parameters():
            if name in parts[0][2]:
                parameter.grad = sum(part[2][name] for part in parts).to(DEVICE)
        assert_agree([a.to(DEVICE) for a in actual], expected, layer, oracle, LIMIT)


def _layer_of_rank(x: torch.Tensor, d_out: torch.Tensor):
    """The padded batch of TestGlm, of which this rank has a shard."""
    automodel.install()
    glm_layers.torch = Float32Torch()
    glm_layers.should_use_tilelang = lambda *args, **options: True
    x_padded, d_padded = torch.full((72, HIDDEN), 100.0), torch.zeros(72, HIDDEN)
    x_padded[PADDED_ROWS], d_padded[PADDED_ROWS] = x, d_out
    positions = torch.zeros(72, dtype=torch.int64)
    positions[PADDED_ROWS] = POSITIONS
    batch = {
        "input_ids": torch.arange(72)[None],
        "labels": torch.arange(72)[None],
        "position_ids": positions[None],
        "seq_lens": torch.tensor([LENGTHS]),
        "seq_lens_padded": PADDED.diff()[None].cpu(),
    }
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    _, shard, layout = glm_model.shard_glm_dsa_packed_cp_batch(mesh, None, batch)
    assert layout.padded_seq_len == 72 and layout.input_row_shape == (1, 72)
    own = shard.pop("input_ids")
    layer = glm_layer("tilelang", glm_config(f32))
    local = x_padded[own].requires_grad_()
    out = layer(local, rotations(shard["position_ids"], layer.qk_rope_head_dim), None, **shard)
    out.backward(d_padded[own])
    return out.detach(), local.grad, gradients(layer)

# SPDX-License-Identifier: Apache-2.0
"""Tiny random models of every family that winnow.transformers knows, of the real config classes."""

import functools

import torch
from torch import Tensor, nn
from transformers import (
    AXK2Config,
    AXK2ForCausalLM,
    DeepseekV4Config,
    DeepseekV4ForCausalLM,
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    Glm5NextConfig,
    Glm5NextForConditionalGeneration,
    GlmMoeDsaConfig,
    GlmMoeDsaForCausalLM,
    HYV4Config,
    HYV4ForCausalLM,
    MistralLarge4Config,
    MistralLarge4ForConditionalGeneration,
)

TOKENS, TOPK, VOCABULARY = 40, 8, 64
CSA, HCA = "compressed_sparse_attention", "heavily_compressed_attention"
SHARED = ["full", "shared", "full"]  # the selection of the first layer serves the second

# Of all families. Sixteen indexer heads, so that hardly any two keys have the same score of 0.
SIZES = dict(
    vocab_size=VOCABULARY,
    hidden_size=256,
    moe_intermediate_size=32,
    num_hidden_layers=3,
    num_attention_heads=2,
    n_routed_experts=4,
    num_experts_per_tok=2,
    q_lora_rank=64,
    index_n_heads=16,
    initializer_range=0.06,
    pad_token_id=0,
    eos_token_id=None,
)
# Of those that select tokens.
LATENT = dict(
    SIZES,
    intermediate_size=64,
    num_key_value_heads=2,
    n_group=1,
    topk_group=1,
    index_topk=TOPK,
)


def _mistral_large4(**sizes) -> nn.Module:
    """The last layer without rotary embeddings, the second with the keys of the first."""
    del sizes["q_lora_rank"]
    vision = dict(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        model_type="pixtral",
    )  # fmt: skip
    text = dict(**sizes, indexer_types=SHARED, no_rope_layers=[1, 1, 0], kv_source_layers=[0, 0, 2])
    model = MistralLarge4ForConditionalGeneration(
        MistralLarge4Config(text_config=text, vision_config=vision)
    )
    for name, x in model.named_parameters():
        if "softmax_scaling" in name:  # 0 and 1 in a new model
            nn.init.uniform_(x, 0.2, 1)
    return model


def _glm5_next(mlp_layer_types: list[str], **sizes) -> nn.Module:
    text = dict(
        sizes,
        intermediate_size=64,
        num_key_value_heads=2,
        linear_num_heads=2,
        linear_head_dim=32,
        layer_types=["linear_attention", "indexed_attention", "indexed_attention"],
        indexer_types=["full", "full", "shared"],
        mlp_layer_types=mlp_layer_types,
        index_topk=16,
        index_kpool=4,
        hc_mult=2,
    )
    vision = dict(
        hidden_size=16, intermediate_size=16, depth=1, num_heads=2, out_hidden_size=256,
        projection_intermediate_size=16,
    )  # fmt: skip
    model = Glm5NextForConditionalGeneration(Glm5NextConfig(text_config=text, vision_config=vision))
    for name, x in model.named_parameters():
        if "index_kpool_compress" in name:  # constant in a new model
            nn.init.normal_(x, std=0.1)
    return model


def _deepseek_v4(mlp_layer_types: list[str], **sizes) -> nn.Module:
    """Every layer type. Hash layers choose experts by token."""
    kinds = {"dense": "hash_moe", "sparse": "moe"}
    config = DeepseekV4Config(
        **sizes,
        layer_types=["sliding_attention", HCA, CSA],
        compress_rates={CSA: 4, HCA: 16},
        mlp_layer_types=[kinds[kind] for kind in mlp_layer_types],
        sliding_window=8,
        o_groups=2,
        o_lora_rank=32,
        index_topk=4,
        hc_mult=2,
    )
    model = DeepseekV4ForCausalLM(config)
    for name, x in model.named_parameters():
        if "position_bias" in name or "sinks" in name:  # 0 in a new model
            nn.init.normal_(x)
    for name, x in model.named_buffers():
        if "tid2eid" in name:  # in a new model every token has expert 0 twice
            x.copy_(torch.stack([torch.randperm(4)[:2] for _ in range(VOCABULARY)]))
    return model


_MAKERS = {
    "axk2": lambda **sizes: AXK2ForCausalLM(AXK2Config(**LATENT | sizes)),
    "deepseek_v32": lambda **sizes: DeepseekV32ForCausalLM(DeepseekV32Config(**LATENT | sizes)),
    "deepseek_v4": lambda **sizes: _deepseek_v4(**SIZES | sizes),
    "glm5_next": lambda **sizes: _glm5_next(**SIZES | sizes),
    "glm_moe_dsa": lambda **sizes: GlmMoeDsaForCausalLM(
        GlmMoeDsaConfig(**LATENT | sizes, indexer_types=SHARED)
    ),
    "hy_v4": lambda **sizes: HYV4ForCausalLM(
        HYV4Config(**LATENT | sizes, indexer_types=SHARED, learnable_sink_init=0.5)
    ),
    "mistral_large4": lambda **sizes: _mistral_large4(**LATENT | sizes),
}
FAMILIES = sorted(_MAKERS)


def fresh(family: str, with_experts: bool = True, **sizes) -> nn.Module:
    """A model in fp32 with eager attention. Rounding to bf16 moves tokens between experts, and
    their logits jump: what compares in bf16 does without experts."""
    torch.manual_seed(1)
    layers = ["dense", "sparse" if with_experts else "dense", "dense"]
    model = _MAKERS[family](**sizes, mlp_layer_types=layers).eval()
    model.set_attn_implementation("eager")
    return model


@functools.cache
def made(family: str, with_experts: bool = True) -> nn.Module:
    """The same for all tests, which leave it as they found it."""
    return fresh(family, with_experts)


def token_ids(batch: int = 2, tokens: int = TOKENS) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(1, VOCABULARY, (batch, tokens), generator=generator)


def padded(side: str, tokens: int = TOKENS) -> Tensor:
    """The mask of two rows, the first with 7 tokens of padding."""
    mask = torch.ones(2, tokens, dtype=torch.long)
    mask[0, slice(0, 7) if side == "left" else slice(-7, None)] = 0
    return mask

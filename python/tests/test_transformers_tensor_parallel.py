# SPDX-License-Identifier: Apache-2.0
"""Models whose heads transformers has split over ranks by their own tensor-parallel plans."""

import warnings

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

pytest.importorskip("transformers", minversion="5.22")
from model_runs import gradients, largest_error  # noqa: E402
from tiny_models import FAMILIES, fresh, token_ids  # noqa: E402

import winnow.transformers  # noqa: E402
from winnow.transformers import warn  # noqa: E402
from winnow.transformers.attention import _head_group  # noqa: E402

LIMIT = 1e-4
UNKNOWN_RANKS = "heads are split over ranks, but kv_b_proj does not say which"


def _split(family: str) -> tuple[nn.Module, dist.DeviceMesh]:
    """A model with its heads on two ranks, and a mesh whose other dimension has one."""
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    model = fresh(family, with_experts=False)
    mesh = dist.device_mesh.init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    plan = model.tp_plan
    if expand := getattr(model, "_expand_parallel_plan", None):  # since 5.23 the caller does that
        plan = expand(plan)
    apply_tensor_parallelism(model, mesh["tp"], plan)
    return model, mesh


def _error(model: nn.Module, family: str, train_indexer: bool) -> float:
    """The largest error of any parameter's gradient, replicated or split."""
    ids = token_ids()
    with winnow.transformers.enabled(
        fresh(family, with_experts=False), train_indexer=train_indexer
    ) as whole:
        logits, expected = gradients(whole, ids)
    assert any(".indexer." in name for name in expected) == train_indexer
    with winnow.transformers.enabled(model, train_indexer=train_indexer):
        actual, found = gradients(model, ids)
    assert (actual - logits).abs().max() < LIMIT
    found = {name: getattr(x, "full_tensor", lambda x=x: x)() for name, x in found.items()}
    return largest_error(found, expected)


def _agrees(family: str, train_indexer: bool) -> float:
    model, _ = _split(family)
    plan = model.tp_plan
    with winnow.transformers.enabled(model):
        assert model.tp_plan == plan
    return _error(model, family, train_indexer)


@pytest.mark.parametrize("train_indexer", [False, True])
@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"glm5_next"}))
def test_heads_split_over_ranks_give_whole_gradients(two_ranks, family, train_indexer):
    assert max(two_ranks(_agrees, family, train_indexer)) < 1e-3


def _attention_as_eager_agrees() -> float:
    model, _ = _split("glm_moe_dsa")
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj.lora_dropout = {"of this test": nn.Dropout(0.5)}
    model.train()  # the family has no dropout of its own
    with warnings.catch_warnings(record=True):
        return _error(model, "glm_moe_dsa", train_indexer=True)


def test_heads_that_run_as_eager_teach_together(two_ranks):
    assert max(two_ranks(_attention_as_eager_agrees)) < 1e-3


def _agrees_with_fsdp() -> float:
    from torch.distributed.fsdp import fully_shard

    model, mesh = _split("deepseek_v32")
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    return _error(model, "deepseek_v32", train_indexer=True)


def test_fsdp_over_the_other_dimension_of_the_mesh_gives_whole_gradients(two_ranks):
    assert max(two_ranks(_agrees_with_fsdp)) < 1e-3


def _projection_sharded_twice() -> tuple[float, list[str], str]:
    """The error without training, what was warned of, and the refusal to train."""
    from torch.distributed.fsdp import fully_shard

    model, mesh = _split("deepseek_v32")
    for layer in model.model.layers:
        fully_shard(layer.self_attn.kv_b_proj, mesh=mesh["dp"], reshard_after_forward=True)
    warn._told.clear()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        error = _error(model, "deepseek_v32", train_indexer=False)
    with winnow.transformers.enabled(model, train_indexer=True):
        with pytest.raises(ValueError) as refused:
            model(token_ids())
    return error, [str(x.message) for x in told], str(refused.value)


def test_a_projection_that_fsdp_shards_too_runs_as_eager(two_ranks):
    for error, told, refused in two_ranks(_projection_sharded_twice):
        assert error < 1e-3
        assert any(UNKNOWN_RANKS in sentence for sentence in told)
        assert "train_indexer True: " + UNKNOWN_RANKS in refused


def _head_ranks() -> list[int]:
    model, mesh = _split("deepseek_v32")
    layer = model.model.layers[0].self_attn
    weight = layer.kv_b_proj.weight.full_tensor().detach()
    placements = [Replicate(), Shard(0)]
    layer.kv_b_proj.weight = nn.Parameter(distribute_tensor(weight, mesh, placements))
    return dist.get_process_group_ranks(_head_group(layer))


def test_the_ranks_of_the_heads_are_those_of_the_dimension_that_splits_them(two_ranks):
    assert two_ranks(_head_ranks) == [[0, 1], [0, 1]]


def _glm5_next_in_eager() -> str:
    model, _ = _split("glm5_next")
    with pytest.raises(RuntimeError) as failed:
        model(token_ids())
    return str(failed.value)


def test_the_plan_of_glm5_next_fails_in_eager(two_ranks):
    """It splits o_proj of the linear-attention layers too, but not what they multiply by it."""
    assert all("is invalid for input of size" in why for why in two_ranks(_glm5_next_in_eager))

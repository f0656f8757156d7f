# SPDX-License-Identifier: Apache-2.0
"""Context parallel of winnow.automodel: documented values, and N ranks against one rank.

Functions whose names begin with an underscore run in the ranks.
"""

import contextlib
import inspect
import os
import signal
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import GRAD_LIMIT, Random, assert_equal, assert_within, bf16, f16, f32, f64
from hypothesis import given
from hypothesis import strategies as st
from ranks import Ranks
from torch.distributed.device_mesh import init_device_mesh

from winnow import automodel

FILL = -1000
MAKE_BATCH = "make_glm_dsa_packed_cp_batch_and_ctx"
HEADS, LATENT, ROPE, HEAD_DIM, INDEX_HEADS, INDEX_DIM, TOPK = 2, 16, 8, 8, 2, 8, 5


class Mesh:
    """The interface of a mesh that the helpers use, without processes."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size

    def get_group(self) -> str:
        return "group"


def padded_batch(seq_lens: list, seq_lens_padded: list | None, tokens: int, **changes: Any) -> dict:
    rows = len(seq_lens)
    ids = torch.arange(rows * tokens).view(rows, tokens) + 10
    batch = {"input_ids": ids, "labels": ids + 1000, "position_ids": ids + 2000}
    batch["seq_lens"] = torch.tensor(seq_lens)
    batch["seq_lens_padded"] = None if seq_lens_padded is None else torch.tensor(seq_lens_padded)
    return batch | changes


GOLDEN = padded_batch([[3, 2], [6, FILL]], [[4, 2], [6, FILL]], 6)


def made(batch: dict, size: int = 1, **options: Any) -> dict:
    context, shard = automodel.make_glm_dsa_packed_cp_batch_and_ctx(
        Mesh(size), None, batch, **options
    )
    assert context is contextlib.nullcontext
    return shard


@pytest.mark.parametrize(
    ("name", "parameters", "defaults"),
    [
        ("glm_dsa_cp_enabled", "cp_group", {}),
        ("glm_dsa_cp_all_gather", "tensor dim cp_group", {}),
        ("_contiguous_cp_indices", "total_tokens cp_size cp_rank device", {}),
        (
            "_slice_thd_chunk_for_cp",
            "chunk cp_group cp_size cp_rank padding_token_id cp_mesh",
            {"cp_mesh": None},
        ),
        *(
            (
                name,
                "cp_mesh tp_mesh batch loss_mask padding_token_id num_chunks "
                "seq_lens_padding_value",
                {
                    "loss_mask": None,
                    "padding_token_id": 0,
                    "num_chunks": 1,
                    "seq_lens_padding_value": FILL,
                },
            )
            for name in (MAKE_BATCH, "shard_glm_dsa_packed_cp_batch")
        ),
        ("dsv4_cp_local_seq_multiple", "model_or_config", {}),
    ],
)
def test_signatures(name, parameters, defaults):
    found = inspect.signature(getattr(automodel, name)).parameters
    assert " ".join(found) == parameters
    assert {n: p.default for n, p in found.items() if p.default is not p.empty} == defaults
    kinds = {p.kind for p in found.values()}
    assert kinds == {inspect.Parameter.POSITIONAL_OR_KEYWORD}


class TestIndices:
    @pytest.mark.parametrize(
        ("tokens", "size", "rank", "expected"),
        [(6, 3, 1, [2, 3]), (6, 1, 0, [0, 1, 2, 3, 4, 5]), (0, 2, 1, [])],
    )
    def test_are_contiguous(self, tokens, size, rank, expected):
        rows = automodel._contiguous_cp_indices(tokens, size, rank, torch.device("cpu"))
        assert rows.dtype == torch.int64 and rows.tolist() == expected

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ((5, 2, 0), "total_tokens 5: must be divisible by cp_size 2"),
            ((6, 2, 2), "cp_rank 2: must be from 0 to 1"),
            ((6, 2, -1), "cp_rank -1: must be from 0 to 1"),
            ((6, 0, 0), "cp_size 0: must be at least 1"),
        ],
    )
    def test_refusals(self, arguments, message):
        with pytest.raises(ValueError, match=message):
            automodel._contiguous_cp_indices(*arguments, torch.device("cpu"))


class TestSlice:
    chunk = {
        "input_ids": torch.arange(6, dtype=torch.int32),
        "labels": torch.arange(6) + 100,
        "position_ids": torch.arange(6) + 200,
        "cu_seqlens": torch.tensor([0, 3, 6]),
        "cu_seqlens_padded": torch.tensor([0, 4, 8]),
        "max_seqlen": torch.tensor(3),
        "padding_mask": torch.arange(6) == 3,
    }

    def sliced(self, padding_token_id: int = 3, **changes: Any) -> dict:
        chunk = {name: x for name, x in (self.chunk | changes).items() if x is not None}
        return automodel._slice_thd_chunk_for_cp(
            chunk, cp_group="group", cp_size=3, cp_rank=1, padding_token_id=padding_token_id
        )

    def test_tokens_are_local_and_offsets_global(self):
        shard = self.sliced()
        local = {"input_ids": [2, 3], "labels": [102, 103], "position_ids": [202, 203]}
        for name, values in local.items():
            assert_equal(shard.pop(name), torch.tensor(values))
        expected = {"cu_seqlens": [0, 3, 6], "cu_seqlens_padded": [0, 4, 8], "max_seqlen": 3}
        for name, values in (expected | {"glm_dsa_cp_query_indices": [2, 3]}).items():
            assert_equal(shard.pop(name), torch.tensor(values, dtype=torch.int32))
        assert_equal(shard.pop("padding_mask"), torch.tensor([False, True]))
        rest = {"qkv_format": "thd", "cp_size": 3, "cp_rank": 1, "_glm_dsa_cp_group": "group"}
        assert shard == rest

    def test_what_the_chunk_lacks_the_shard_lacks(self):
        shard = self.sliced(cu_seqlens_padded=None, max_seqlen=None)
        assert not {"cu_seqlens_padded", "max_seqlen"} & shard.keys()

    def test_embeddings_keep_their_dtype(self):
        embeddings = torch.randn(6, 4)
        assert_equal(self.sliced(input_ids=embeddings)["input_ids"], embeddings[2:4])

    def test_embeddings_cannot_tell_padding(self):
        with pytest.raises(ValueError, match="chunk without padding_mask: must be given"):
            self.sliced(input_ids=torch.randn(6, 4), padding_mask=None)

    def test_without_a_mask_the_tokens_at_the_end_tell(self):
        ids = torch.tensor([5, 6, 7, 0, 0, 0])
        assert self.sliced(0, input_ids=ids, padding_mask=None)["padding_mask"].tolist() == [
            False,
            True,
        ]

    def test_a_padding_token_in_the_content_is_refused(self):
        ids = torch.tensor([5, 0, 6, 0, 0, 0])
        with pytest.raises(ValueError, match="padding_token_id 0 also occurs as content"):
            self.sliced(0, input_ids=ids, padding_mask=None)

    def test_uneven_parts_are_refused(self):
        message = "^_slice_thd_chunk_for_cp: tokens of input_ids 5: must be divisible by cp_size 3"
        with pytest.raises(ValueError, match=message):
            self.sliced(input_ids=torch.arange(5))

    def test_a_mesh_must_have_as_many_ranks(self):
        arguments = (self.chunk, "group", 3, 1, 0)
        expected = automodel._slice_thd_chunk_for_cp(*arguments)
        shard = automodel._slice_thd_chunk_for_cp(*arguments, cp_mesh=Mesh(3))
        assert_equal(shard["glm_dsa_cp_query_indices"], expected["glm_dsa_cp_query_indices"])
        with pytest.raises(ValueError, match="cp_mesh of 2 ranks: must have cp_size 3"):
            automodel._slice_thd_chunk_for_cp(*arguments, cp_mesh=Mesh(2))


class TestBatch:
    def test_padding_between_documents(self):
        shard = made(GOLDEN)
        assert_equal(shard["input_ids"], GOLDEN["input_ids"].flatten())
        assert_equal(shard["labels"], GOLDEN["labels"].flatten())
        assert_equal(shard["position_ids"], GOLDEN["position_ids"].flatten())
        assert_equal(shard["cu_seqlens"], torch.tensor([0, 3, 5, 11], dtype=torch.int32))
        assert_equal(shard["cu_seqlens_padded"], torch.tensor([0, 4, 6, 12], dtype=torch.int32))
        assert_equal(shard["max_seqlen"], torch.tensor(6, dtype=torch.int32))
        assert shard["padding_mask"].nonzero().flatten().tolist() == [3]

    def test_padding_at_the_end(self):
        shard = made(padded_batch([[112] * 5], [[112] * 4 + [576]], 1024), size=2)
        assert shard["cu_seqlens"].tolist() == [0, 112, 224, 336, 448, 1024]
        assert "cu_seqlens_padded" not in shard
        assert shard["max_seqlen"].item() == 576
        assert shard["input_ids"].shape == shard["padding_mask"].shape == (512,)
        assert not shard["padding_mask"].any()  # padding begins at token 560, on the next rank

    @pytest.mark.parametrize("key", [None, "seq_lens_padded"])  # None or absent
    def test_without_padded_lengths_documents_follow_each_other(self, key):
        batch = padded_batch([[4, 2], [3, FILL], [6, FILL], [1, 2]], None, 6)
        batch["seq_lens"][1, 1] = 3
        batch.pop(key, None)
        shard = made(batch)
        assert shard["cu_seqlens"].tolist() == [0, 4, 6, 9, 12, 18, 19, 21]
        assert "cu_seqlens_padded" not in shard
        assert shard["max_seqlen"].item() == 6
        assert shard["padding_mask"].nonzero().flatten().tolist() == [21, 22, 23]
        stacked = made(batch, num_chunks=2)
        assert stacked["cu_seqlens"].tolist() == [[0, 4, 6, 9, 12], [0, 6, 7, 9, FILL]]
        assert stacked["max_seqlen"].tolist() == [4, 6]
        assert stacked["padding_mask"].sum().item() == 3

    def test_the_layout_of_a_shard(self):
        shard = automodel.shard_glm_dsa_packed_cp_batch
        context, batch, layout = shard(Mesh(2), None, GOLDEN)
        assert context is contextlib.nullcontext
        assert_equal(batch["input_ids"], made(GOLDEN, size=2)["input_ids"])
        assert layout == automodel.ShardLayout(padded_seq_len=12, input_row_shape=(2, 6))
        assert shard(Mesh(2), None, GOLDEN, num_chunks=2)[2] is None

    def test_chunks_are_stacked(self):
        shard = made(GOLDEN, size=2, num_chunks=2)
        assert_equal(shard["input_ids"], GOLDEN["input_ids"][:, :3])
        assert shard["cu_seqlens"].tolist() == [[0, 3, 5], [0, 6, FILL]]
        assert shard["cu_seqlens_padded"].tolist() == [[0, 4, 6], [0, 6, FILL]]
        assert shard["max_seqlen"].tolist() == [3, 6]
        assert shard["glm_dsa_cp_query_indices"].tolist() == [[0, 1, 2]] * 2
        assert shard["padding_mask"].shape == (2, 3)
        assert (shard["qkv_format"], shard["cp_size"], shard["cp_rank"]) == ("thd", 2, 0)

    def test_another_fill(self):
        batch = padded_batch([[3, 2], [6, -7]], [[4, 2], [6, -7]], 6)
        shard = made(batch, num_chunks=2, seq_lens_padding_value=-7)
        assert shard["cu_seqlens"].tolist() == [[0, 3, 5], [0, 6, -7]]

    def test_a_last_token_with_the_value_of_padding_is_no_padding(self):
        ids = torch.tensor([[7, 8, 9, 9, 5, 6, 9, 9]])
        batch = padded_batch([[3, 3]], [[4, 4]], 8, input_ids=ids)
        shard = made(batch, padding_token_id=9)
        assert shard["padding_mask"].nonzero().flatten().tolist() == [3, 7]

    @given(st.data())
    def test_every_slot_by_its_document(self, data):
        """Compares with the definition, token by token."""
        tokens, chunks = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 3))
        real, padded = [], []
        for _ in range(chunks * data.draw(st.integers(1, 2))):
            borders = sorted(data.draw(st.sets(st.integers(1, tokens), max_size=3)) | {tokens})
            padded.append([b - a for a, b in zip([0, *borders], borders, strict=False)])
            real.append([data.draw(st.integers(0, n)) for n in padded[-1]])
        width = max(map(len, real))
        filled = [[row + [FILL] * (width - len(row)) for row in rows] for rows in (real, padded)]
        shard = made(padded_batch(*filled, tokens), num_chunks=chunks)
        rows = len(real) // chunks
        for chunk in range(chunks):
            at = (lambda x: x[chunk]) if chunks > 1 else (lambda x: x)  # noqa: B023
            own = slice(chunk * rows, (chunk + 1) * rows)
            lengths, slots = (sum(x[own], []) for x in (real, padded))
            mask = [k >= n for n, m in zip(lengths, slots, strict=True) for k in range(m)]
            assert at(shard["padding_mask"]).tolist() == mask
            if lengths[:-1] == slots[:-1]:  # padding at the end counts as part of the last document
                lengths = slots
            cu_seqlens, cu_seqlens_padded = (
                [sum(x[:i]) for i in range(len(x) + 1)] for x in (lengths, slots)
            )
            assert [x for x in at(shard["cu_seqlens"]).tolist() if x != FILL] == cu_seqlens
            if "cu_seqlens_padded" in shard:
                found = at(shard["cu_seqlens_padded"]).tolist()
                assert [x for x in found if x != FILL] == cu_seqlens_padded
            else:
                assert cu_seqlens_padded == cu_seqlens
            assert at(shard["max_seqlen"]).item() == max(lengths)

    @pytest.mark.parametrize(
        ("batch", "options", "message"),
        [
            (
                padded_batch([[3, 2], [5, FILL]], [[4, 2], [5, FILL]], 6),
                {},
                rf"^{MAKE_BATCH}: sum of seq_lens_padded\[1\] 5: must be 6",
            ),
            (
                padded_batch([[3, 2], [6, FILL]], [[2, 4], [6, FILL]], 6),
                {},
                r"seq_lens_padded\[0\]\[0\] 2: must be at least 3, as seq_lens\[0\]\[0\]",
            ),
            (
                padded_batch([[3, -2], [6, FILL]], [[4, 2], [6, FILL]], 6),
                {},
                r"seq_lens\[0\]\[1\] -2: must be at least 0, or -1000",
            ),
            (
                padded_batch([[FILL, 2], [6, FILL]], [[FILL, 6], [6, FILL]], 6),
                {},
                r"seq_lens\[0\]\[1\] 2: must be -1000, as seq_lens\[0\]\[0\]",
            ),
            (
                padded_batch([[2]] * 3, [[2]] * 3, 2),
                {"num_chunks": 2},
                f"^{MAKE_BATCH}: num_chunks 2: must divide the 3 rows of input_ids",
            ),
            (GOLDEN, {"num_chunks": 5}, "num_chunks 5: must divide the 2 rows of input_ids"),
            (
                GOLDEN,
                {"size": 5},
                f"^{MAKE_BATCH}: tokens of input_ids 12: must be divisible by cp_size 5",
            ),
            (
                padded_batch([[7]], None, 7),
                {"size": 2},
                f"^{MAKE_BATCH}: tokens of input_ids 7: must be divisible by cp_size 2",
            ),
            (
                padded_batch([[3, 2], [6, FILL]], None, 6),
                {},
                rf"^{MAKE_BATCH}: sum of seq_lens\[0\] 5: must be 6 where seq_lens_padded is None",
            ),
            (padded_batch([[4, 3]], None, 6), {}, r"sum of seq_lens\[0\] 7: must be 6 where"),
            (padded_batch([[FILL]], None, 6), {}, r"sum of seq_lens\[0\] 0: must be 6 where"),
            (padded_batch([[-1, 7]], None, 6), {}, r"seq_lens\[0\]\[0\] -1: must be at least 0"),
            (GOLDEN | {"labels": torch.zeros(2, 5)}, {}, r"labels \[2, 5\]: must be \[2, 6\]"),
            (GOLDEN | {"seq_lens_padded": torch.zeros(2, 1)}, {}, r"\[2, 1\]: must be \[2, 2\]"),
            (GOLDEN | {"seq_lens": torch.ones(2, 2)}, {}, "seq_lens: 'float' object"),
            (GOLDEN | {"input_ids": torch.zeros(12)}, {}, r"input_ids \[12\]: must be \[rows"),
            (GOLDEN | {"seq_lens": None}, {}, "batch without seq_lens: must be given"),
        ],
    )
    def test_bad_batches_are_refused(self, batch, options, message):
        with pytest.raises(ValueError, match=message):
            made(batch, **options)

    def test_no_mesh_is_refused(self):
        group = dist.ProcessGroup(0, 1)
        text = f"{MAKE_BATCH}: cp_mesh is a ProcessGroup: must be a torch.distributed.DeviceMesh"
        with pytest.raises(TypeError, match=text):
            automodel.make_glm_dsa_packed_cp_batch_and_ctx(group, None, GOLDEN)


@pytest.mark.parametrize(
    ("ratios", "multiple"),
    [(None, 1), ([], 1), ([0, 0], 1), ([2], 2), ([4], 8), ([0, 4, 128], 128), ([2, 3], 6)],
)
def test_multiple_of_deepseek_v4_parts(ratios, multiple):
    config = SimpleNamespace(compress_ratios=ratios)
    assert automodel.dsv4_cp_local_seq_multiple(config) == multiple
    assert automodel.dsv4_cp_local_seq_multiple(SimpleNamespace(config=config)) == multiple


def test_without_a_group_nothing_happens():
    x = torch.zeros(3)
    for group in (None, "torch.distributed is not initialised"):
        assert not automodel.glm_dsa_cp_enabled(group)
        assert automodel.glm_dsa_cp_all_gather(x, 0, group) is x


# ---- Ranks.


@pytest.fixture(scope="module", params=(1, 2, 4))
def ranks(request, tmp_path_factory):
    with Ranks(request.param, str(tmp_path_factory.mktemp("ranks") / "store")) as started:
        yield started


def _part(rank: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    shape = [3, 4, 5]
    shape[dim] = 2
    return Random(rank).integers(0, 1, *shape, dtype=dtype)


def _gather(dim: int, dtype: torch.dtype):
    local = _part(dist.get_rank(), dim, dtype)
    gathered = automodel.glm_dsa_cp_all_gather(local, dim, dist.group.WORLD)
    return gathered, gathered is local, automodel.glm_dsa_cp_enabled(dist.group.WORLD)


@pytest.mark.parametrize("dtype", [bf16, f16, f32, f64, torch.int64, torch.bool])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_gather_puts_parts_in_the_order_of_ranks(ranks, dim, dtype):
    expected = torch.cat([_part(rank, dim, dtype) for rank in range(ranks.size)], dim)
    for gathered, is_local, enabled in ranks(_gather, dim, dtype):
        assert_equal(gathered, expected)
        assert enabled == (ranks.size > 1) and is_local == (ranks.size == 1)


def _gradients(weights: list[float], dtype: torch.dtype):
    local = torch.zeros(2, 3, dtype=dtype, requires_grad=True)
    gathered = automodel.glm_dsa_cp_all_gather(local, dim=1, cp_group=dist.group.WORLD)
    (gathered * weights[dist.get_rank()]).sum().backward()
    return local.grad


def test_gradients_are_summed_over_ranks(ranks):
    """With two ranks and loss (rank + 1) * sum every gradient is 3."""
    weights = [rank + 1.0 for rank in range(ranks.size)]
    for gradient in ranks(_gradients, weights, f32):
        assert_equal(gradient, torch.full((2, 3), sum(weights)))


def test_gradients_are_rounded_once(ranks):
    """256 + 1 + 1 + 1 summed in bf16 would be 256; rounded once it is 260."""
    weights = [256.0] + [1.0] * (ranks.size - 1)
    for gradient in ranks(_gradients, weights, bf16):
        assert_equal(gradient, torch.full((2, 3), sum(weights)).to(bf16))


def _uneven_gather():
    local = torch.zeros(2 + dist.get_rank(), 3)
    automodel.glm_dsa_cp_all_gather(local, 0, dist.group.WORLD)


def test_parts_of_different_shapes_are_refused_on_every_rank(tmp_path):
    with Ranks(2, str(tmp_path / "store")) as two:
        two.start(_uneven_gather)
        for failure in two.results():
            assert failure.startswith("ValueError: glm_dsa_cp_all_gather: ranks differ: rank 0: ")
            assert "gather_keys" not in failure.splitlines()[0]
            assert "[2, 3]" in failure and "[3, 3]" in failure


def _gather_without_rank_1(stage: str) -> str:
    local = torch.zeros(2, 3, requires_grad=True)
    if stage == "backward":
        total = automodel.glm_dsa_cp_all_gather(local, 0, dist.group.WORLD).sum()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        if stage == "backward":
            total.backward()
        else:
            automodel.glm_dsa_cp_all_gather(local, 0, dist.group.WORLD)
    except RuntimeError as error:
        return str(error)
    raise AssertionError("a collective without rank 1 has ended")


@pytest.mark.parametrize(
    ("stage", "what"),
    [
        ("forward", "tensor torch.float32 [2, 3]"),
        ("backward", "the sum of gradients torch.float32"),
    ],
)
def test_a_lost_rank_is_told_by_the_name_of_the_function(tmp_path, stage, what):
    with Ranks(2, str(tmp_path / "store"), timeout=5) as two:
        two.start(_gather_without_rank_1, stage)
        (text,) = two.results((0,), patience=30)
    assert text.startswith(f"glm_dsa_cp_all_gather: the comparison of arguments ({what}")
    assert "failed on rank 0 of 2: " in text and "gather_keys" not in text


def _gather_from_outside() -> str:
    group = dist.new_group([0])
    x = torch.zeros(2, 3)
    try:
        return "the same" if automodel.glm_dsa_cp_all_gather(x, 0, group) is x else "another"
    except TypeError as error:
        return str(error)


def test_a_process_outside_of_the_group_is_refused(tmp_path):
    with Ranks(2, str(tmp_path / "store")) as two:
        member, outsider = two(_gather_from_outside)
    assert member == "the same"
    assert outsider.startswith("glm_dsa_cp_all_gather: cp_group is -100, what torch.distributed ")


# A training step of a GLM layer, written as in Automodel.

LAYER_BATCH = padded_batch(
    [[5, 6], [11, FILL], [16, FILL], [2, 9]], [[8, 8], [16, FILL], [16, FILL], [4, 12]], 16
)


def _layer(cp_size: int, chunks: int) -> dict[str, torch.Tensor]:
    """Runs over the ranks, or with cp_size 1 on this rank alone."""
    mesh = init_device_mesh("cpu", (cp_size,)) if dist.is_initialized() else Mesh(1)
    _, batch = automodel.make_glm_dsa_packed_cp_batch_and_ctx(
        mesh, None, LAYER_BATCH, num_chunks=chunks
    )
    if chunks > 1:  # one chunk, as a pipeline stage gets it
        batch = {name: x[1] if isinstance(x, torch.Tensor) else x for name, x in batch.items()}
    group, rows = batch["_glm_dsa_cp_group"], batch["glm_dsa_cp_query_indices"].long()
    tokens, random = len(rows) * cp_size, Random(1)
    draw = {
        "q": random.normal(tokens, HEADS, LATENT + ROPE, dtype=bf16),
        "kv": random.normal(tokens, LATENT, dtype=bf16),
        "k_pe": random.normal(tokens, ROPE, dtype=bf16),
        "index_q": random.normal(tokens, INDEX_HEADS, INDEX_DIM, dtype=bf16),
        "index_k": random.normal(tokens, INDEX_DIM, dtype=bf16),
        "head_weights": random.normal(tokens, INDEX_HEADS, dtype=f32),
        "d_out": random.normal(tokens, HEADS, HEAD_DIM, dtype=bf16),
    }
    w_vc = random.normal(HEADS, HEAD_DIM, LATENT, dtype=bf16)
    x = {name: value[rows].requires_grad_() for name, value in draw.items()}

    def gathered(name: str) -> torch.Tensor:
        return automodel.glm_dsa_cp_all_gather(x[name], dim=0, cp_group=group)

    indices = automodel.tilelang_indexer_topk(
        x["index_q"],
        gathered("index_k"),
        x["head_weights"],
        batch["cu_seqlens"],
        TOPK,
        batch["glm_dsa_cp_query_indices"],
        batch.get("cu_seqlens_padded"),
    )
    latent = torch.cat([gathered("kv"), gathered("k_pe")], -1)[:, None]
    out = automodel.tilelang_sparse_attention(x["q"], latent, indices, w_vc, 0.25)
    (out * x["d_out"]).sum().backward()
    results = {"ids": batch["input_ids"], "indices": indices, "out": out.detach()}
    return results | {f"d_{name}": x[name].grad for name in ("q", "kv", "k_pe")}


@pytest.mark.parametrize("chunks", [1, 2])
def test_ranks_equal_one_rank(ranks, chunks):
    one = _layer(1, chunks)
    parts = ranks(_layer, ranks.size, chunks)
    for name, expected in one.items():
        found = torch.cat([part[name] for part in parts])
        if name in ("d_kv", "d_k_pe"):  # every rank rounds its gradient before the sum over ranks
            assert_within(found, expected.to(f64), GRAD_LIMIT[bf16])
        else:
            assert_equal(found, expected)

# SPDX-License-Identifier: Apache-2.0
"""Automodel's batches and names against winnow; see test_automodel_layers.py."""

import ast
import importlib
import random as random_of
from pathlib import Path

import torch
from automodel_shared import installed  # noqa: F401
from cases import assert_equal
from nemo_automodel.components.models.glm_moe_dsa import cp as glm_cp
from nemo_automodel.components.models.glm_moe_dsa import layers as glm_layers
from nemo_automodel.components.models.glm_moe_dsa import model as glm_model

from winnow import automodel


class Mesh:
    def size(self) -> int:
        return 2

    def get_group(self) -> str:
        return "group"

    def get_local_rank(self) -> int:
        return 0


class TestBatches:
    def test_random_batches(self):
        """The batches that Automodel's own functions make, except those that winnow refuses."""
        random = random_of.Random(10)
        for _ in range(1500):
            batch, chunks = self.batch(random)
            arguments = (Mesh(), None, batch)
            ours = automodel.shard_glm_dsa_packed_cp_batch(*arguments, num_chunks=chunks)
            automodel.uninstall()
            theirs = glm_cp.shard_glm_dsa_packed_cp_batch(*arguments, num_chunks=chunks)
            automodel.install()
            assert ours[0] is theirs[0] and (ours[2] is None) == (theirs[2] is None)
            if ours[2] is not None:
                assert vars(ours[2]) == vars(theirs[2])
            assert ours[1].keys() == theirs[1].keys()
            for key, value in theirs[1].items():
                if isinstance(value, torch.Tensor):
                    assert_equal(ours[1][key], value)
                else:
                    assert ours[1][key] == value

    def batch(self, random) -> tuple[dict, int]:
        chunks, rows, tokens = (
            random.choice([1, 1, 2, 3]),
            random.randint(1, 2),
            2 * random.randint(1, 9),
        )
        with_padding = random.random() < 0.7
        real, padded = [], []
        for row in range(chunks * rows):
            cuts = sorted(random.sample(range(1, tokens), random.randint(0, min(3, tokens - 1))))
            lengths = [b - a for a, b in zip([0, *cuts], [*cuts, tokens], strict=True)]
            padded.append(lengths)
            if with_padding:
                lengths = [random.randint(1, n) for n in lengths]
            elif row % rows == rows - 1:
                lengths = [*lengths[:-1], random.randint(1, lengths[-1])]
            real.append(lengths)
        width = max(map(len, real))
        fill = [[row + [-1000] * (width - len(row)) for row in x] for x in (real, padded)]
        ids = torch.randint(0, 9, (chunks * rows, tokens))
        batch = {"input_ids": ids, "labels": ids + 1, "position_ids": ids + 2}
        batch["seq_lens"] = torch.tensor(fill[0])
        batch["seq_lens_padded"] = torch.tensor(fill[1]) if with_padding else None
        return batch, chunks


class TestInstall:
    def test_every_name_is_winnows_and_comes_back(self):
        automodel.uninstall()
        names = {
            glm_layers: [
                "tilelang_indexer_topk",
                "tilelang_sparse_attention",
                "should_use_tilelang",
            ],
            glm_model: ["shard_glm_dsa_packed_cp_batch", "prepare_cudnn_dsa_packed_metadata"],
            glm_cp: ["_slice_thd_chunk_for_cp"],
        }
        kernels = importlib.import_module(
            "nemo_automodel.components.models.deepseek_v4.optimized_kernels"
        )
        before = {(m, n): getattr(m, n) for m, own in names.items() for n in own}
        own_attention = kernels._miles_sparse_attn_tilelang
        served = automodel.install()
        assert "nemo_automodel.components.models.glm_moe_dsa.optimized_kernels" in served
        for (module, name), original in before.items():
            assert getattr(module, name) is getattr(automodel, name) is not original
        assert kernels._miles_sparse_attn_tilelang is automodel.sparse_attn_tilelang
        assert automodel.install() == served
        automodel.uninstall()
        automodel.uninstall()
        for (module, name), original in before.items():
            assert getattr(module, name) is original
        assert kernels._miles_sparse_attn_tilelang is own_attention
        automodel.install()

    def test_automodel_imports_no_name_that_winnow_lacks(self):
        """What its models import from the modules that are replaced."""
        imported = set()
        models = Path(glm_layers.__file__).parents[1]
        for family in ("glm_moe_dsa", "deepseek_v4", "deepseek_v41"):
            for file in (models / family).rglob("*.py"):
                for node in ast.walk(ast.parse(file.read_text())):
                    if isinstance(node, ast.ImportFrom) and node.module in (
                        "nemo_automodel.components.models.glm_moe_dsa.cp",
                        "nemo_automodel.components.models.glm_moe_dsa.optimized_kernels",
                        "nemo_automodel.components.models.deepseek_v4.kernels.sparse_attention",
                    ):
                        imported |= {name.name for name in node.names}
        assert imported and not [name for name in imported if not hasattr(automodel, name)]

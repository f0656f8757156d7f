# SPDX-License-Identifier: Apache-2.0
"""The way into the library: kinds of tensors, errors, workspace, backends."""

import os
import shutil
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import native
import numpy as np
import pytest
import torch
from cases import Random, assert_equal, bf16, f64

import winnow
from winnow import _lib

ANOTHER = os.path.join(os.path.dirname(torch.__file__), "lib", "libc10.so")


def loss_call(random: Random, rows: int = 3, **changes) -> dict:
    call = {
        "indices": random.integers(0, 9, rows, 4),
        "scores": random.normal(rows, 4),
        "target": random.normal(rows, 4).abs(),
        "loss": native.poison(rows, dtype=f64),
        "d_scores": native.poison(rows, 4, dtype=f64),
    }
    return call | changes


def attention_call(random: Random, dtype=bf16) -> dict:
    """A backward call with all that it can have."""
    q, kv = random.normal(30, 3, 16, dtype=dtype), random.normal(20, 16, dtype=dtype)
    indices, sink = random.lists(30, 7, 20), random.normal(3, dtype=torch.float32)
    out, lse, _ = native.sparse_attention(q, kv, indices, 8, sink=sink, scale=0.25)
    d_out = random.normal(30, 3, 8, dtype=dtype)
    call = {"q": q, "kv": kv, "indices": indices, "sink": sink, "out": out, "lse": lse}
    call |= {"d_out": d_out, "d_q": torch.empty_like(q), "d_kv": torch.empty_like(kv)}
    return call | {"d_sink": torch.zeros(3), "scale": 0.25}


def test_numpy_arrays_are_tensors():
    call = loss_call(Random(1))
    arrays = {name: tensor.numpy().copy() for name, tensor in call.items()}
    _lib.run("index_loss", **call)
    _lib.run("index_loss", **arrays)
    for name in ("loss", "d_scores"):
        assert_equal(torch.from_numpy(arrays[name]), call[name])


def test_numpy_views_keep_their_strides():
    call = loss_call(Random(2))
    wide = np.zeros((6, 9))
    wide[::2, 3:7] = call["scores"].numpy()
    _lib.run("index_loss", **call)
    other = loss_call(Random(2), scores=wide[::2, 3:7])
    _lib.run("index_loss", **other)
    assert_equal(other["loss"], call["loss"])


def test_an_array_that_may_not_be_written_is_refused():
    loss = np.zeros(3)
    loss.flags.writeable = False
    with pytest.raises(BufferError):
        _lib.run("index_loss", **loss_call(Random(3), loss=loss))


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (torch.zeros(3, 4, dtype=torch.int64), ValueError, "index_loss: scores has dtype int64"),
        (np.zeros((3, 4), np.int64), ValueError, "index_loss: scores has dtype int64"),
        (torch.zeros(3, 4, device="meta"), ValueError, "index_loss: scores is on device meta"),
        (torch.zeros(1, 1, 1, 1, 4), ValueError, "index_loss: scores has 5 dimensions"),
        (np.zeros((1, 1, 1, 1, 4)), ValueError, "index_loss: scores has 5 dimensions"),
        (np.zeros((3, 4)).T, ValueError, "index_loss: scores"),
        ([[1.0]], TypeError, "index_loss: scores is a list"),
        (torch.zeros((), dtype=f64), ValueError, "index_loss: scores"),
    ],
)
def test_what_is_no_tensor_for_winnow_is_refused_by_name(value, error, text):
    with pytest.raises(error, match=text):
        _lib.run("index_loss", **loss_call(Random(4), scores=value))


def test_numbers_that_do_not_fit_are_refused_by_name():
    for ratio in (2**40, 1.5, "two"):
        with pytest.raises(ValueError, match="key_windows: ratio"):
            _lib.run("key_windows", ratio=ratio)
    with pytest.raises(ValueError, match="execution: "):
        _lib.execution(workspace_bytes=-1)
    with pytest.raises(TypeError, match="key_windows: no argument rows"):
        _lib.run("key_windows", rows=3)


@pytest.mark.parametrize("op", list(_lib.operators))
def test_an_empty_call_names_its_first_argument(op):
    first = next(iter(_lib.operators[op].fields))
    for function in (_lib.run, _lib.workspace_bytes, _lib.why_not, _lib.explain):
        with pytest.raises(ValueError, match=f"{op}: {first} absent: must be given"):
            function(op)


def test_execution_is_checked():
    call = loss_call(Random(5))
    with pytest.raises(ValueError, match="backend 'gpu': must be one of automatic, reference"):
        _lib.execution(backend="gpu")
    with pytest.raises(ValueError, match="index_loss: threads -1"):
        _lib.run("index_loss", _lib.execution(threads=-1), **call)


def test_a_backend_that_is_not_there_says_why():
    usable = _lib.backends()
    assert usable["reference"]
    call = loss_call(Random(6))
    missing = [name for name in ("cpu", "cuda") if name not in usable]
    for name in missing:
        execution = _lib.execution(backend=name)
        reason = _lib.why_not("index_loss", execution, **call)
        assert f"the {name} backend" in reason
        with pytest.raises(NotImplementedError) as caught:
            _lib.run("index_loss", execution, **call)
        assert str(caught.value) == f"index_loss: {reason}"
        assert call["loss"].isnan().all()
    # What is wrong anywhere is said before what cannot be done here.
    for name in missing:
        with pytest.raises(ValueError, match="index_loss: target"):
            _lib.run("index_loss", _lib.execution(backend=name), **call | {"target": None})


def test_words_and_numbers_have_the_defaults_of_the_library():
    fields = _lib.operators["key_windows"].fields
    assert fields["padding_rows"].words == ("empty", "see_document")
    assert (fields["ratio"].struct.format, fields["ratio"].default) == ("i", struct.pack("i", 1))
    assert _lib.operators["sparse_attention_forward"].fields["scale"].struct.format == "f"
    with pytest.raises(ValueError, match="padding_rows 'full': must be one of empty, see_document"):
        _lib.run("key_windows", padding_rows="full")


def test_explain_names_every_kernel_and_the_first_that_can_runs():
    call = loss_call(Random(7))
    candidates = _lib.explain("index_loss", **call)
    names = {candidate.kernel for candidate in candidates if candidate.kernel}
    assert names and names <= _lib.KERNELS["index_loss"]
    can = [candidate for candidate in candidates if not candidate.reason]
    assert can and can[0].backend in _lib.backends()
    for candidate in can:
        execution = _lib.execution(backend=candidate.backend, kernel=candidate.kernel)
        other = loss_call(Random(7))
        _lib.run("index_loss", execution, **other)
        chosen = [c for c in _lib.explain("index_loss", execution, **other) if not c.reason]
        assert chosen == [candidate]
        assert other["loss"].isfinite().all()
    # Nothing of the cuda backend reaches these tensors, whether or not it is in this build.
    cannot = next(candidate for candidate in candidates if candidate.reason)
    assert (cannot.backend, cannot.kernel) == ("cuda", "")


def test_a_kernel_that_does_not_exist_is_refused_with_all_names():
    with pytest.raises(ValueError, match="index_loss: kernel .*fastest") as caught:
        _lib.run("index_loss", _lib.execution(kernel="fastest"), **loss_call(Random(8)))
    assert all(name in str(caught.value) for name in _lib.KERNELS["index_loss"])


def test_automatic_takes_a_backend_that_can():
    call = loss_call(Random(7))
    assert _lib.why_not("index_loss", **call) == ""
    _lib.run("index_loss", **call)
    assert call["loss"].isfinite().all()


def test_an_output_over_an_input_is_refused_by_name():
    call = loss_call(Random(4))
    call["d_scores"] = call["target"]
    with pytest.raises(ValueError, match="index_loss: d_scores overlaps target: "):
        _lib.run("index_loss", native.REFERENCE, **call)
    call["d_scores"], call["scores"] = torch.zeros(3, 8, dtype=f64).split(4, dim=1)
    _lib.run("index_loss", native.REFERENCE, **call)


def test_a_workspace_that_is_too_small_is_refused_with_both_sizes():
    call = attention_call(Random(8))
    size = _lib.workspace_bytes("sparse_attention_backward", native.REFERENCE, **call)
    assert size > 0
    memory = torch.zeros(size + 16, dtype=torch.uint8)
    address = -(-memory.data_ptr() // 16) * 16

    def run(given: int) -> None:
        own = {"workspace": address, "workspace_bytes": given}
        execution = _lib.execution(backend="reference", **own)
        _lib.run("sparse_attention_backward", execution, **call)

    with pytest.raises(ValueError, match=f"workspace.*{size - 1}.*{size}"):
        run(size - 1)
    assert not call["d_sink"].any()
    run(size)
    again = attention_call(Random(8))
    _lib.run("sparse_attention_backward", native.REFERENCE, **again)
    for name in ("d_q", "d_kv", "d_sink"):
        assert_equal(call[name], again[name])


def test_the_workspace_limit_changes_no_bit():
    whole = attention_call(Random(9))
    _lib.run("sparse_attention_backward", native.REFERENCE, **whole)
    done = 0
    for limit in (1 << 20, 1 << 14, 1 << 12, 1 << 10, 1 << 8, 0):
        call = attention_call(Random(9))
        execution = _lib.execution(backend="reference", workspace_limit=limit)
        reason = _lib.why_not("sparse_attention_backward", execution, **call)
        if reason:
            assert f"the limit is {limit}" in reason
            continue
        # The fp32 copy behind a bf16 d_kv comes on top of the limit.
        bytes_needed = _lib.workspace_bytes("sparse_attention_backward", execution, **call)
        assert bytes_needed <= limit + call["kv"].numel() * 8
        _lib.run("sparse_attention_backward", execution, **call)
        for name in ("d_q", "d_kv", "d_sink"):
            assert_equal(call[name], whole[name])
        done += 1
    assert done


def test_threads_do_not_mix_up_errors():
    def refused(n: int) -> bool:
        scores = torch.zeros(3, n + 5, dtype=f64)
        for _ in range(50):
            with pytest.raises(ValueError, match=f"scores f64\\[3, {n + 5}\\]"):
                _lib.run("index_loss", **loss_call(Random(n), scores=scores))
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(refused, range(8)))


def python(code: str, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", code]
    package = os.path.dirname(os.path.dirname(winnow.__file__))
    environment = os.environ | {"PYTHONPATH": package} | environment
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_the_library_is_called_without_torch():
    code = """
import sys, numpy as np
sys.modules["torch"] = None  # as if it were not installed
from winnow import _lib
begin, end = np.zeros(5, np.int32), np.zeros(5, np.int32)
_lib.run("key_windows", cu_seqlens=np.array([0, 3, 5], np.int32), begin=begin, end=end)
print(begin, end)
"""
    done = python(code)
    assert done.stdout == "[0 0 0 3 3] [1 2 3 4 5]\n", done.stderr


def test_without_torch_names_say_what_is_missing():
    done = python("import sys; sys.modules['torch'] = None; from winnow import index_topk")
    told = "winnow.index_topk: winnow needs PyTorch from 2.6 on: pip install torch\n"
    assert done.stderr.endswith(told)


def test_without_torch_the_program_says_what_is_missing():
    code = "import sys, runpy; sys.modules['torch'] = None; runpy.run_module('winnow.__main__')"
    done = python(code)
    told = "winnow: python -m winnow needs PyTorch from 2.6 on: pip install torch\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", told)


def test_a_library_of_another_version_is_refused(tmp_path):
    shutil.copytree(os.path.dirname(winnow.__file__), tmp_path / "winnow")
    changes = {
        "__init__.py": ('__version__ = "0.1.0"', '__version__ = "9.9.9"'),
        "_lib.py": ('"iPPNNi?PPP"', '"iPPNNi?PP"'),
    }
    for name, (old, new) in changes.items():
        file = tmp_path / "winnow" / name
        file.write_text(file.read_text().replace(old, new))
    code = "import sys; sys.modules['torch'] = None; import winnow._lib"  # torch takes 2 s
    done = python(code, PYTHONPATH=str(tmp_path), WINNOW_LIBRARY=_lib.path)
    differ = f"version {winnow.__version__} (here 9.9.9), Execution 72 (here 64)"
    assert f"does not belong to this package: {differ}" in done.stderr


@pytest.mark.parametrize(
    ("library", "told"),
    [
        ("/none/libwinnow.so", "cannot be loaded from /none/libwinnow.so: /none/libwinnow.so: "),
        (__file__, f"cannot be loaded from {__file__}: {__file__}: "),
        (ANOTHER, f"{ANOTHER} is not libwinnow.so; WINNOW_LIBRARY can name it"),
    ],
    ids=["no_file", "no_library", "another_library"],
)
def test_a_library_that_cannot_be_loaded_is_an_import_error(library, told):
    code = "import sys; sys.modules['torch'] = None; import winnow._lib"
    last = python(code, WINNOW_LIBRARY=library).stderr.splitlines()[-1]
    assert last.startswith("ImportError: ") and told in last


class TestHostFunctions:
    def test_rows_of_ranks_are_one_array(self):
        rows, counts = _lib.shard_rows([0, 4, 12], 12, 2, "zigzag")
        assert torch.frombuffer(rows, dtype=torch.int32).tolist() == [
            *(0, 3, 4, 5, 10, 11),
            *(1, 2, 6, 7, 8, 9),
        ]
        assert counts == [6, 6]
        rows, counts = _lib.shard_rows([0], 0, 3, "contiguous")
        assert len(rows) == 0 and counts == [0, 0, 0]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (([0, 5], 4, 2, "zigzag"), r"cu_seqlens\[1\] 5: must be at most 4, as tokens"),
            (([0, 2**31], 4, 2, "zigzag"), "cu_seqlens: signed integer is greater than maximum"),
            (([0.5], 4, 2, "zigzag"), "cu_seqlens: .*float"),
            (([0], 2**31, 2, "zigzag"), "tokens 2147483648: signed integer is greater"),
            (([0], -1, 2, "zigzag"), "tokens -1: must be at least 0"),
            (([0], 4, 2**20 + 1, "zigzag"), "ranks 1048577: must be at most 1048576"),
            (([0], 4, -1, "zigzag"), "ranks -1: must be at least 1"),
            (([0], 4, 2, "diagonal"), "sharding 'diagonal': must be one of contiguous, zigzag"),
            (([0], 4, 2, "zigzag", 0), "multiple 0: must be at least 1"),
        ],
    )
    def test_shards_are_refused_by_name(self, arguments, message):
        with pytest.raises(ValueError, match=message):
            _lib.shard_rows(*arguments)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (([3], [3, 3], 1, 3), r"seq_lens_padded \[2\]: must be \[1\]"),
            (([3], [3], 0, 3), "rows 0: must be at least 1"),
            (([3], [3], -1, 3), "rows -1: must be at least 1"),
            (([3], [3], 1, 3, 2**63), "fill 9223372036854775808: "),
            (([3], [3], 1, 3, -1000, 0), "chunks 0: must be at least 1"),
        ],
    )
    def test_layouts_are_refused_by_name(self, arguments, message):
        with pytest.raises(ValueError, match=message):
            _lib.thd_layout(*arguments)

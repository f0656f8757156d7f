# SPDX-License-Identifier: Apache-2.0
"""CUDA tensors: streams, graphs, memory, and the results of the CPU. Skipped without a GPU.

What the cuda backend cannot do yet is skipped with its own sentence.
"""

import pytest
import torch
from cases import (
    GRAD_LIMIT,
    LOW,
    OUT_LIMIT,
    Random,
    assert_equal,
    assert_within,
    bf16,
    f32,
    offsets,
)

import winnow
from winnow import _check, automodel

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or "cuda" not in winnow.backends(),
    reason="no CUDA device, or a library without CUDA",
)

SCALE = 0.0625


def need(function, *args, **kwargs) -> None:
    """Skips a test whose call the backend does not support."""
    if reason := winnow.why_not(function, *args, **kwargs):
        pytest.skip(reason)


def attention_inputs(dtype=bf16, device="cuda", tokens=96, heads=4):
    random = Random(1)
    q, kv = random.normal(tokens, heads, 576, dtype=dtype), random.normal(tokens, 576, dtype=dtype)
    indices = random.lists(tokens, 64, tokens)
    return q.to(device), kv.to(device), indices.to(device)


def attention(q, kv, indices, **options):
    return winnow.sparse_attention(q, kv, indices, v_dim=512, scale=SCALE, **options).out


@pytest.mark.parametrize("name", list(_check.CHECKS))
@pytest.mark.parametrize("dtype", [bf16, f32])
def test_against_plain_torch(name, dtype):
    batch = _check.Batch(dtype, "cuda", "cuda")
    need(lambda: (*_check.CHECKS[name](batch),))
    for comparison in _check.CHECKS[name](batch):
        assert comparison.actual.is_cuda
        assert comparison.error <= comparison.limit, comparison.name


@pytest.mark.parametrize("dtype", LOW)
def test_the_same_as_on_the_cpu(dtype):
    tensors = attention_inputs(dtype)
    on_cpu = attention(*(x.cpu() for x in tensors))
    assert_within(attention(*tensors).cpu(), on_cpu.double(), 2 * OUT_LIMIT[dtype])


def test_gradients_are_the_same_as_on_the_cpu():
    tensors = attention_inputs()
    inputs = [x.requires_grad_() for x in tensors[:2]]
    need(attention, *inputs, tensors[2])
    on_cpu = [x.detach().cpu().requires_grad_() for x in inputs]
    attention(*inputs, tensors[2]).float().square().sum().backward()
    attention(*on_cpu, tensors[2].cpu()).float().square().sum().backward()
    for a, b in zip(inputs, on_cpu, strict=True):
        assert_within(a.grad.cpu(), b.grad.double(), 2 * GRAD_LIMIT[bf16])


def test_calls_go_to_the_current_stream():
    q, kv, indices = attention_inputs()
    expected = attention(q, kv, indices)
    late = torch.empty_like(q)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(200_000_000)  # about a tenth of a second
        late.copy_(q)
        out = attention(late, kv, indices)
    torch.cuda.synchronize()
    assert_equal(out, expected)


def test_nothing_waits_for_the_device():
    q, kv, indices = attention_inputs()
    cu_seqlens = offsets([40, 56]).cuda()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        packing = winnow.Packing(cu_seqlens, tokens=96)
        packing.windows(4)
        winnow.window_indices(packing, window=8, ratio=4, key_offset=96)
        attention(q, kv, indices)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_forward_in_a_graph():
    q, kv, indices = attention_inputs()
    packing = winnow.Packing(offsets([40, 56]).cuda(), tokens=96)
    attention(q, kv, indices)  # warm-up, outside the graph
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        lists = winnow.window_indices(packing, window=16).indices
        out = attention(q, kv, indices) + attention(q, kv, lists)
    q.mul_(0.5)
    graph.replay()
    expected = attention(q, kv, indices) + attention(q, kv, lists)
    assert_equal(out, expected)


def test_a_training_step_in_a_graph():
    random = Random(2)
    q, kv, _ = attention_inputs()
    indexer = [random.normal(96, 8, 128, dtype=bf16), random.normal(96, 128, dtype=bf16)]
    indexer = [x.cuda() for x in (*indexer, random.normal(96, 8, dtype=f32))]
    tensors = [x.requires_grad_() for x in (q, kv, *indexer)]
    packing = winnow.Packing(offsets([40, 56]).cuda(), tokens=96)

    def step(q, kv, *indexer):
        selection = winnow.index_topk(*indexer, packing, topk=32)
        out, lse, _ = winnow.sparse_attention(
            q, kv, selection.indices, v_dim=512, scale=SCALE, lengths=selection.lengths
        )
        loss = winnow.index_loss(selection, q, kv, lse, scale=SCALE)
        return out.float().square().mean() + loss

    need(step, *tensors)

    def gradients():
        return torch.autograd.grad(step(*tensors), tensors)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            gradients()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradients()
    with torch.no_grad():
        q.mul_(0.5)
    graph.replay()
    for a, b in zip(captured, gradients(), strict=True):
        assert_within(a.double(), b.double(), 1e-2)


def test_tensors_on_two_devices_are_refused():
    q, kv, indices = attention_inputs()
    with pytest.raises(ValueError, match="kv .*must be on cuda:0, as q"):
        attention(q, kv.cpu(), indices)
    with pytest.raises(ValueError, match="must be on cpu, as q|must be on cuda:0"):
        attention(q.cpu(), kv, indices)


def test_the_cpu_backend_does_not_reach_the_gpu():
    with pytest.raises(NotImplementedError, match="the cpu backend cannot reach tensors on cuda"):
        attention(*attention_inputs(), backend="cpu")


def test_what_the_backend_lacks_is_named():
    x = torch.zeros(4, 8, device="cuda")
    try:
        winnow.quantize_fp8(x)
    except NotImplementedError as error:
        assert str(error).startswith("quantize_fp8: the cuda backend does not have this operator")


def test_memory_is_torchs():
    """Outputs and workspace are counted by torch's allocator, and nothing leaks."""
    tensors = attention_inputs(tokens=1024, heads=64)
    attention(*tensors)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = attention(*tensors)
    assert torch.cuda.max_memory_allocated() - before >= out.numel() * out.element_size()
    del out
    assert torch.cuda.memory_allocated() == before


def test_arrays_of_cupy():
    cupy = pytest.importorskip("cupy")
    q, kv, indices = attention_inputs(f32)
    arrays = (cupy.from_dlpack(x) for x in (q, kv, indices))
    out = attention(*arrays)
    assert_equal(out, attention(q, kv, indices))
    assert cupy.from_dlpack(out).data.ptr == out.data_ptr()


class TestAutomodel:
    def test_dispatch(self):
        x = torch.zeros(1, device="cuda", dtype=bf16)
        assert automodel._all_cuda(x, x) and not automodel._all_cuda(x, x.cpu())
        assert automodel.should_use_tilelang("tilelang", True, "sparse_attn", (x,), True)
        with pytest.raises(RuntimeError, match="sparse_attn: .*on cpu, cuda:0"):
            automodel.should_use_tilelang("tilelang", True, "sparse_attn", (x, x.cpu()))

    def test_sparse_attention(self):
        q, kv, indices = attention_inputs()
        w_vc = Random(3).normal(4, 128, 512, dtype=f32)
        call = (q, kv[:, None], indices[:, None], w_vc.cuda(), SCALE)
        actual = automodel.tilelang_sparse_attention(*call)
        on_cpu = automodel.tilelang_sparse_attention(
            *(x.cpu() if isinstance(x, torch.Tensor) else x for x in call)
        )
        assert_within(actual.cpu(), on_cpu.double(), 2 * OUT_LIMIT[bf16])

    def test_windows(self):
        cu_seqlens = torch.tensor([0, 2, 5, -1000], device="cuda")
        padded = torch.tensor([0, 4, 8, -1000], device="cuda")
        starts, ends = automodel._generate_padded_varlen_mask_params(cu_seqlens, padded)
        assert starts.is_cuda and starts.tolist() == [0, 0, 0, 0, 4, 4, 4, 4]
        assert ends.tolist() == [1, 2, 2, 2, 5, 6, 7, 7]


def test_compiled():
    q, kv, indices = attention_inputs()
    compiled = torch.compile(attention, fullgraph=True, dynamic=True)
    assert_equal(compiled(q, kv, indices), attention(q, kv, indices))
    assert_equal(compiled(q[:50], kv, indices[:50]), attention(q[:50], kv, indices[:50]))

# SPDX-License-Identifier: Apache-2.0
"""torch.ops.winnow: schemas, fake tensors, allocation, why_not and explain."""

import gc
import inspect
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from cases import Random, assert_equal, bf16, f8, f32, f64, offsets

import winnow
from winnow import _dlpack, _lib, ops, reference

TOKENS, HEADS, DIM, V_DIM, TOPK = 12, 3, 16, 8, 4
SCALE = 0.3125


class Inputs:
    """Tensors of one packed batch, as arguments of the operators."""

    def __init__(self, dtype: torch.dtype, seed: int = 1) -> None:
        random = Random(seed)
        low = f64 if dtype == f64 else f32
        self.cu_seqlens = offsets([5, 7])
        self.begin, self.end = reference.key_windows(self.cu_seqlens, TOKENS)
        self.indices = random.lists(TOKENS, TOPK, TOKENS)
        self.lengths = random.integers(0, TOPK, TOKENS)
        self.q = random.normal(TOKENS, HEADS, DIM, dtype=dtype)
        self.kv = random.normal(TOKENS, DIM, dtype=dtype)
        self.sink = random.normal(HEADS, dtype=low)
        self.index_q = random.normal(TOKENS, 2, 8, dtype=dtype)
        self.index_k = random.normal(TOKENS, 8, dtype=dtype)
        self.weights = random.normal(TOKENS, 2, dtype=low)
        self.w_v = random.normal(HEADS, 5, V_DIM, dtype=dtype)
        self.scores = random.normal(TOKENS, TOPK, dtype=low)
        self.target = random.normal(TOKENS, TOPK, dtype=low).abs()
        self.d_loss = random.normal(TOKENS, dtype=low)
        self.d_out = random.normal(TOKENS, HEADS, V_DIM, dtype=dtype)
        self.d_lse = random.normal(TOKENS, HEADS, dtype=low)
        attention = (self.q, self.kv, self.indices, self.lengths, self.sink, V_DIM, SCALE)
        self.out, self.lse, _ = torch.ops.winnow.sparse_attention_forward(*attention)


def calls(x: Inputs) -> dict[str, list[tuple]]:
    """Calls of every operator, with and without optional arguments."""
    padded, rows = offsets([6, 8]), torch.tensor([0, 7, -1, 3]).int()
    indexer = (x.index_q, x.index_k, x.weights)
    windows = (x.begin, x.end)
    attention = (x.q, x.kv, x.indices)
    dense = (x.q, x.kv, x.sink, *indexer, *windows)
    q8, k8 = (t.float().to(f8) for t in indexer[:2])
    k_scale = torch.ones(TOKENS)
    batch = [torch.stack([t, t]) for t in (*attention, x.lengths, x.out, x.lse, x.d_out, x.d_lse)]
    result = {
        "key_windows": [
            (x.cu_seqlens, None, None, TOKENS),
            (x.cu_seqlens, padded, rows, 4, 2, "see_document"),
        ],
        "window_indices": [
            (x.cu_seqlens, None, None, None, TOKENS, 7, 4, 4, 14),
            (x.cu_seqlens, padded, rows, torch.zeros(4, 2).int(), 4, 6, 3, 2, 14),
        ],
        "index_topk_forward": [
            (*indexer, None, *windows, TOPK),
            (*indexer, None, *windows, 2 * TOKENS, "by_score", False),
        ],
        "index_topk_replay": [
            (*indexer, None, *windows, x.indices, None),
            (*indexer, None, *windows, x.indices, x.lengths),
        ],
        "index_topk_backward": [(*indexer, *windows, x.indices, x.lengths, x.scores)],
        "sparse_attention_forward": [
            (*attention, None, None, V_DIM, SCALE),
            (*attention, x.lengths, x.sink, DIM, 0.0, True),
            (*batch[:4], x.sink, V_DIM, SCALE, True),
        ],
        "sparse_attention_backward": [
            (*attention, None, None, x.out, x.lse, x.d_out, None, SCALE),
            (*attention, x.lengths, x.sink, x.out, x.lse, x.d_out, x.d_lse, SCALE, 2),
            (*batch[:4], x.sink, *batch[4:], SCALE),
        ],
        "value_projection_forward": [(x.out, x.w_v)],
        "value_projection_backward": [(x.out, x.w_v, torch.ones(TOKENS, HEADS, 5).to(x.q.dtype))],
        "index_target": [
            (*attention, None, None, x.lse, SCALE),
            (*attention, x.lengths, x.sink, x.lse, SCALE, 2),
        ],
        "index_target_added": [(*attention, x.lengths, x.sink, x.lse, x.target, SCALE, 2)],
        "index_loss": [
            (x.indices, None, x.scores, x.target),
            (x.indices, x.lengths, x.scores, x.target),
        ],
        "dense_index_loss_forward": [(*dense, SCALE)],
        "dense_index_loss_given_lse": [(*dense, x.lse, SCALE)],
        "dense_index_loss_backward": [(*dense, x.lse, x.d_loss, SCALE)],
        "quantize_fp8": [(x.q,), (x.kv, True)],
    }
    if x.q.dtype == f64:
        del result["quantize_fp8"]
    else:
        result["index_topk_forward"] += [(q8, k8, x.weights, k_scale, *windows, TOPK)]
    return result


def every_call(dtype: torch.dtype, marks: tuple = ()) -> list:
    made = calls(Inputs(dtype))
    return [
        pytest.param(name, args, id=f"{name}-{i}", marks=marks)
        for name, examples in made.items()
        for i, args in enumerate(examples)
    ]


def test_every_operator_is_in_these_tests():
    assert set(calls(Inputs(bf16))) == set(ops._calls)
    assert {op for op, _ in ops._calls.values()} == set(_lib.operators)


@pytest.mark.parametrize(
    ("name", "args"), every_call(bf16) + every_call(f64, marks=(pytest.mark.slow,))
)
def test_opcheck(name, args):
    operator = getattr(torch.ops.winnow, name).default
    if args[0].dtype == f8:  # test_schema multiplies tensors, which torch does not support for fp8
        others = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
        torch.library.opcheck(operator, args, test_utils=others)
    else:
        torch.library.opcheck(operator, args)


@pytest.mark.parametrize(("name", "args"), every_call(f32) + every_call(f64))
def test_shapes_without_data(name, args):
    """The fake implementation returns the shapes and dtypes of the real one."""

    def to_meta(x):
        return x.to("meta") if isinstance(x, torch.Tensor) else x

    operator = getattr(torch.ops.winnow, name)
    with_data, without = operator(*args), operator(*map(to_meta, args))
    if isinstance(with_data, torch.Tensor):
        with_data, without = (with_data,), (without,)
    for a, b in zip(with_data, without, strict=True):
        if a is None:  # not requested
            assert b is None
        else:
            assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


def test_errors_know_which_fields_hold_int32():
    for name, examples in calls(Inputs(bf16)).items():
        op, describe = ops._calls[name]
        for field, value in describe(*examples[-1])[1].items():
            if isinstance(value, torch.Tensor) and field in _lib.operators[op].fields:
                assert (field in _lib._INDEX_FIELDS) == (value.dtype == torch.int32), field


def test_workspace_comes_from_torch(monkeypatch):
    taken = []

    def empty(size, **options):
        taken.append(size)
        return real_empty(size, **options)

    real_empty = torch.empty
    monkeypatch.setattr(ops.torch, "empty", empty)
    x = Inputs(bf16)
    taken.clear()
    args = (x.q, x.kv, x.indices, None, None, x.out, x.lse, x.d_out, None, SCALE)
    torch.ops.winnow.sparse_attention_backward(*args, backend="cpu")
    names = ("q", "kv", "indices", "lengths", "sink", "out", "lse", "d_out", "d_lse", "scale")
    outputs = {"d_q": x.q.clone(), "d_kv": x.kv.clone()}
    execution = _lib.execution(backend="cpu", threads=torch.get_num_threads())
    size = _lib.workspace_bytes(
        "sparse_attention_backward", execution, **dict(zip(names, args, strict=True)), **outputs
    )
    assert size > 0 and taken == [size]


class TestWorkspace:
    """The library allocates workspaces through a callback to torch's allocator."""

    def backward(self, x: Inputs, **options):
        args = (x.q, x.kv, x.indices, x.lengths, None, x.out, x.lse, x.d_out, None, SCALE)
        return torch.ops.winnow.sparse_attention_backward(*args, backend="cpu", **options)

    def test_an_error_of_the_allocator_comes_out_of_the_call(self, monkeypatch, capfd):
        error = torch.OutOfMemoryError("no memory left")

        def refuse(size, device):
            raise error

        x = Inputs(bf16)
        with monkeypatch.context() as patched:
            patched.setattr(ops, "_workspace", refuse)
            with pytest.raises(torch.OutOfMemoryError) as caught:
                self.backward(x)
        assert caught.value is error
        assert capfd.readouterr() == ("", "")
        assert all(t.isfinite().all() for t in self.backward(x)[:2])

    def test_after_an_error_no_tensor_is_held(self, monkeypatch):
        def refuse(size, device):
            raise RuntimeError("no memory left")

        x = Inputs(bf16)
        monkeypatch.setattr(ops, "_workspace", refuse)
        held = weakref.ref(x.d_out)
        gc.disable()
        try:
            with pytest.raises(RuntimeError, match="no memory left"):
                self.backward(x)
            del x
            assert held() is None
        finally:
            gc.enable()

    def test_an_allocator_may_call_operators(self, monkeypatch):
        x = Inputs(bf16)
        expected, real = self.backward(x), ops._workspace
        within = []

        def nested(size, device):
            if not within:
                within.append(None)
                within.extend(self.backward(x))
            return real(size, device)

        monkeypatch.setattr(ops, "_workspace", nested)
        for a, b, c in zip(self.backward(x)[:2], within[1:3], expected[:2], strict=True):
            assert_equal(a, c)
            assert_equal(b, c)

    def test_threads_have_a_workspace_each(self):
        batches = [Inputs(bf16, seed) for seed in range(4)]
        expected = [self.backward(x) for x in batches]

        def same(i: int) -> bool:
            actual = self.backward(batches[i % 4])
            return all(map(torch.equal, actual[:2], expected[i % 4][:2]))

        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(same, range(200)))


class TestPacking:
    """The exchange API and Python fill argument structs with the same bytes."""

    @pytest.mark.skipif(not ops._VIEW, reason="this torch has no exchange API")
    @pytest.mark.parametrize(("name", "args"), every_call(bf16) + every_call(f64))
    def test_viewed_tensors_are_those_that_python_describes(self, name, args):
        op, describe = ops._calls[name]
        turned = [  # other strides, and a storage offset
            torch.cat([t, t]).movedim(0, -1).contiguous().movedim(-1, 0)[len(t) :]
            if isinstance(t, torch.Tensor) and t.dim() and t.dtype != f8
            else t
            for t in args
        ]
        for call in (args, turned):
            _, fields = describe(*call)
            operator = _lib.operators[op]
            viewed = operator.pack_viewed(fields, ops._VIEW)
            assert viewed.raw == operator.pack(fields, []).raw

    def test_without_the_exchange_api_calls_are_the_same(self, monkeypatch):
        x = Inputs(bf16)
        monkeypatch.setattr(ops, "_VIEW", _dlpack.object_view(object))
        assert ops._VIEW == 0
        assert_equal(Inputs(bf16).out, x.out)

    def test_what_is_no_tensor_for_winnow_is_refused_by_name(self):
        x = Inputs(bf16)
        call = torch.ops.winnow.sparse_attention_forward
        for change, text in (
            ({"indices": x.indices.long()}, "indices has dtype int64"),
            ({"q": x.q[None, None]}, "q has 5 dimensions"),
        ):
            tensors = {"q": x.q, "kv": x.kv, "indices": x.indices} | change
            with pytest.raises(ValueError, match=f"sparse_attention_forward: {text}"):
                call(*tensors.values(), None, None, V_DIM, SCALE)


@pytest.fixture
def settings(monkeypatch) -> list[dict]:
    """Records backend, stream, threads and deterministic of every op that is run."""
    seen: list[dict] = []
    run = _lib.run_allocating
    signature = inspect.signature(run)

    def spy(*args):
        seen.append(signature.bind(*args).arguments)
        run(*args)

    monkeypatch.setattr(_lib, "run_allocating", spy)
    return seen


def test_threads_are_those_of_torch(settings):
    for threads in (1, 2):
        torch.set_num_threads(threads)
        Inputs(bf16)
    torch.set_num_threads(1)
    assert [call["threads"] for call in settings] == [1, 2]


def test_deterministic_algorithms_of_torch_are_heard(settings):
    Inputs(bf16)
    torch.use_deterministic_algorithms(True)
    try:
        Inputs(bf16)
    finally:
        torch.use_deterministic_algorithms(False)
    assert [call["deterministic"] for call in settings] == [False, True]


class TestWhyNot:
    def test_empty_where_a_call_can_run(self):
        x = Inputs(bf16)
        packing = winnow.Packing(x.cu_seqlens)
        indexer = [t.requires_grad_() for t in (x.index_q, x.index_k, x.weights)]
        assert winnow.why_not(winnow.index_topk, *indexer, packing, topk=3) == ""
        assert winnow.why_not(winnow.quantize_fp8, x.kv) == ""

    @pytest.mark.skipif("cuda" in winnow.backends(), reason="the cuda backend is here")
    def test_says_what_the_error_would(self):
        x = Inputs(bf16)
        call = {"v_dim": V_DIM, "scale": SCALE, "backend": "cuda"}
        reason = winnow.why_not(winnow.sparse_attention, x.q, x.kv, x.indices, **call)
        assert reason.startswith("sparse_attention_forward: the cuda backend ")
        with pytest.raises(NotImplementedError) as caught:
            winnow.sparse_attention(x.q, x.kv, x.indices, **call)
        assert str(caught.value) == reason

    def test_asks_for_backward_where_gradients_are_wanted(self):
        x = Inputs(f64)
        call = (winnow.sparse_attention, x.q.requires_grad_(), x.kv, x.indices)
        options = {"v_dim": V_DIM, "scale": SCALE, "backend": "cpu"}
        sentence = (
            "the cpu backend's kernel avx512_bf16 takes bf16; "
            "the cpu backend's kernel simd does not take f64: it computes in fp32"
        )
        assert winnow.why_not(*call, **options) == (
            f"sparse_attention_forward: {sentence}; sparse_attention_backward: {sentence}"
        )
        x.q.requires_grad_(False)
        assert winnow.why_not(*call, **options) == f"sparse_attention_forward: {sentence}"

    def test_goes_through_functions_of_several_operators(self):
        x = Inputs(f64)
        packing = winnow.Packing(x.cu_seqlens)

        def step(index_q):
            selection = winnow.index_topk(index_q, x.index_k, x.weights, packing, topk=3)
            attention = winnow.sparse_attention(x.q, x.kv, selection.indices, backend="cpu")
            return winnow.index_loss(selection, x.q, x.kv, attention.lse, scale=0.25)

        reason = winnow.why_not(step, x.index_q.requires_grad_())
        refusal = "the cpu backend's kernel simd does not take f64: it computes in fp32"
        assert reason.startswith("sparse_attention_forward: ") and reason.endswith(refusal)
        assert reason.count(refusal) == 1

    def test_nothing_runs(self, settings):
        x = Inputs(bf16)
        settings.clear()
        winnow.why_not(winnow.sparse_attention, x.q.requires_grad_(), x.kv, x.indices)
        assert not settings
        winnow.sparse_attention(x.q, x.kv, x.indices)
        assert len(settings) == 1

    def test_a_call_that_is_legal_nowhere_raises(self):
        x = Inputs(bf16)
        with pytest.raises(ValueError, match="sparse_attention_forward: kv"):
            winnow.why_not(winnow.sparse_attention, x.q, x.kv[:, :8], x.indices)


class TestExplain:
    def test_names_what_runs_and_why_not_the_others(self):
        x = Inputs(f64)
        call = (winnow.sparse_attention, x.q.requires_grad_(), x.kv, x.indices)
        told = winnow.explain(*call, v_dim=V_DIM, scale=SCALE)
        forward, backward = told.operators
        assert (forward.op, backward.op) == (
            "sparse_attention_forward",
            "sparse_attention_backward",
        )
        for choice in told.operators:
            assert choice.backend == "reference" and choice.kernel in _lib.KERNELS[choice.op]
            refused = {(c.backend, c.reason) for c in choice.refusals}
            assert ("cpu", "does not take f64: it computes in fp32") in refused
            assert "cuda" in {backend for backend, _ in refused}
            assert len(choice.refusals) + 1 == len(choice.candidates)

    def test_prints_as_a_table(self):
        x = Inputs(bf16)
        told = winnow.explain(winnow.quantize_fp8, x.kv)
        header, *lines = str(told).splitlines()
        assert header.split() == ["operator", "backend", "kernel"]
        (choice,) = told.operators
        assert len(lines) == len(choice.candidates)
        assert lines[0].startswith("quantize_fp8 ")
        runs = [line for line in lines if line.endswith("  runs")]
        assert len(runs) == 1 and choice.backend in runs[0] and choice.kernel in runs[0]
        assert any(line.endswith("could run") and "reference" in line for line in lines)

    def test_says_that_nothing_can(self):
        x = Inputs(f64)
        told = winnow.explain(winnow.sparse_attention, x.q, x.kv, x.indices, backend="cpu")
        (choice,) = told.operators
        assert choice.chosen is choice.backend is choice.kernel is None
        assert choice.refusals == choice.candidates

    def test_nothing_runs(self, settings):
        x = Inputs(bf16)
        settings.clear()
        winnow.explain(winnow.sparse_attention, x.q.requires_grad_(), x.kv, x.indices)
        assert not settings


class TestKernel:
    def test_forward_and_backward_take_the_kernel_of_that_name(self, settings):
        x, name = Inputs(bf16), "simd"
        x.q.requires_grad_()
        settings.clear()
        winnow.sparse_attention(x.q, x.kv, x.indices, kernel=name).out.sum().backward()
        assert [(call["op"], call["kernel"]) for call in settings] == [
            ("sparse_attention_forward", name),
            ("sparse_attention_backward", name),
        ]

    def test_backward_without_such_a_kernel_chooses(self, settings, monkeypatch):
        x, name = Inputs(bf16), "simd"
        monkeypatch.setitem(_lib.KERNELS, "sparse_attention_backward", frozenset())
        x.q.requires_grad_()
        settings.clear()
        winnow.sparse_attention(x.q, x.kv, x.indices, kernel=name).out.sum().backward()
        assert [call["kernel"] for call in settings] == [name, ""]

    def test_results_are_those_of_its_backend(self):
        x = Inputs(bf16)
        for name, backend in (("loops", "reference"), ("simd", "cpu")):
            by_name = winnow.quantize_fp8(x.kv, kernel=name)
            for a, b in zip(by_name, winnow.quantize_fp8(x.kv, backend=backend), strict=True):
                assert_equal(a.float(), b.float())
            told = winnow.explain(winnow.quantize_fp8, x.kv, kernel=name)
            assert told.operators[0].backend == backend

    def test_an_unknown_name_is_refused_with_all_names(self):
        x = Inputs(bf16)
        with pytest.raises(ValueError, match="sparse_attention_forward: kernel .*fastest") as error:
            winnow.sparse_attention(x.q, x.kv, x.indices, kernel="fastest")
        names = _lib.KERNELS["sparse_attention_forward"]
        assert names and all(name in str(error.value) for name in names)


def test_backends_are_described():
    usable = winnow.backends()
    assert usable["reference"] and usable["cpu"]


def test_results_equal_those_of_the_library_below():
    x = Inputs(bf16)
    out, lse = torch.full_like(x.out, torch.nan), torch.full_like(x.lse, torch.nan)
    fields = {"q": x.q, "kv": x.kv, "indices": x.indices, "lengths": x.lengths, "sink": x.sink}
    _lib.run("sparse_attention_forward", **fields, out=out, lse=lse, scale=SCALE)
    assert_equal(x.out, out)
    assert_equal(x.lse, lse)

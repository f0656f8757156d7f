# SPDX-License-Identifier: Apache-2.0
"""torch.ops.winnow.*: the operators of the library, registered with the dispatcher of PyTorch.

Every operator is a function of its inputs: it allocates its outputs and its workspace with torch's
allocator and runs on the current stream. One Python function per operator, which allocates the
outputs, serves the implementations for CPU and CUDA tensors, the fake one for torch.compile,
`why_not` and `explain`.

The operators are not differentiable; the functions of `winnow.functional` are. (An autograd
Function around an operator costs a fifth of what torch.library.register_autograd costs per call.)
"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from winnow import _dlpack, _lib

Outputs = dict[str, Tensor | None]  # None: not requested
Results = Tensor | tuple[Tensor | None, ...]
Fields = dict[str, Any]

_library = torch.library.Library("winnow", "DEF")
_calls: dict[str, tuple[str, Callable[..., tuple[Results, Fields]]]] = {}
# Not `kernel`: inductor calls an operator through a function that has such a parameter itself.
_OPTIONS = "str backend='automatic', str kernel_name='', bool deterministic=False"

_VIEW = _dlpack.object_view(Tensor)


def _workspace(size: int, device: torch.device) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device=device)


def _threads() -> int:
    return min(torch.get_num_threads(), 1024)  # the most that the library accepts


def _deterministic(asked: bool) -> bool:
    return asked or torch.are_deterministic_algorithms_enabled()


def _execution(op: str, options: dict[str, Any]) -> bytes:
    """That of a call with these keyword arguments, as far as it decides which kernel runs."""
    return _lib.execution(
        backend=options.get("backend", "automatic"),
        kernel=options.get("kernel_name", ""),
        threads=_threads(),
        deterministic=_deterministic(options.get("deterministic", False)),
        owner=op,
    )


def _check_devices(op: str, names: tuple[str, ...], args: tuple[Any, ...]) -> None:
    """Refuses what the library, which fake tensors do not reach, would refuse."""
    named = zip(names, args, strict=False)
    (first, x), *others = [(name, x) for name, x in named if isinstance(x, Tensor)]
    for name, other in others:
        if other.device != x.device:
            raise ValueError(f"{op}: {name} on {other.device}: must be on {x.device}, as {first}")


def _operator(inputs: str, outputs: str, struct: str | None = None, **constants: Any):
    """Registers torch.ops.winnow.<name> for a function of that name which allocates the outputs.

    It runs the op `struct` of the library, by default that of the same name. The fields of its
    argument struct are set from the inputs of those names, the outputs and the constants.
    """

    def register(make_outputs: Callable[..., Outputs]) -> Callable[..., Outputs]:
        name = make_outputs.__name__
        op = struct or name
        parameters = tuple(inspect.signature(make_outputs).parameters)

        def describe(*args: Any) -> tuple[Results, Fields]:
            made = make_outputs(*args)
            fields = dict(zip(parameters, args, strict=False))
            fields.update(made, **constants)
            first, *others = made.values()
            return (first, *others) if others or first is None else first, fields

        def run(
            *args: Any,
            backend: str = "automatic",
            kernel_name: str = "",
            deterministic: bool = False,
        ) -> Results:
            results, fields = describe(*args)
            device = args[0].device
            _lib.run_allocating(
                op,
                fields,
                _VIEW,
                _workspace,
                device,
                backend,
                kernel_name,
                torch.cuda.current_stream(device).cuda_stream if args[0].is_cuda else 0,
                _threads(),
                _deterministic(deterministic),
            )
            return results

        def fake(*args: Any, **options: Any) -> Results:
            _check_devices(op, parameters, args)
            return describe(*args)[0]

        schema = f"{name}({inputs}, *, {_OPTIONS}) -> {outputs}"
        _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        for device in ("CPU", "CUDA"):
            _library.impl(name, run, device)
        torch.library.register_fake(f"winnow::{name}", fake, lib=_library)
        _calls[name] = op, describe
        return make_outputs

    return register


class _Asking(TorchDispatchMode):
    """Inside this mode operators do not run; the result of a query about each call is collected.

    A dispatch mode, since autograd passes modes on to the threads that run backward.
    """

    def __init__(self, question: Callable[..., Any]) -> None:
        super().__init__()
        self.question = question
        self.answers: list[tuple[str, Any]] = []  # by name of the operator

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace != "winnow":
            return func(*args, **(kwargs or {}))
        op, describe = _calls[func._opname]
        execution = _execution(op, kwargs or {})
        results, fields = describe(*args)
        known = _lib.operators[op].fields
        fields = {name: value for name, value in fields.items() if name in known}
        self.answers.append((op, self.question(op, execution, **fields)))
        # The next operator may check the contents of these.
        for tensor in results if isinstance(results, tuple) else (results,):
            if tensor is not None:
                tensor.zero_()
        return results


def _ask(question: Callable[..., Any], function: Callable[..., Any], args, kwargs) -> list:
    """Queries every operator of a call, and of its backward if an input requires gradients."""
    with _Asking(question) as asking:
        results = function(*args, **kwargs)
        results = results if isinstance(results, tuple) else (results,)
        outputs, inputs = (
            [x for x in tensors if isinstance(x, Tensor) and x.requires_grad]
            for tensors in (results, (*args, *kwargs.values()))
        )
        if outputs and inputs:
            gradients = [torch.zeros_like(x) for x in outputs]
            torch.autograd.grad(outputs, inputs, gradients, allow_unused=True)
    return asking.answers


def why_not(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> str:
    """Empty if `function(*args, **kwargs)` can run here, else the reasons why not.

    `function` is one of winnow's, or calls them; no operator runs. If an argument requires
    gradients, backward is included. An invalid call raises ValueError, as it would without
    why_not.

        winnow.why_not(winnow.sparse_attention, q, kv, indices, backend="cuda")
    """
    answers = _ask(_lib.why_not, function, args, kwargs)
    return "; ".join(f"{op}: {reason}" for op, reason in answers if reason)


class Choice(NamedTuple):
    """Which kernel would run an operator of a call."""

    op: str
    candidates: list[_lib.Candidate]  # every kernel, best first: backend, kernel, reason

    @property
    def chosen(self) -> _lib.Candidate | None:
        """The first kernel that can run; None if none can."""
        return next((candidate for candidate in self.candidates if not candidate.reason), None)

    @property
    def backend(self) -> str | None:
        return self.chosen and self.chosen.backend

    @property
    def kernel(self) -> str | None:
        return self.chosen and self.chosen.kernel

    @property
    def refusals(self) -> list[_lib.Candidate]:
        """The kernels that cannot run, each with the reason."""
        return [candidate for candidate in self.candidates if candidate.reason]


class Explanation(NamedTuple):
    """A Choice for every operator of a call, in the order in which they run; prints as a table."""

    operators: list[Choice]

    def __str__(self) -> str:
        rows = [("operator", "backend", "kernel", "")]
        for choice in self.operators:
            op = choice.op
            for candidate in choice.candidates:
                could = "runs" if candidate is choice.chosen else "could run"
                rows.append((op, candidate.backend, candidate.kernel, candidate.reason or could))
                op = ""
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
        return "\n".join(lines)


def explain(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Explanation:
    """Which kernel would run every operator of `function(*args, **kwargs)`, and why no other.

    As in `why_not`, no operator runs, and backward is included if an argument requires gradients.

        print(winnow.explain(winnow.sparse_attention, q, kv, indices))
    """
    return Explanation([Choice(*answer) for answer in _ask(_lib.explain, function, args, kwargs)])


def _accumulator(x: Tensor) -> torch.dtype:
    """The dtype of lse, sink, weights and scores that belong to x."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _sum_over_rows(x: Tensor, unrounded: bool = False) -> Tensor:
    """Allocates a gradient that is summed over rows. The library adds to a tensor of the
    accumulation type and overwrites one of another type, rounded once. `unrounded`: to be summed
    over ranks."""
    if unrounded or x.dtype == _accumulator(x):
        contiguous = torch.contiguous_format
        return torch.zeros_like(x, dtype=_accumulator(x), memory_format=contiguous)
    return _like(x)


# Shapes are read by slices below, so that a tensor with too few dimensions reaches the library,
# which raises the error. They are passed as `size=`, since torch takes half a microsecond longer to
# parse a positional shape.


@_operator(
    "Tensor cu_seqlens, Tensor? cu_seqlens_padded, Tensor? query_rows, SymInt tokens, "
    "int ratio=1, str padding_rows='empty'",
    "(Tensor begin, Tensor end)",
)
def key_windows(
    cu_seqlens, cu_seqlens_padded, query_rows, tokens, ratio=1, padding_rows="empty"
) -> Outputs:
    size, dtype = (tokens,), torch.int32
    return {name: cu_seqlens.new_empty(size=size, dtype=dtype) for name in ("begin", "end")}


@_operator(
    "Tensor cu_seqlens, Tensor? cu_seqlens_padded, Tensor? query_rows, Tensor? pool_ids, "
    "SymInt tokens, SymInt topk, int window=0, int ratio=0, SymInt key_offset=0",
    "(Tensor indices, Tensor lengths)",
)
def window_indices(
    cu_seqlens,
    cu_seqlens_padded,
    query_rows,
    pool_ids,
    tokens,
    topk,
    window=0,
    ratio=0,
    key_offset=0,
) -> Outputs:
    return {
        "indices": cu_seqlens.new_empty(size=(tokens, topk), dtype=torch.int32),
        "lengths": cu_seqlens.new_empty(size=(tokens,), dtype=torch.int32),
    }


@_operator(
    "Tensor q, Tensor k, Tensor weights, Tensor? k_scale, Tensor begin, Tensor end, SymInt topk, "
    "str order='ascending', bool with_scores=True",
    "(Tensor indices, Tensor lengths, Tensor? scores)",
)
def index_topk_forward(
    q, k, weights, k_scale, begin, end, topk, order="ascending", with_scores=True
) -> Outputs:
    tokens = q.shape[:1]
    return {
        "indices": q.new_empty(size=(*tokens, topk), dtype=torch.int32),
        "lengths": q.new_empty(size=tokens, dtype=torch.int32),
        "scores": weights.new_empty(size=(*tokens, topk)) if with_scores else None,
    }


@_operator(
    "Tensor q, Tensor k, Tensor weights, Tensor? k_scale, Tensor begin, Tensor end, "
    "Tensor indices, Tensor? lengths",
    "Tensor",
    struct="index_topk_forward",
    replay=True,
)
def index_topk_replay(q, k, weights, k_scale, begin, end, indices, lengths) -> Outputs:
    return {"scores": weights.new_empty(size=indices.shape)}


@_operator(
    "Tensor q, Tensor k, Tensor weights, Tensor begin, Tensor end, Tensor indices, "
    "Tensor? lengths, Tensor d_scores, bool unrounded_d_k=False",
    "(Tensor d_q, Tensor d_k, Tensor d_weights)",
)
def index_topk_backward(
    q, k, weights, begin, end, indices, lengths, d_scores, unrounded_d_k=False
) -> Outputs:
    return {
        "d_q": _like(q),
        "d_k": _sum_over_rows(k, unrounded_d_k),
        "d_weights": _like(weights),
    }


@_operator(
    "Tensor q, Tensor kv, Tensor indices, Tensor? lengths, Tensor? sink, SymInt v_dim, "
    "float scale, bool with_max_logits=False",
    "(Tensor out, Tensor lse, Tensor? max_logits)",
)
def sparse_attention_forward(
    q, kv, indices, lengths, sink, v_dim, scale, with_max_logits=False
) -> Outputs:
    rows, dtype = q.shape[:-1], _accumulator(q)
    return {
        "out": q.new_empty(size=(*rows, v_dim)),
        "lse": q.new_empty(size=rows, dtype=dtype),
        "max_logits": q.new_empty(size=rows, dtype=dtype) if with_max_logits else None,
    }


@_operator(
    "Tensor q, Tensor kv, Tensor indices, Tensor? lengths, Tensor? sink, Tensor out, Tensor lse, "
    "Tensor d_out, Tensor? d_lse, float scale, int max_heads_per_pass=0, "
    "bool unrounded_d_kv=False",
    "(Tensor d_q, Tensor d_kv, Tensor? d_sink)",
)
def sparse_attention_backward(
    q,
    kv,
    indices,
    lengths,
    sink,
    out,
    lse,
    d_out,
    d_lse,
    scale,
    max_heads_per_pass=0,
    unrounded_d_kv=False,
) -> Outputs:
    return {
        "d_q": _like(q),
        "d_kv": _sum_over_rows(kv, unrounded_d_kv),
        "d_sink": None if sink is None else torch.zeros_like(sink),
    }


@_operator("Tensor out, Tensor w_v", "Tensor")
def value_projection_forward(out, w_v) -> Outputs:
    return {"out_v": out.new_empty(size=(*out.shape[:-1], *w_v.shape[1:2]))}


@_operator("Tensor out, Tensor w_v, Tensor d_out_v", "(Tensor d_out, Tensor d_w_v)")
def value_projection_backward(out, w_v, d_out_v) -> Outputs:
    return {"d_out": _like(out), "d_w_v": _sum_over_rows(w_v)}


@_operator(
    "Tensor q, Tensor kv, Tensor indices, Tensor? lengths, Tensor? sink, Tensor lse, "
    "float scale, SymInt key_offset=0",
    "Tensor",
)
def index_target(q, kv, indices, lengths, sink, lse, scale, key_offset=0) -> Outputs:
    return {"target": lse.new_empty(size=indices.shape)}


@_operator(
    "Tensor q, Tensor kv, Tensor indices, Tensor? lengths, Tensor? sink, Tensor lse, "
    "Tensor target, float scale, SymInt key_offset=0",
    "Tensor",
    struct="index_target",
    accumulate=True,
)
def index_target_added(q, kv, indices, lengths, sink, lse, target, scale, key_offset=0) -> Outputs:
    return {"target": target.clone(memory_format=torch.contiguous_format)}


@_operator(
    "Tensor indices, Tensor? lengths, Tensor scores, Tensor target",
    "(Tensor loss, Tensor d_scores)",
)
def index_loss(indices, lengths, scores, target) -> Outputs:
    return {"loss": scores.new_empty(size=scores.shape[:1]), "d_scores": _like(scores)}


@_operator(
    "Tensor q, Tensor kv, Tensor? sink, Tensor index_q, Tensor index_k, Tensor weights, "
    "Tensor begin, Tensor end, float scale, SymInt key_offset=0",
    "(Tensor loss, Tensor lse)",
)
def dense_index_loss_forward(
    q, kv, sink, index_q, index_k, weights, begin, end, scale, key_offset=0
) -> Outputs:
    dtype = _accumulator(q)
    return {
        "loss": q.new_empty(size=q.shape[:1], dtype=dtype),
        "lse": q.new_empty(size=q.shape[:-1], dtype=dtype),
    }


@_operator(
    "Tensor q, Tensor kv, Tensor? sink, Tensor index_q, Tensor index_k, Tensor weights, "
    "Tensor begin, Tensor end, Tensor lse, float scale, SymInt key_offset=0",
    "Tensor",
    struct="dense_index_loss_forward",
    lse_given=True,
)
def dense_index_loss_given_lse(
    q, kv, sink, index_q, index_k, weights, begin, end, lse, scale, key_offset=0
) -> Outputs:
    return {"loss": q.new_empty(size=q.shape[:1], dtype=_accumulator(q))}


@_operator(
    "Tensor q, Tensor kv, Tensor? sink, Tensor index_q, Tensor index_k, Tensor weights, "
    "Tensor begin, Tensor end, Tensor lse, Tensor d_loss, float scale, SymInt key_offset=0, "
    "bool unrounded_d_index_k=False",
    "(Tensor d_index_q, Tensor d_index_k, Tensor d_weights)",
)
def dense_index_loss_backward(
    q,
    kv,
    sink,
    index_q,
    index_k,
    weights,
    begin,
    end,
    lse,
    d_loss,
    scale,
    key_offset=0,
    unrounded_d_index_k=False,
) -> Outputs:
    return {
        "d_index_q": _like(index_q),
        "d_index_k": _sum_over_rows(index_k, unrounded_d_index_k),
        "d_weights": _like(weights),
    }


@_operator("Tensor x, bool power_of_two=False", "(Tensor values, Tensor scale)")
def quantize_fp8(x, power_of_two=False) -> Outputs:
    return {
        "values": x.new_empty(size=x.shape, dtype=torch.float8_e4m3fn),
        "scale": x.new_empty(size=x.shape[:-1], dtype=torch.float32),
    }

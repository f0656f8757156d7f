# SPDX-License-Identifier: Apache-2.0
"""Calls into libwinnow.so: finds it, packs the argument structs, turns error codes into exceptions.

The only file that knows ctypes. Tensors are torch tensors, or anything with ``__dlpack__``; outputs
are tensors that the caller made. On a CUDA stream they must live until it has passed the call.
"""

import ctypes
import os
import struct
from array import array
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from winnow import __version__

# The argument structs of include/winnow, field by field in their order. A bare word is a tensor, a
# number has its letter of the struct module and its default, an enum its words, the default first.
_STRUCTS = {
    "key_windows": """
        cu_seqlens cu_seqlens_padded query_rows ratio:i=1 padding_rows:empty|see_document
        begin end""",
    "window_indices": """
        cu_seqlens cu_seqlens_padded query_rows window:i=0 ratio:i=0 key_offset:i=0
        pool_ids indices lengths""",
    "index_topk_forward": """
        q k weights k_scale begin end indices lengths scores order:ascending|by_score replay:?=0""",
    "index_topk_backward": """
        q k weights begin end indices lengths d_scores d_q d_weights d_k""",
    "sparse_attention_forward": """
        q kv indices lengths sink out lse max_logits scale:f=0""",
    "sparse_attention_backward": """
        q kv indices lengths sink out lse d_out d_lse d_q d_kv d_sink scale:f=0
        max_heads_per_pass:i=0""",
    "value_projection_forward": """
        out w_v out_v""",
    "value_projection_backward": """
        out w_v d_out_v d_out d_w_v""",
    "index_target": """
        q kv indices lengths sink lse target scale:f=0 key_offset:i=0""",
    "index_loss": """
        indices lengths scores target loss d_scores""",
    "dense_index_loss_forward": """
        q kv sink index_q index_k weights begin end loss lse scale:f=0 key_offset:i=0""",
    "dense_index_loss_backward": """
        q kv sink index_q index_k weights begin end lse d_loss d_index_q d_weights d_index_k
        scale:f=0 key_offset:i=0""",
    "quantize_fp8": """
        x values scale power_of_two:?=0""",
}
_EXECUTION = """
    backend:automatic|reference|cpu|cuda stream:P=0 workspace:P=0 workspace_bytes:N=0
    workspace_limit:N=268435456 threads:i=0 deterministic:?=0"""

# winnow::Tensor by rank: data, dtype, device kind, device index, rank, shape, stride.
_TENSORS = tuple(
    struct.Struct(f"Piiii{rank}q{8 * (4 - rank)}x{rank}q{8 * (4 - rank)}x") for rank in range(5)
)
_ABSENT = _TENSORS[0].pack(0, 0, 0, 0, -1)
_DTYPES = ("float32", "bfloat16", "float16", "float64", "float8_e4m3fn", "int32")

# By type code, bits and lanes.
_DLPACK_DTYPES = {
    (2, 32, 1): "float32",
    (4, 16, 1): "bfloat16",
    (2, 16, 1): "float16",
    (2, 64, 1): "float64",
    (10, 8, 1): "float8_e4m3fn",
    (0, 32, 1): "int32",
}
_DLPACK_DEVICES = {1: 0, 2: 1, 3: 0}  # cpu, cuda, pinned host memory

_ERRORS = {1: ValueError, 2: NotImplementedError, 3: MemoryError}  # ErrorCode; others: RuntimeError


class _TensorField:
    """A winnow::Tensor of an argument struct; `_view` packs it."""

    size, alignment, default = len(_ABSENT), struct.calcsize("P"), _ABSENT

    def __init__(self, name: str) -> None:
        self.name, self.pack = name, _view


class _NumberField:
    """A number of a letter of the struct module, or an enum by its words."""

    def __init__(self, name: str, letter: str, default: int, words: tuple[str, ...] = ()) -> None:
        self.name, self.letter, self.words = name, letter, words
        self.size = self.alignment = struct.calcsize(letter)
        self.default = struct.pack(letter, default)

    def number(self, owner: str, value: Any) -> Any:
        """What stands in the struct for a value."""
        if not self.words:
            return value
        if value not in self.words:
            allowed = ", ".join(self.words)
            raise ValueError(f"{owner}: {self.name} {value!r}: must be one of {allowed}")
        return self.words.index(value)

    def pack(self, owner: str, name: str, value: Any, keep: list[Any]) -> bytes:
        try:
            return struct.pack(self.letter, self.number(owner, value))
        except (struct.error, OverflowError) as error:
            raise ValueError(f"{owner}: {name} {value!r}: {error}") from None


def _field(word: str) -> _TensorField | _NumberField:
    name, _, kind = word.partition(":")
    if not kind:
        return _TensorField(name)
    if "|" in kind:
        return _NumberField(name, "i", 0, tuple(kind.split("|")))
    letter, _, default = kind.partition("=")
    return _NumberField(name, letter, int(default))


class _Layout:
    """A C struct as a sequence of pieces: its fields, and the padding between them."""

    def __init__(self, spec: str) -> None:
        self.fields = [_field(word) for word in spec.split()]
        self._pieces: list[bytes] = []  # of a struct in which everything has its default
        self._places: dict[str, tuple[int, Callable[..., bytes]]] = {}
        self.size = 0
        for field in self.fields:
            self._pad(field.alignment)
            self._places[field.name] = len(self._pieces), field.pack
            self._pieces.append(field.default)
            self.size += field.size
        self._pad(struct.calcsize("P"))

    def _pad(self, alignment: int) -> None:
        if padding := -self.size % alignment:
            self._pieces.append(bytes(padding))
            self.size += padding

    def pack(self, owner: str, given: dict[str, Any], keep: list[Any]) -> bytes:
        """The struct's bytes. What must live as long as they do is added to `keep`."""
        pieces, places = self._pieces.copy(), self._places
        for name, value in given.items():
            if name not in places:
                raise TypeError(f"{owner}: no argument {name}")
            place, pack = places[name]
            pieces[place] = pack(owner, name, value, keep)
        return b"".join(pieces)


class _DLTensor(ctypes.Structure):
    """DLPack's tensor, with which its managed tensor begins."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


_dtype_numbers: dict[Any, int] = {}  # of torch.dtype objects, as they come


def _view(op: str, name: str, tensor: Any, keep: list[Any]) -> bytes:
    """A winnow::Tensor; None is an absent one."""
    if tensor is None:
        return _ABSENT
    if hasattr(tensor, "data_ptr"):  # torch
        number = _dtype_numbers.get(tensor.dtype)
        if number is None:
            number = _dtype_number(op, name, str(tensor.dtype).removeprefix("torch."))
            _dtype_numbers[tensor.dtype] = number
        if tensor.is_cpu:
            kind = index = 0
        elif tensor.is_cuda:
            kind, index = 1, tensor.get_device()
        else:
            raise ValueError(f"{op}: {name} is on device {tensor.device}: must be cpu or cuda")
        data, shape, stride = tensor.data_ptr(), tensor.shape, tensor.stride()
    elif hasattr(tensor, "__dlpack__"):
        capsule = tensor.__dlpack__()
        keep.append(capsule)
        view = _DLTensor.from_address(_capsule_pointer(capsule, b"dltensor"))
        dtype = _DLPACK_DTYPES.get((view.code, view.bits, view.lanes), f"{tensor.dtype}")
        number = _dtype_number(op, name, dtype)
        if view.device_type not in _DLPACK_DEVICES:
            raise ValueError(
                f"{op}: {name} has DLPack device {view.device_type}: must be 1, 2 or 3"
            )
        kind, index = _DLPACK_DEVICES[view.device_type], view.device_id
        data, shape = (view.data or 0) + view.byte_offset, view.shape[: view.ndim]
        stride = view.strides[: view.ndim] if view.strides else _contiguous(shape)
    else:
        raise TypeError(f"{op}: {name} is a {type(tensor).__name__}: must be a tensor")
    rank = len(shape)
    if rank >= len(_TENSORS):
        raise ValueError(f"{op}: {name} has {rank} dimensions: must be at most {len(_TENSORS) - 1}")
    return _TENSORS[rank].pack(data, number, kind, index, rank, *shape, *stride)


def _dtype_number(op: str, name: str, dtype: str) -> int:
    if dtype not in _DTYPES:
        raise ValueError(f"{op}: {name} has dtype {dtype}: must be one of {', '.join(_DTYPES)}")
    return _DTYPES.index(dtype)


def _contiguous(shape: list[int]) -> list[int]:
    stride = [1] * len(shape)
    for i in reversed(range(len(shape) - 1)):
        stride[i] = stride[i + 1] * shape[i + 1]
    return stride


class _Op(ctypes.Structure):
    """An entry of the library's table, src/c_abi.cc."""

    _run = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p)
    _ask = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_void_p)
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("args_bytes", ctypes.c_size_t),
        ("run", _run),
        ("workspace_bytes", _ask),
        ("why_not", _ask),
    ]


class _Functions(NamedTuple):
    """What _Op holds, without the cost of asking a ctypes.Structure for it in every call."""

    run: Callable[..., int]
    workspace_bytes: Callable[..., int]
    why_not: Callable[..., int]


def _find() -> str:
    if named := os.environ.get("WINNOW_LIBRARY"):
        return os.path.abspath(named)
    here = Path(__file__).resolve().parent
    places = [here / "libwinnow.so", here.parents[1] / "build" / "release" / "libwinnow.so"]
    for place in places:
        if place.exists():
            return str(place)
    looked = ", ".join(map(str, places))
    raise ImportError(f"libwinnow.so not found: looked at {looked}; WINNOW_LIBRARY can name it")


def _load() -> tuple[ctypes.CDLL, dict[str, _Functions]]:
    """The library and its ops, once it is certain that both sides mean the same bytes."""
    path = _find()
    lib = ctypes.CDLL(path)
    lib.winnow_version.restype = lib.winnow_last_error.restype = ctypes.c_char_p
    lib.winnow_tensor_bytes.restype = lib.winnow_execution_bytes.restype = ctypes.c_size_t
    lib.winnow_ops.restype = ctypes.POINTER(_Op)
    count = ctypes.c_size_t()
    table = lib.winnow_ops(ctypes.byref(count))
    ops = table[: count.value]
    theirs: dict[str, Any] = {op.name.decode(): op.args_bytes for op in ops}
    theirs |= {"Tensor": lib.winnow_tensor_bytes(), "Execution": lib.winnow_execution_bytes()}
    theirs["version"] = lib.winnow_version().decode()
    ours: dict[str, Any] = {name: layout.size for name, layout in _LAYOUTS.items()}
    ours |= {"Tensor": len(_ABSENT), "Execution": _EXECUTION_LAYOUT.size}
    ours["version"] = __version__
    if ours != theirs:
        names = sorted(n for n in ours.keys() | theirs.keys() if ours.get(n) != theirs.get(n))
        differ = ", ".join(f"{n} {theirs.get(n)} (here {ours.get(n)})" for n in names)
        raise ImportError(f"{path} does not belong to this package: {differ}")
    return lib, {op.name.decode(): _Functions(op.run, op.workspace_bytes, op.why_not) for op in ops}


_LAYOUTS = {name: _Layout(spec) for name, spec in _STRUCTS.items()}
_EXECUTION_LAYOUT = _Layout(_EXECUTION)
_BACKEND = _EXECUTION_LAYOUT.fields[0]
# All of an Execution in one go, for the calls that count microseconds.
_EXECUTION_STRUCT = struct.Struct(
    "".join(field.letter for field in _EXECUTION_LAYOUT.fields) + "0P"
)
_WORKSPACE_LIMIT = 256 << 20
SHARDINGS = ("contiguous", "zigzag")
_SHARDING = _NumberField("sharding", "i", 0, SHARDINGS)
_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_lib, _ops = _load()
path: str = _lib._name


def _check(code: int) -> None:
    if code:
        raise _ERRORS.get(code, RuntimeError)(_lib.winnow_last_error().decode())


def _text(call: Callable[..., int], *arguments: Any) -> str:
    text = ctypes.c_char_p()
    _check(call(*arguments, ctypes.byref(text)))
    return (text.value or b"").decode()


def execution(**fields: Any) -> bytes:
    """winnow::Execution by its fields; `workspace` is an address."""
    return _EXECUTION_LAYOUT.pack("execution", fields, [])


def field_names(op: str) -> frozenset[str]:
    """The fields of an op's argument struct."""
    return frozenset(field.name for field in _LAYOUTS[op].fields)


_AUTOMATIC = execution()


def run(op: str, execution: bytes = _AUTOMATIC, /, **arguments: Any) -> None:
    """Runs an op. Arguments are the fields of its struct; a tensor that is None is absent."""
    keep: list[Any] = []
    _check(_ops[op].run(_LAYOUTS[op].pack(op, arguments, keep), execution))


def run_allocating(
    op: str,
    arguments: dict[str, Any],
    allocate: Callable[[int], Any],
    backend: str,
    stream: int,
    threads: int,
    deterministic: bool,
) -> None:
    """Runs an op in a workspace that `allocate` makes: a torch tensor of so many bytes."""
    keep: list[Any] = []
    args = _LAYOUTS[op].pack(op, arguments, keep)
    backend_number = _BACKEND.number(op, backend)
    size = ctypes.c_size_t()
    run, workspace_bytes, _ = _ops[op]
    rest = (_WORKSPACE_LIMIT, threads, deterministic)
    execution = _EXECUTION_STRUCT.pack(backend_number, stream, 0, 0, *rest)
    _check(workspace_bytes(args, execution, ctypes.byref(size)))
    if size.value:
        workspace = allocate(size.value)  # lives until the call has been made
        address = workspace.data_ptr()
        execution = _EXECUTION_STRUCT.pack(backend_number, stream, address, size.value, *rest)
    _check(run(args, execution))


def workspace_bytes(op: str, execution: bytes = _AUTOMATIC, /, **arguments: Any) -> int:
    """What such a call takes as workspace."""
    keep: list[Any] = []
    size = ctypes.c_size_t()
    args = _LAYOUTS[op].pack(op, arguments, keep)
    _check(_ops[op].workspace_bytes(args, execution, ctypes.byref(size)))
    return size.value


def why_not(op: str, execution: bytes = _AUTOMATIC, /, **arguments: Any) -> str:
    """Empty if such a call can run, else a sentence that says why not."""
    keep: list[Any] = []
    return _text(_ops[op].why_not, _LAYOUTS[op].pack(op, arguments, keep), execution)


def backend_why_not(backend: str) -> str:
    """Empty if the backend is usable here, else a sentence that says why not."""
    return _text(_lib.winnow_backend_why_not, _BACKEND.number("backend_why_not", backend))


def backends() -> dict[str, str]:
    """What every backend that is usable here runs on."""
    usable = [word for word in _BACKEND.words[1:] if not backend_why_not(word)]
    describe = _lib.winnow_backend_describe
    return {word: _text(describe, _BACKEND.words.index(word)) for word in usable}


def _integers(owner: str, name: str, letter: str, values: Iterable[int]) -> array:
    """Host memory of the C type that the letter stands for."""
    try:
        return array(letter, values)
    except (OverflowError, TypeError) as error:
        raise ValueError(f"{owner}: {name}: {error}") from None


def _check_sizes(owner: str, letter: str, **sizes: int) -> None:
    """Those that the C type cannot hold are refused by name."""
    for name, size in sizes.items():
        _integers(owner, f"{name} {size}", letter, (size,))


def _address(numbers: array) -> ctypes.c_void_p:
    return ctypes.c_void_p(numbers.buffer_info()[0])


def shard_rows(
    cu_seqlens: Iterable[int], tokens: int, ranks: int, sharding: str, multiple: int = 1
) -> tuple[array, list[int]]:
    """The rows that every rank holds, winnow::shard_rows.

    Returns:
        rows: array("i") of `tokens` numbers: the rows of rank 0, ascending, then those of rank 1
            and so on. torch.frombuffer(rows, dtype=torch.int32) takes it as it is (if tokens > 0).
        counts: how many of them each rank has; a tensor of all rows is cut by split(counts).
    """
    name = "shard_rows"
    _check_sizes(name, "i", tokens=tokens, ranks=ranks, multiple=multiple)
    offsets = _integers(name, "cu_seqlens", "i", cu_seqlens)
    rows, counts = array("i", [0]) * tokens, (ctypes.c_int64 * max(ranks, 0))()
    _check(
        _lib.winnow_shard_rows(
            _address(offsets),
            ctypes.c_size_t(len(offsets)),
            ctypes.c_int64(tokens),
            ranks,
            _SHARDING.number(name, sharding),
            multiple,
            _address(rows),
            counts,
        )
    )
    return rows, list(counts)


class ThdLayout(NamedTuple):
    """winnow::ThdLayout; torch.frombuffer takes its arrays as they are."""

    cu_seqlens: array  # "i", [chunks, offsets]
    cu_seqlens_padded: array | None  # "i", [chunks, offsets]; None if the same
    max_seqlen: array  # "i", [chunks]
    padding_mask: bytearray  # [rows, row_tokens], 1: padding


def thd_layout(
    seq_lens: Iterable[int],  # [rows, most documents of a row]
    seq_lens_padded: Iterable[int],  # the same
    rows: int,
    row_tokens: int,
    fill: int = -1000,
    chunks: int = 1,
) -> ThdLayout:
    """Where the documents of a padded batch stand once it is flat: winnow::thd_layout."""
    name = "thd_batch"
    sizes = (rows, row_tokens, fill, chunks)
    _check_sizes(name, "q", rows=rows, row_tokens=row_tokens, fill=fill, chunks=chunks)
    real = _integers(name, "seq_lens", "q", seq_lens)
    padded = _integers(name, "seq_lens_padded", "q", seq_lens_padded)
    if len(padded) != len(real):
        raise ValueError(f"{name}: seq_lens_padded [{len(padded)}]: must be [{len(real)}]")
    offsets, has_padded = ctypes.c_int64(), ctypes.c_int()
    cu_seqlens, cu_seqlens_padded = (array("i", [0]) * (len(real) + rows) for _ in range(2))
    max_seqlen, padding_mask = array("i", [0]) * rows, bytearray(max(rows * row_tokens, 0))
    _check(
        _lib.winnow_thd_layout(
            _address(real),
            _address(padded),
            ctypes.c_size_t(len(real)),
            *map(ctypes.c_int64, sizes),
            ctypes.byref(offsets),
            _address(cu_seqlens),
            _address(cu_seqlens_padded),
            ctypes.byref(has_padded),
            _address(max_seqlen),
            (ctypes.c_uint8 * len(padding_mask)).from_buffer(padding_mask),
        )
    )
    written = chunks * offsets.value
    return ThdLayout(
        cu_seqlens[:written],
        cu_seqlens_padded[:written] if has_padded.value else None,
        max_seqlen[:chunks],
        padding_mask,
    )

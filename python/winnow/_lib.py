# SPDX-License-Identifier: Apache-2.0
"""Calls into libwinnow.so: finds it, packs the argument structs, turns error codes into exceptions.

Only this file and _dlpack.py use ctypes. Tensors are torch tensors or anything with
``__dlpack__``; outputs are allocated by the caller. CUDA tensors must stay alive until the stream
has completed the call.
"""

import ctypes
import functools
import os
import struct
from array import array
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from winnow import __version__, _dlpack

# winnow::Execution: backend, stream, workspace, its bytes, the workspace limit, threads,
# deterministic, name of the kernel, allocator, context of the allocator.
_EXECUTION = struct.Struct("iPPNNi?PPP")
_WORKSPACE_LIMIT = 256 << 20
BACKENDS = ("reference", "cpu", "cuda")
_BACKENDS = ("automatic", *BACKENDS)

# winnow::Tensor by rank: data, dtype, device kind, device index, rank, shape, stride.
_TENSORS = tuple(
    struct.Struct(f"Piiii{rank}q{8 * (4 - rank)}x{rank}q{8 * (4 - rank)}x") for rank in range(5)
)
_ABSENT = _TENSORS[0].pack(0, 0, 0, 0, -1)
_DTYPES = ("float32", "bfloat16", "float16", "float64", "float8_e4m3fn", "int32")
# The fields that hold int32; all others hold floating-point numbers.
_INDEX_FIELDS = frozenset(
    "cu_seqlens cu_seqlens_padded query_rows begin end indices lengths pool_ids".split()
)

_ERRORS = {1: ValueError, 2: NotImplementedError, 3: MemoryError}  # ErrorCode; others: RuntimeError


def _index(owner: str, name: str, value: Any, words: tuple[str, ...]) -> int:
    """The value of an enum from its name."""
    if value not in words:
        raise ValueError(f"{owner}: {name} {value!r}: must be one of {', '.join(words)}")
    return words.index(value)


_dtype_numbers: dict[Any, int] = {}  # cache, by torch.dtype


class _TensorField:
    """A field of type winnow::Tensor."""

    default = _ABSENT

    def __init__(self, op: str, name: str, offset: int) -> None:
        self.op, self.name, self.offset = op, name, offset

    def pack(self, tensor: Any, memory: ctypes.Array, keep: list[Any]) -> None:
        if hasattr(tensor, "data_ptr"):  # torch
            number = _dtype_numbers.get(tensor.dtype)
            if number is None:
                number = self._dtype_number(str(tensor.dtype).removeprefix("torch."))
                _dtype_numbers[tensor.dtype] = number
            if tensor.is_cpu:
                kind = index = 0
            elif tensor.is_cuda:
                kind, index = 1, tensor.get_device()
            else:
                self._refuse(f"is on device {tensor.device}: must be cpu or cuda")
            data, shape, stride = tensor.data_ptr(), tensor.shape, tensor.stride()
        elif hasattr(tensor, "__dlpack__"):
            capsule = tensor.__dlpack__()
            keep.append(capsule)
            view = _dlpack.tensor(capsule)
            dtype = _dlpack.DTYPES.get((view.code, view.bits, view.lanes), f"{tensor.dtype}")
            number = self._dtype_number(dtype)
            if view.device_type not in _dlpack.DEVICES:
                self._refuse(f"has DLPack device {view.device_type}: must be 1, 2 or 3")
            kind, index = _dlpack.DEVICES[view.device_type], view.device_id
            data, shape = (view.data or 0) + view.byte_offset, view.shape[: view.ndim]
            stride = view.strides[: view.ndim] if view.strides else _contiguous(shape)
        else:
            kind_of = type(tensor).__name__
            raise TypeError(f"{self.op}: {self.name} is a {kind_of}: must be a tensor")
        rank = len(shape)
        if rank >= len(_TENSORS):
            self._refuse(f"has {rank} dimensions: must be at most {len(_TENSORS) - 1}")
        _TENSORS[rank].pack_into(
            memory, self.offset, data, number, kind, index, rank, *shape, *stride
        )

    def _dtype_number(self, dtype: str) -> int:
        if dtype not in _DTYPES:
            allowed = "int32" if self.name in _INDEX_FIELDS else f"one of {', '.join(_DTYPES[:-1])}"
            self._refuse(f"has dtype {dtype}: must be {allowed}")
        return _DTYPES.index(dtype)

    def _refuse(self, why: str) -> NoReturn:
        raise ValueError(f"{self.op}: {self.name} {why}")


def _contiguous(shape: list[int]) -> list[int]:
    stride = [1] * len(shape)
    for i in reversed(range(len(shape) - 1)):
        stride[i] = stride[i + 1] * shape[i + 1]
    return stride


class _NumberField:
    """A number with its format character of the struct module, or an enum given by name."""

    def __init__(
        self, op: str, name: str, offset: int, letter: str, words: tuple[str, ...], default: float
    ) -> None:
        self.op, self.name, self.offset, self.words = op, name, offset, words
        self.struct = struct.Struct(letter)
        self.default = self.struct.pack(default if letter == "f" else int(default))

    def pack(self, value: Any, memory: ctypes.Array, keep: list[Any]) -> None:
        number = _index(self.op, self.name, value, self.words) if self.words else value
        try:
            self.struct.pack_into(memory, self.offset, number)
        except (struct.error, OverflowError) as error:
            raise ValueError(f"{self.op}: {self.name} {value!r}: {error}") from None


class _FieldEntry(ctypes.Structure):
    """The description of a field of an argument struct in src/c_abi.cc."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("kind", ctypes.c_int32),
        ("offset", ctypes.c_int32),
        ("words", ctypes.c_char_p),
        ("default_value", ctypes.c_double),
    ]
    _letters = {2: "i", 3: "f", 4: "?", 5: "i"}  # by kind; 0 and 1 are tensors

    def field(self, op: str) -> _TensorField | _NumberField:
        name = self.name.decode()
        if self.kind not in self._letters:
            return _TensorField(op, name, self.offset)
        words = tuple(self.words.decode().split("|")) if self.words else ()
        letter = self._letters[self.kind]
        return _NumberField(op, name, self.offset, letter, words, self.default_value)


class _OperatorEntry(ctypes.Structure):
    """An entry of the op table in src/c_abi.cc."""

    _run = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p)
    _ask = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_void_p)
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("args_bytes", ctypes.c_size_t),
        ("fields", ctypes.POINTER(_FieldEntry)),
        ("field_count", ctypes.c_size_t),
        ("run", _run),
        ("workspace_bytes", _ask),
        ("why_not", _ask),
        ("explain", _ask),
        ("kernels", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p)),
    ]


class Operator:
    """An operator of the library: its functions and the fields of its argument struct."""

    def __init__(self, entry: _OperatorEntry) -> None:
        self.name = entry.name.decode()
        self.run, self.workspace_bytes = entry.run, entry.workspace_bytes
        self.why_not, self.explain, self.kernels = entry.why_not, entry.explain, entry.kernels
        fields = [described.field(self.name) for described in entry.fields[: entry.field_count]]
        self.fields = {field.name: field for field in fields}
        tensors = [field for field in fields if isinstance(field, _TensorField)]
        self._tensor_names = [field.name for field in tensors]
        self._tensor_offsets = array("i", [field.offset for field in tensors]).tobytes()
        self._tensor_objects = struct.Struct(f"{len(tensors)}P")
        self._numbers = [field for field in fields if isinstance(field, _NumberField)]
        self._memory = ctypes.c_char * entry.args_bytes
        self._defaults = bytearray(entry.args_bytes)
        for field in fields:
            self._defaults[field.offset : field.offset + len(field.default)] = field.default

    def pack(self, given: dict[str, Any], keep: list[Any]) -> ctypes.Array:
        """Packs the struct. Objects that it points to are appended to `keep`.

        A value of None keeps the default, which is absent for a tensor. Unknown names are ignored.
        """
        memory = self._memory.from_buffer_copy(self._defaults)
        for field in self.fields.values():
            value = given.get(field.name)
            if value is not None:
                field.pack(value, memory, keep)
        return memory

    def pack_viewed(self, given: dict[str, Any], view: int) -> ctypes.Array | None:
        """Packs the struct with the function at `view`, see _dlpack.object_view.

        Returns None if winnow does not accept one of the tensors; `pack` raises the error then.
        """
        memory = self._memory.from_buffer_copy(self._defaults)
        tensors = map(given.get, self._tensor_names)
        objects = self._tensor_objects.pack(*[0 if x is None else id(x) for x in tensors])
        offsets = self._tensor_offsets
        try:
            if _view_objects(view, objects, offsets, len(self._tensor_names), memory):
                return None
        except Exception:  # of torch, for a tensor that DLPack cannot describe
            return None
        for field in self._numbers:
            value = given.get(field.name)
            if value is not None:
                field.pack(value, memory, [])
        return memory


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


def _load() -> tuple[ctypes.CDLL, dict[str, Operator]]:
    """Loads the library and its operators; checks that version and struct sizes match."""
    path = _find()
    try:
        lib = ctypes.CDLL(path)
    except OSError as error:  # names what is missing: the file, or a library that it needs
        raise ImportError(f"libwinnow.so cannot be loaded from {path}: {error}") from None
    if not hasattr(lib, "winnow_version"):
        raise ImportError(f"{path} is not libwinnow.so; WINNOW_LIBRARY can name it")
    lib.winnow_version.restype = lib.winnow_last_error.restype = ctypes.c_char_p
    lib.winnow_tensor_bytes.restype = lib.winnow_execution_bytes.restype = ctypes.c_size_t
    lib.winnow_operators.restype = ctypes.POINTER(_OperatorEntry)
    ours = {
        "version": (lib.winnow_version().decode(), __version__),
        "Tensor": (lib.winnow_tensor_bytes(), len(_ABSENT)),
        "Execution": (lib.winnow_execution_bytes(), _EXECUTION.size),
    }
    if differ := [f"{n} {a} (here {b})" for n, (a, b) in ours.items() if a != b]:
        raise ImportError(f"{path} does not belong to this package: {', '.join(differ)}")
    count = ctypes.c_size_t()
    table = lib.winnow_operators(ctypes.byref(count))
    return lib, {op.name: op for op in map(Operator, table[: count.value])}


SHARDINGS = ("contiguous", "zigzag")
_lib, operators = _load()
path: str = _lib._name
# Holds the GIL, unlike the other functions of the library, since it reads Python objects.
_view_objects = ctypes.PYFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.c_size_t,
    ctypes.c_char_p,
)(("winnow_view_objects", _lib))


def _check(code: int) -> None:
    if code:
        raise _ERRORS.get(code, RuntimeError)(_lib.winnow_last_error().decode())


def _text(call: Callable[..., int], *arguments: Any) -> str:
    text = ctypes.c_char_p()
    _check(call(*arguments, ctypes.byref(text)))
    return (text.value or b"").decode()


def _kernels(operator: Operator) -> frozenset[str]:
    numbers = range(1, len(_BACKENDS))
    return frozenset(" ".join(_text(operator.kernels, number) for number in numbers).split())


# What the kernels of every operator are called, whatever their backend.
KERNELS = {name: _kernels(operator) for name, operator in operators.items()}


@functools.cache  # kept forever, since the library stores a pointer to the name
def _c_string(text: str) -> ctypes.Array:
    return ctypes.create_string_buffer(text.encode())


def execution(
    *,
    backend: str = "automatic",
    stream: int = 0,
    workspace: int = 0,
    workspace_bytes: int = 0,
    workspace_limit: int = _WORKSPACE_LIMIT,
    threads: int = 0,
    deterministic: bool = False,
    kernel: str = "",
    allocate: int = 0,
    allocate_context: int = 0,
    owner: str = "execution",
) -> bytes:
    """Packs a winnow::Execution; pointers are addresses. Errors begin with `owner`."""
    number = _index(owner, "backend", backend, _BACKENDS)
    name = ctypes.addressof(_c_string(kernel)) if kernel else 0
    memory = (workspace, workspace_bytes, workspace_limit)
    try:
        return _EXECUTION.pack(
            number, stream, *memory, threads, deterministic, name, allocate, allocate_context
        )
    except struct.error as error:
        raise ValueError(f"{owner}: {error}") from None


_AUTOMATIC = execution()


class _Workspace:
    """The workspace of one call, allocated when the library requests it."""

    __slots__ = ("allocate", "device", "error", "memory")

    def __init__(self, allocate: Callable[[int, Any], Any], device: Any) -> None:
        self.allocate, self.device = allocate, device
        self.error: BaseException | None = None
        self.memory: Any = None


@ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_size_t)
def _allocate(workspace: _Workspace, size: int) -> int | None:
    """Returns null on failure; the exception is raised by the call, since ctypes would print it."""
    try:
        workspace.memory = workspace.allocate(size, workspace.device)
        return workspace.memory.data_ptr()
    except BaseException as error:
        workspace.error = error
        return None


_ALLOCATE = ctypes.cast(_allocate, ctypes.c_void_p).value or 0
_ADDRESS = struct.Struct("P")


@functools.lru_cache(1024)
def _allocating_execution(
    op: str, backend: str, kernel: str, stream: int, threads: int, deterministic: bool
) -> bytes:
    """An Execution without its last field, allocate_context."""
    whole = execution(
        backend=backend,
        kernel=kernel,
        stream=stream,
        threads=threads,
        deterministic=deterministic,
        allocate=_ALLOCATE,
        owner=op,
    )
    return whole[: -_ADDRESS.size]


def run_allocating(
    op: str,
    arguments: dict[str, Any],
    view: int,
    allocate: Callable[[int, Any], Any],
    device: Any,
    backend: str,
    kernel: str,
    stream: int,
    threads: int,
    deterministic: bool,
) -> None:
    """Runs an op with a workspace from `allocate(bytes, device)`, which returns a torch tensor.

    Arguments that are not fields of the struct are ignored.
    """
    called = operators[op]
    args = called.pack_viewed(arguments, view) if view else None
    if args is None:
        args = called.pack(arguments, [])
    workspace = _Workspace(allocate, device)
    execution = _allocating_execution(op, backend, kernel, stream, threads, deterministic)
    code = called.run(args, execution + _ADDRESS.pack(id(workspace)))
    if (error := workspace.error) is not None:
        workspace.error = None
        try:
            raise error
        finally:  # its traceback holds this frame, and with it the tensors of the call
            del error
    _check(code)


def _packed(op: str, arguments: dict[str, Any], keep: list[Any]) -> ctypes.Array:
    """The op's struct; a name that is no field of it is refused."""
    for name in arguments:
        if name not in operators[op].fields:
            raise TypeError(f"{op}: no argument {name}")
    return operators[op].pack(arguments, keep)


def run(op: str, execution: bytes = _AUTOMATIC, /, **arguments: Any) -> None:
    """Runs an op. Arguments are the fields of its struct; None is an absent tensor."""
    keep: list[Any] = []
    _check(operators[op].run(_packed(op, arguments, keep), execution))


def workspace_bytes(op: str, execution: bytes = _AUTOMATIC, /, **arguments: Any) -> int:
    """The workspace that such a call needs, in bytes."""
    keep: list[Any] = []
    size = ctypes.c_size_t()
    args = _packed(op, arguments, keep)
    _check(operators[op].workspace_bytes(args, execution, ctypes.byref(size)))
    return size.value


def why_not(op: str, execution: bytes = _AUTOMATIC, /, **arguments: Any) -> str:
    """Empty if such a call can run, else the reason why not."""
    keep: list[Any] = []
    return _text(operators[op].why_not, _packed(op, arguments, keep), execution)


class Candidate(NamedTuple):
    """A kernel that might run a call, or a whole backend that cannot."""

    backend: str
    kernel: str  # empty: the reason applies to the whole backend
    reason: str  # why it cannot run the call; empty if it can


def explain(op: str, execution: bytes = _AUTOMATIC, /, **arguments: Any) -> list[Candidate]:
    """All kernels in order of preference; the first without a reason would run."""
    keep: list[Any] = []
    text = _text(operators[op].explain, _packed(op, arguments, keep), execution)
    return [Candidate(*line.split("\t")) for line in text.splitlines()]


def backend_why_not(backend: str) -> str:
    """Empty if the backend is usable here, else the reason why not."""
    number = _index("backend_why_not", "backend", backend, _BACKENDS)
    return _text(_lib.winnow_backend_why_not, number)


def backends() -> dict[str, str]:
    """The usable backends, each with a description of what it runs on."""
    usable = [word for word in BACKENDS if not backend_why_not(word)]
    return {word: _text(_lib.winnow_backend_describe, _BACKENDS.index(word)) for word in usable}


def _integers(owner: str, name: str, letter: str, values: Iterable[int]) -> array:
    """Converts to an array of the C type with this format character."""
    try:
        return array(letter, values)
    except (OverflowError, TypeError) as error:
        raise ValueError(f"{owner}: {name}: {error}") from None


def _check_sizes(owner: str, letter: str, **sizes: int) -> None:
    """Raises ValueError, with the name, for a size that does not fit into the C type."""
    for name, size in sizes.items():
        _integers(owner, f"{name} {size}", letter, (size,))


def _address(numbers: array) -> ctypes.c_void_p:
    return ctypes.c_void_p(numbers.buffer_info()[0])


def shard_rows(
    cu_seqlens: Iterable[int], tokens: int, ranks: int, sharding: str, multiple: int = 1
) -> tuple[array, list[int]]:
    """The rows that each rank holds: winnow::shard_rows.

    Returns:
        rows: array("i") of `tokens` numbers: the rows of rank 0, ascending, then those of rank 1
            and so on. torch.frombuffer(rows, dtype=torch.int32) views it (if tokens > 0).
        counts: the number of rows of each rank; split(counts) splits a tensor of all rows.
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
            _index(name, "sharding", sharding, SHARDINGS),
            multiple,
            _address(rows),
            counts,
        )
    )
    return rows, list(counts)


class ThdLayout(NamedTuple):
    """winnow::ThdLayout, with arrays that torch.frombuffer can view."""

    cu_seqlens: array  # "i", [chunks, offsets]
    cu_seqlens_padded: array | None  # "i", [chunks, offsets]; None if the same
    max_seqlen: array  # "i", [chunks]
    padding_mask: bytearray  # [rows, row_tokens], 1: padding


def thd_layout(
    seq_lens: Iterable[int],  # [rows, largest number of documents]
    seq_lens_padded: Iterable[int],  # the same
    rows: int,
    row_tokens: int,
    fill: int = -1000,
    chunks: int = 1,
) -> ThdLayout:
    """The offsets and padding mask of a padded batch once it is flattened: winnow::thd_layout."""
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

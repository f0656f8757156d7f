# SPDX-License-Identifier: Apache-2.0
"""Calls of operators as files of the safetensors format, which ``winnow compare`` reads.

A file holds one call: tensors have the names of the operator's fields, options stand as text in the
metadata. docs/tool.md describes it.
"""

import inspect
import json
import os
import struct
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from winnow import __version__, _lib, ops
from winnow._files import written_whole

_DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int32: "I32",
}


def _shape_text(tensor: Tensor) -> str:
    return f"{_DTYPES[tensor.dtype]}{list(tensor.shape)}"


def _option_text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):  # the library has it as float32
        value = struct.unpack("f", struct.pack("f", value))[0]
    return str(value)


def _write(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Writes a safetensors file; a file of that name stays as it is until this one is complete."""
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors are aligned
    with written_whole(path) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            whole = tensor.detach().cpu().contiguous()
            file.write(whole.flatten().view(torch.uint8).numpy().data)


class _Call:
    """A call of torch.ops.winnow.<name> by the names of the library's fields."""

    def __init__(self, name: str, arguments: tuple[Any, ...]) -> None:
        self.op, describe = ops._calls[name]
        # Outputs are made on the device meta, where they have a shape and no memory.
        meta = [x.to("meta") if isinstance(x, Tensor) else x for x in arguments]
        results, named = describe(*meta)
        self.results: tuple[Any, ...] = results if isinstance(results, tuple) else (results,)
        real = {id(m): x for m, x in zip(meta, arguments, strict=True) if isinstance(m, Tensor)}
        fields = {k: v for k, v in named.items() if k in _lib.operators[self.op].fields}
        outputs = {id(x): i for i, x in enumerate(self.results) if x is not None}
        self.outputs = {k: outputs[id(v)] for k, v in fields.items() if id(v) in outputs}
        self.inputs = {k: real[id(v)] for k, v in fields.items() if id(v) in real}
        self.options = {
            k: v for k, v in fields.items() if v is not None and not isinstance(v, Tensor)
        }
        if self.options.pop("accumulate", False):  # the file has the terms of this call alone
            position = list(inspect.signature(getattr(ops, name)).parameters).index("target")
            self.added_to = arguments[position]
        else:
            self.added_to = None

    def write(self, path: Path, results: dict[str, Tensor], ran_on: str = "") -> None:
        tensors = {**self.inputs, **results}
        for name, tensor in tensors.items():
            if not isinstance(tensor, Tensor):
                raise ValueError(f"{self.op}: {name} {type(tensor).__name__}: must be a tensor")
            if tensor.dtype not in _DTYPES:
                raise ValueError(
                    f"{self.op}: {name} {tensor.dtype}: must be one of"
                    f" {', '.join(map(str, _DTYPES))}"
                )
        metadata = {"winnow_operator": self.op, "winnow_version": __version__}
        metadata["torch_version"] = str(torch.__version__)
        metadata["device"] = str(next(iter(self.inputs.values())).device)
        if ran_on:
            metadata["winnow_ran_on"] = ran_on
        metadata.update({name: _option_text(value) for name, value in self.options.items()})
        for name, position in self.outputs.items():
            if name not in results:
                metadata[name] = _shape_text(self.results[position])
        _write(path, tensors, metadata)


class dump(TorchDispatchMode):
    """Writes calls of operators that are made inside, and what they returned, to files.

        with winnow.dump("step.safetensors"):
            layer(x).sum().backward()

    writes the first call of each operator, to step.sparse_attention_forward.safetensors and so on;
    ``files`` lists them, and ``winnow compare`` reads them. With ``operator`` only that one is
    written, to the path itself. ``call`` is the number of the call, from 0. Operators and their
    names are those of the library: ``winnow compare --format`` lists them. Code that torch.compile
    has compiled is not seen. In a job of several ranks the path should hold the rank, as in
    f"step.{rank}.safetensors": all would write the same file.
    """

    def __init__(
        self, path: str | os.PathLike[str], operator: str | None = None, *, call: int = 0
    ) -> None:
        super().__init__()
        if operator is not None and operator not in _lib.operators:
            raise ValueError(
                f"dump: operator {operator!r}: must be one of {', '.join(_lib.operators)}"
            )
        if call < 0:
            raise ValueError(f"dump: call {call}: must be at least 0")
        self.path, self.operator, self.call = Path(path), operator, call
        if not self.path.name or not self.path.parent.is_dir():  # a step would fail on it later
            raise FileNotFoundError(
                f"dump: path {str(path)!r}: must be a file in a folder that exists"
            )
        if self.path.is_dir():  # files with its name would stand beside it
            raise IsADirectoryError(f"dump: path {str(path)!r}: must be a file, not a folder")
        self.files: list[Path] = []
        self._seen: dict[str, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        if func.namespace != "winnow":
            return results
        op = ops._calls[func._opname][0]
        count = self._seen[op] = self._seen.get(op, -1) + 1
        if count == self.call and self.operator in (None, op):
            self._write(func._opname, args, kwargs or {}, results)
        return results

    def _write(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], results: Any
    ) -> None:
        call = _Call(name, args)
        results = results if isinstance(results, tuple) else (results,)
        returned = {field: results[position] for field, position in call.outputs.items()}
        ran_on = _ran_on(call, returned, kwargs)
        if call.added_to is not None:
            returned["target"] = returned["target"] - call.added_to
        path = self.path
        if self.operator is None:
            path = path.with_name(f"{path.stem}.{call.op}{path.suffix}")
        call.write(path, returned, ran_on)
        self.files.append(path)


def _ran_on(call: _Call, outputs: dict[str, Tensor], kwargs: dict[str, Any]) -> str:
    """The backend and kernel of a call that has run."""
    execution = ops._execution(call.op, kwargs)
    candidates = _lib.explain(call.op, execution, **call.inputs, **outputs, **call.options)
    return next(f"{each.backend}, {each.kernel}" for each in candidates if not each.reason)


def dump_call(path: str | os.PathLike[str], operator: str, **arguments: Any) -> None:
    """Writes a call that need not be made: ``winnow compare`` makes it on every backend.

    Arguments are those of ``torch.ops.winnow.<operator>`` by name, and, where another program has
    computed them, outputs, which are then compared too:

        winnow.dump_call("job.safetensors", "sparse_attention_forward", q=q, kv=kv,
                         indices=indices, v_dim=512, scale=scale, out=out_of_the_job)

    In a job of several ranks the path should hold the rank.
    """
    if operator not in ops._calls:
        raise ValueError(
            f"dump_call: operator {operator!r}: must be one of {', '.join(ops._calls)}"
        )
    schema = getattr(torch.ops.winnow, operator).default._schema
    given = dict(arguments)
    values = []
    for argument in schema.arguments:
        if argument.kwarg_only:
            continue
        optional = argument.has_default_value() or isinstance(argument.type, torch.OptionalType)
        if argument.name not in given and not optional:
            raise TypeError(f"dump_call: {operator} needs {argument.name}")
        default = argument.default_value if argument.has_default_value() else None
        values.append(given.pop(argument.name, default))
    call = _Call(operator, tuple(values))
    results = {name: given.pop(name) for name in call.outputs if given.get(name) is not None}
    if given:
        raise TypeError(f"dump_call: {operator} has no {', '.join(given)}")
    call.write(Path(path), results)

# SPDX-License-Identifier: Apache-2.0
"""What DLPack says of tensors: its structs, and the numbers in them that winnow takes."""

import ctypes
from typing import Any

# By DLPack type code, bits and lanes.
DTYPES = {
    (2, 32, 1): "float32",
    (4, 16, 1): "bfloat16",
    (2, 16, 1): "float16",
    (2, 64, 1): "float64",
    (10, 8, 1): "float8_e4m3fn",
    (0, 32, 1): "int32",
}
DEVICES = {1: 0, 2: 1, 3: 0}  # cpu, cuda, pinned host memory

_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


class _DLTensor(ctypes.Structure):
    """DLTensor of DLPack, the first member of its managed tensor."""

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


class _ExchangeApi(ctypes.Structure):
    """The first fields of DLPackExchangeAPI of DLPack."""

    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("previous", ctypes.c_void_p),
        ("allocate", ctypes.c_void_p),
        ("from_object", ctypes.c_void_p),
        ("to_object", ctypes.c_void_p),
        ("view", ctypes.c_void_p),
    ]


def tensor(capsule: Any) -> _DLTensor:
    """The description in a capsule of ``__dlpack__``, which must outlive it."""
    return _DLTensor.from_address(_capsule_pointer(capsule, b"dltensor"))


def object_view(tensor_type: type) -> int:
    """The address of the function of DLPack's exchange API that views tensors of this type, or 0.

    torch 2.13 has one, torch 2.6 has not. It takes a fraction of the time in which Python asks a
    tensor for its type, device, shape and strides.
    """
    capsule = getattr(tensor_type, "__dlpack_c_exchange_api__", None)
    if capsule is None:
        return 0
    api = _ExchangeApi.from_address(_capsule_pointer(capsule, b"dlpack_exchange_api"))
    return api.view or 0 if api.major == 1 else 0

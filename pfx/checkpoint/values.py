"""Leaves as what is stored: names of dtypes, Python values as exact bytes, tensors as raw bytes."""

from __future__ import annotations

import struct
from typing import Any

import msgpack
import numpy as np
import torch

from pfx.errors import CheckpointError, message

DTYPES = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype) and not str(value).startswith("torch.q")
}
# A dtype of each size, in which any tensor of that size can be copied bit for bit.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}

# What a leaf may be besides a tensor, with how it becomes bytes and is read again.
_PYTHON: dict[str, tuple[type, Any, Any]] = {
    "none": (type(None), lambda value: b"", lambda data: None),
    "bool": (bool, lambda value: bytes([value]), lambda data: data != b"\0"),
    "int": (
        int,
        lambda value: value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True),
        lambda data: int.from_bytes(data, "little", signed=True),
    ),
    "float": (
        float,
        lambda value: struct.pack("<d", value),
        lambda data: struct.unpack("<d", data)[0],
    ),
    "str": (
        str,
        lambda value: value.encode("utf-8", "surrogatepass"),
        lambda data: data.decode("utf-8", "surrogatepass"),
    ),
    "bytes": (bytes, bytes, bytes),
}
PYTHON_KINDS = tuple(_PYTHON)
TENSOR_KINDS = ("array", "tensor", "numpy")


def python_kind(value: Any) -> str | None:
    """The kind of a Python value; None for anything else."""
    return next((name for name, (kind, *_) in _PYTHON.items() if type(value) is kind), None)


def encode(kind: str, value: Any) -> bytes:
    """A Python value as bytes.

    >>> decode("int", encode("int", -(2**100)))
    -1267650600228229401496703205376
    """
    return _PYTHON[kind][1](value)


def decode(kind: str, data: bytes) -> Any:
    """The Python value of some bytes.

    Raises:
        ValueError, struct.error: they are none of that kind.
    """
    return _PYTHON[kind][2](data)


def dtype_text(dtype: torch.dtype) -> str:
    """The name under which a dtype is stored.

    >>> dtype_text(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements as integers (or complex numbers) of the same size, which any kernel copies."""
    return tensor.view(_BITS[tensor.itemsize])


def plain_tensor(leaf: Any, where: str) -> torch.Tensor:
    """A torch tensor or numpy array as a strided tensor that holds data.

    Raises:
        CheckpointError: it is of a kind that cannot be stored.
    """
    if isinstance(leaf, (np.ndarray, np.generic)):
        return _from_numpy(leaf, where)
    usual = type(leaf) in (torch.Tensor, torch.nn.Parameter)
    if not usual or leaf.layout != torch.strided or leaf.is_quantized or leaf.is_meta:
        raise _refused(leaf, where)
    return leaf.detach().resolve_conj().resolve_neg()


def _from_numpy(leaf: Any, where: str) -> torch.Tensor:
    if not isinstance(leaf, np.generic) and type(leaf) not in (np.ndarray, np.memmap):
        raise _refused(leaf, where)
    native = np.asarray(leaf, dtype=leaf.dtype.newbyteorder("="), order="C")
    try:
        return torch.from_numpy(native if native.flags.writeable else native.copy())
    except TypeError:
        raise _refused(leaf, where) from None


def _refused(leaf: Any, where: str) -> CheckpointError:
    dtype = f" of dtype {leaf.dtype}" if hasattr(leaf, "dtype") else ""
    return CheckpointError(
        message(
            where,
            f"cannot be saved: it is a {type(leaf).__module__}.{type(leaf).__qualname__}{dtype}.",
            "leaves are Arrays, dense torch tensors, numpy arrays of numbers, int, float, bool, "
            "str, bytes and None.",
            fix="turn it into one of these, or put it into metadata=",
        )
    )


_BIG = 1  # msgpack's code for an int of more than 64 bits


def pack(value: Any) -> bytes:
    """Plain data (dicts, lists, numbers of any size, text, bytes) as msgpack.

    Raises:
        TypeError, ValueError: it is not plain data.

    >>> unpack(pack({"seen": 2**70, "name": "run"}))
    {'seen': 1180591620717411303424, 'name': 'run'}
    """

    def big(value: Any) -> Any:
        if type(value) is int:
            return msgpack.ExtType(_BIG, encode("int", value))
        raise TypeError(f"a {type(value).__name__} is not plain data")

    return bytes(msgpack.packb(value, use_bin_type=True, default=big) or b"")


def unpack(data: bytes) -> Any:
    """Read what `pack` has made; tuples come back as lists.

    Raises:
        ValueError: it is broken.
    """

    def extended(code: int, data: bytes) -> Any:
        if code != _BIG:
            raise ValueError(f"unknown extension {code}")
        return decode("int", data)

    try:
        return msgpack.unpackb(data, raw=False, strict_map_key=False, ext_hook=extended)
    except (msgpack.UnpackException, TypeError, RecursionError) as error:
        raise ValueError(str(error) or type(error).__name__) from error

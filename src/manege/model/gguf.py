"""Read a GGUF file: metadata and tensors, dequantised to float32.

In: a path. Out: a dict of metadata and a dict of numpy arrays in row-major order. Only the storage types that small
Llama models come in are known (F32, F16, Q4_1, Q8_0); another one is a ModelError. The file is memory-mapped, tensors
are copies. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import mmap
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from manege.errors import ModelError

__all__ = ["read_gguf"]

Array = npt.NDArray[np.float32]

_STRING, _ARRAY = 8, 9
_SCALARS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
_Q8_0 = np.dtype([("scale", "<f2"), ("quants", "i1", 32)])
_Q4_1 = np.dtype([("scale", "<f2"), ("minimum", "<f2"), ("quants", "u1", 16)])


class _Cursor:
    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.offset = 4

    def scalar(self, kind: str) -> Any:
        dtype = np.dtype(kind)
        value = np.frombuffer(self.data, dtype, 1, self.offset)[0]
        self.offset += dtype.itemsize
        return value.item()

    def string(self) -> str:
        size = self.scalar("<u8")
        start, self.offset = self.offset, self.offset + size
        return self.data[start : self.offset].decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.scalar(_SCALARS[kind])
        item, count = self.scalar("<u4"), self.scalar("<u8")
        if item in (_STRING, _ARRAY):
            return [self.value(item) for _ in range(count)]
        array = np.frombuffer(self.data, _SCALARS[item], count, self.offset)
        self.offset += array.nbytes
        return array.tolist()


def _plain(dtype: str) -> Callable[[mmap.mmap, int, int], Array]:
    return lambda data, count, offset: np.frombuffer(data, dtype, count, offset).astype(np.float32)


def _q8_0(data: mmap.mmap, count: int, offset: int) -> Array:
    blocks = np.frombuffer(data, _Q8_0, count // 32, offset)
    return blocks["scale"].astype(np.float32)[:, None] * blocks["quants"]


def _q4_1(data: mmap.mmap, count: int, offset: int) -> Array:
    blocks = np.frombuffer(data, _Q4_1, count // 32, offset)
    # A block of 32 keeps its first half in the low and its second half in the high nibbles.
    quants = np.concatenate([blocks["quants"] & 15, blocks["quants"] >> 4], axis=1)
    return blocks["scale"].astype(np.float32)[:, None] * quants + blocks["minimum"].astype(np.float32)[:, None]


_STORAGE = {0: _plain("<f4"), 1: _plain("<f2"), 3: _q4_1, 8: _q8_0}


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, Array]]:
    """Metadata and tensors by name. Raises ModelError for a file that is not GGUF or uses an unknown storage type."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data[:4] != b"GGUF":
            raise ModelError(f"{path} is not a GGUF file: it starts with {data[:4]!r}")
        try:
            return _read(data, path)
        except (KeyError, ValueError, struct.error) as error:
            raise ModelError(f"GGUF file {path} cannot be read ({error!r}); is it complete?") from error


def _read(data: mmap.mmap, path: Path) -> tuple[dict[str, Any], dict[str, Array]]:
    cursor = _Cursor(data)
    cursor.scalar("<u4")
    num_tensors, num_values = cursor.scalar("<u8"), cursor.scalar("<u8")
    metadata = {}
    for _ in range(num_values):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar("<u4"))
    heads = []
    for _ in range(num_tensors):
        name = cursor.string()
        shape = [cursor.scalar("<u8") for _ in range(cursor.scalar("<u4"))][::-1]
        heads.append((name, shape, cursor.scalar("<u4"), cursor.scalar("<u8")))
    align = metadata.get("general.alignment", 32)
    start = -(-cursor.offset // align) * align
    tensors = {}
    for name, shape, storage, offset in heads:
        if storage not in _STORAGE:
            raise ModelError(
                f"GGUF file {path}: tensor {name} has storage type {storage}; known are {sorted(_STORAGE)}"
            )
        tensors[name] = _STORAGE[storage](data, int(np.prod(shape)), start + offset).reshape(shape)
    return metadata, tensors

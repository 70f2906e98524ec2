"""The GGUF reader, on a small file written here byte by byte."""

import struct

import numpy as np
import pytest

from manege.errors import ModelError
from manege.model.gguf import read_gguf


def string(text):
    return struct.pack("<Q", len(text)) + text.encode()


def gguf(tensors):
    """Metadata of several kinds and tensors of (name, shape, storage type, bytes)."""
    metadata = (
        string("general.name") + struct.pack("<I", 8) + string("café")[:8].replace(b"\x04", b"\x05") + "café".encode()
    )
    metadata += string("a.count") + struct.pack("<II", 4, 7)
    metadata += string("a.words") + struct.pack("<IIQ", 9, 8, 2) + string("x") + string("yz")
    metadata += string("a.numbers") + struct.pack("<IIQ3i", 9, 5, 3, -1, 0, 1)
    heads, body = b"", b""
    for name, shape, storage, data in tensors:
        body += b"\0" * (-len(body) % 32)
        heads += string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), storage, len(body))
        body += data
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), 4) + metadata + heads
    return head + b"\0" * (-len(head) % 32) + body


def test_metadata_and_every_storage_type_are_read(tmp_path):
    plain = np.arange(6, dtype="<f4")
    q8 = np.float16(0.5).tobytes() + np.arange(-16, 16, dtype="i1").tobytes()
    nibbles = bytes(i | (15 - i) << 4 for i in range(16))
    q4 = np.float16(2).tobytes() + np.float16(-1).tobytes() + nibbles
    path = tmp_path / "model.gguf"
    path.write_bytes(
        gguf(
            [
                ("f32", [2, 3], 0, plain.tobytes()),
                ("f16", [3, 2], 1, plain.astype("<f2").tobytes()),
                ("q8", [1, 32], 8, q8),
                ("q4", [32], 3, q4),
            ]
        )
    )
    metadata, tensors = read_gguf(path)
    assert metadata == {"general.name": "café", "a.count": 7, "a.words": ["x", "yz"], "a.numbers": [-1, 0, 1]}
    np.testing.assert_array_equal(tensors["f32"], plain.reshape(2, 3))
    np.testing.assert_array_equal(tensors["f16"], plain.reshape(3, 2))
    np.testing.assert_array_equal(tensors["q8"], np.arange(-16, 16)[None] / 2)
    np.testing.assert_array_equal(tensors["q4"], np.concatenate([np.arange(16), 15 - np.arange(16)]) * 2 - 1)


def test_files_that_cannot_be_read_are_refused(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"not a model at all")
    with pytest.raises(ModelError, match="is not a GGUF file"):
        read_gguf(path)
    whole = gguf([("f32", [8], 0, b"\0" * 32)])
    for size in (30, len(whole) - 20):
        path.write_bytes(whole[:size])
        with pytest.raises(ModelError, match="is it complete"):
            read_gguf(path)
    path.write_bytes(gguf([("odd", [32], 2, b"\0" * 18)]))
    with pytest.raises(ModelError, match="tensor odd has storage type 2"):
        read_gguf(path)

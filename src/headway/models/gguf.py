"""The GGUF container: metadata and where each tensor lies. Reads no tensor data and needs no torch.

The `gguf` package's own reader takes seconds to walk a vocabulary, in every process that needs one, and does not tell a
truncated file from a broken one; its dequantisation is what weights.py uses.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from headway.core.errors import ModelError

# Of the value types in metadata: the struct format and the numpy dtype. 8 is a string, 9 an array.
_SCALARS = {
    0: ("<B", "u1"),
    1: ("<b", "i1"),
    2: ("<H", "<u2"),
    3: ("<h", "<i2"),
    4: ("<I", "<u4"),
    5: ("<i", "<i4"),
    6: ("<f", "<f4"),
    7: ("<?", "?"),
    10: ("<Q", "<u8"),
    11: ("<q", "<i8"),
    12: ("<d", "<f8"),
}
_STRING, _ARRAY = 8, 9


class TensorType(NamedTuple):
    """A way to store numbers: `block` of them take `size` bytes."""

    name: str
    block: int
    size: int


TENSOR_TYPES = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    8: TensorType("Q8_0", 32, 34),
    30: TensorType("BF16", 1, 2),
}
"""The tensor types that headway reads, by their number in the file."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor: its shape in row-major order (the reverse of the file's) and its bytes in the file."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    type: TensorType
    start: int
    num_bytes: int


class GgufFile:
    """A GGUF file's metadata and tensor table; `data(tensor)` maps a tensor's bytes.

    `metadata`: key to int, float, bool, str or a list of these. `tensors`: name to GgufTensor.

    Raises:
        ModelError: no such file, not a GGUF, truncated, or holding tensors of a type that is not supported.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            with self.path.open("rb") as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise ModelError(f"there is no file {self.path}") from None
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise ModelError(f"cannot read {self.path}: {error}") from None
        self._at = 0
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GgufTensor] = {}
        try:
            self._read_header()
        except (struct.error, IndexError):
            raise ModelError(
                f"{self.path} is truncated: it ends at byte {len(self._bytes)}, inside its header. Fetch it again."
            ) from None
        except UnicodeDecodeError as error:
            raise ModelError(f"{self.path} is damaged: its metadata is not UTF-8 ({error})") from None

    def data(self, tensor: GgufTensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """uint8[num_bytes], read-only, backed by the file."""
        return np.frombuffer(self._bytes, np.uint8, tensor.num_bytes, tensor.start)

    def _read_header(self) -> None:
        if self._bytes[:4] != b"GGUF":
            raise ModelError(f"{self.path} is not a GGUF file: it begins with {self._bytes[:4]!r}, not b'GGUF'")
        self._at = 4
        version = self._scalar("<I")
        if version not in (2, 3):
            raise ModelError(f"{self.path} is GGUF version {version}; headway reads versions 2 and 3, little-endian")
        num_tensors, num_values = self._scalar("<Q"), self._scalar("<Q")
        for _ in range(num_values):
            key = self._string()
            self.metadata[key] = self._value(self._scalar("<I"))
        entries = [self._tensor_entry() for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ModelError(f"{self.path} is damaged: its general.alignment is {alignment!r}")
        start = -(-self._at // alignment) * alignment
        for name, shape, type_id, offset in entries:
            self._add_tensor(name, shape, type_id, start + offset)

    def _add_tensor(self, name: str, shape: tuple[int, ...], type_id: int, start: int) -> None:
        tensor_type = TENSOR_TYPES.get(type_id)
        if tensor_type is None:
            names = ", ".join(t.name for t in TENSOR_TYPES.values())
            raise ModelError(
                f"{self.path}: tensor {name} is stored as {_type_name(type_id)}, which headway does not read. "
                f"It reads {names}: convert the file to one of these."
            )
        if shape and shape[-1] % tensor_type.block:
            raise ModelError(
                f"{self.path} is damaged: tensor {name}'s rows of {shape[-1]} are no whole {tensor_type.name} blocks"
            )
        num_bytes = math.prod(shape) // tensor_type.block * tensor_type.size
        if start + num_bytes > len(self._bytes):
            raise ModelError(
                f"{self.path} is truncated: tensor {name} ends at byte {start + num_bytes}, the file at byte "
                f"{len(self._bytes)}. Fetch it again."
            )
        self.tensors[name] = GgufTensor(name, shape, type_id, tensor_type, start, num_bytes)

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        dims = [self._scalar("<Q") for _ in range(self._scalar("<I"))]
        return name, tuple(reversed(dims)), self._scalar("<I"), self._scalar("<Q")

    def _scalar(self, fmt: str) -> Any:
        (value,) = struct.unpack_from(fmt, self._bytes, self._at)
        self._at += struct.calcsize(fmt)
        return value

    def _string(self) -> str:
        (length,) = struct.unpack_from("<Q", self._bytes, self._at)
        start = self._at + 8
        self._at = start + length
        if self._at > len(self._bytes):
            raise IndexError
        return self._bytes[start : self._at].decode()

    def _value(self, value_type: int) -> Any:
        if value_type == _STRING:
            return self._string()
        if value_type != _ARRAY:
            return self._scalar(self._format(value_type)[0])
        element, count = self._scalar("<I"), self._scalar("<Q")
        if element == _STRING:
            return [self._string() for _ in range(count)]
        dtype = np.dtype(self._format(element)[1])
        start = self._at
        self._at += count * dtype.itemsize
        if self._at > len(self._bytes):
            raise IndexError
        return np.frombuffer(self._bytes, dtype, count, start).tolist()

    def _format(self, value_type: int) -> tuple[str, str]:
        try:
            return _SCALARS[value_type]
        except KeyError:
            raise ModelError(
                f"{self.path} is damaged: metadata value of unknown type {value_type} near byte {self._at}"
            ) from None


def _type_name(type_id: int) -> str:
    from gguf import GGMLQuantizationType  # slow to import, and only this message needs it

    try:
        return GGMLQuantizationType(type_id).name
    except ValueError:
        return f"type {type_id}"

"""What a process and the child that serves its store say to each other: pickles, each with its length before it.

Both ends of the socket pair are this program, and nobody else has it.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tiers.storage.file_system import FileSystemRemoteStorageManager


@dataclass(frozen=True, slots=True)
class Task:
    """The first that the child is told: whom it serves, and how long it may take to end."""

    make: Callable[[Mapping[str, str]], FileSystemRemoteStorageManager]
    settings: Mapping[str, str]
    grace_s: float


Request = tuple[int, str, tuple[object, ...]]
"""Its number, the method and its arguments."""
Answer = tuple[int, object, Exception | None]
"""The number of the request, the result or else the error."""

CANCEL = "cancel"
"""The method of a request that takes back the one of its number. It has no answer, and neither has what it cancels."""
READY = -1
"""The number of the answer that says that requests are read."""
LENGTH = struct.Struct(">Q")


def frame_of(said: object) -> bytes:
    body = pickle.dumps(said, protocol=5)
    return LENGTH.pack(len(body)) + body


class FrameBuffer:
    """Bytes as they arrive, what was said as it ends."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """To be iterated to its end."""
        self._bytes += data
        position = 0
        while len(self._bytes) >= position + LENGTH.size:
            (length,) = LENGTH.unpack_from(self._bytes, position)
            end = position + LENGTH.size + length
            if len(self._bytes) < end:
                break
            with memoryview(self._bytes) as view, view[position + LENGTH.size : end] as body:
                said = pickle.loads(body)
            yield said
            position = end
        del self._bytes[:position]

"""The messages between a process and the child process of its store: pickles, each after its length.

Pickle is safe here: both ends of the socket pair are this program, and no other process has access to it.
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
    """The first message to the child: the storage manager to run, and the time that the child has for ending."""

    make: Callable[[Mapping[str, str]], FileSystemRemoteStorageManager]
    settings: Mapping[str, str]
    grace_s: float


Request = tuple[int, str, tuple[object, ...]]
"""The number of the request, the method and its arguments."""
Answer = tuple[int, object, Exception | None]
"""The number of the request, the result, and the error or None."""

CANCEL = "cancel"
"""The method of a request that cancels the request with the same number. Neither of the two gets an answer."""
READY = -1
"""The number of the first answer, by which the child reports that it reads requests."""
LENGTH = struct.Struct(">Q")


def frame_of(said: object) -> bytes:
    body = pickle.dumps(said, protocol=5)
    return LENGTH.pack(len(body)) + body


class FrameBuffer:
    """Collects bytes as they arrive and yields the complete messages."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """Yields the messages that `data` completes. The caller must exhaust the iterator."""
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

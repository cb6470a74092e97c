"""A response that passes while it arrives: bulk bytes are never held or copied, fields are patched by equal length.

The walk advances in steps, one group of fields each. A step reads a group that is wholly there, or raises
`TruncatedError` and changes nothing: then the few bytes of that group wait for the next chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from protocol.errors import LimitExceededError, ProtocolError, TruncatedError
from protocol.primitives import MAX_ARRAY_ELEMENTS, Buffer

_GROWTH_BYTES = 64


class StreamedResponse:
    """One response; fed with its payload, response header included. A subclass brings the steps.

    A step is set to `_step`; what it puts into `_edits`, as position and bytes, replaces as many bytes of its group.
    `_passing_bytes` pass before the next step.
    """

    def __init__(self, name: str, max_group_bytes: int) -> None:
        self._step: Callable[[Buffer, int], int]
        self._edits: list[tuple[int, bytes]] = []
        self._passing_bytes = 0
        self._is_finished = False
        self._held = bytearray()
        self._name = name
        self._max_group_bytes = max_group_bytes

    @property
    def is_complete(self) -> bool:
        """The whole response was seen."""
        return self._is_finished and not self._passing_bytes

    def feed(self, data: memoryview) -> Sequence[Buffer]:
        """What may leave now; the buffers alias `data`. Everything leaves but an incomplete last group of fields."""
        out: list[Buffer] = []
        pos = self._feed_held(data, out) if self._held else 0
        size = len(data)
        start = pos
        edits = self._edits
        while pos < size:
            if self._passing_bytes:
                passing = min(self._passing_bytes, size - pos)
                self._passing_bytes -= passing
                pos += passing
                continue
            if self._is_finished:
                raise ProtocolError(f"{size - pos} bytes after a {self._name} response")
            try:
                end = self._step(data, pos)
            except TruncatedError:
                self._held += data[pos:]
                self._check_held()
                break
            if edits:
                for position, value in edits:
                    if position > start:
                        out.append(data[start:position])
                    out.append(value)
                    start = position + len(value)
                edits.clear()
            pos = end
        if pos > start:
            out.append(data[start:pos])
        return out

    def _feed_held(self, data: memoryview, out: list[Buffer]) -> int:
        """Completes the held group from the head of `data`; returns how much of it was used."""
        held = self._held
        pos = 0
        while pos < len(data):
            before = len(held)
            # In growing portions: few tries for a long group, few bytes of records copied with a short one.
            held += data[pos : pos + max(_GROWTH_BYTES, before)]
            try:
                end = self._step(held, 0)
            except TruncatedError:
                pos += len(held) - before
                self._check_held()
                continue
            for position, value in self._edits:
                held[position : position + len(value)] = value
            self._edits.clear()
            out.append(held[:end])
            self._held = bytearray()
            return pos + end - before
        return pos

    def _check_held(self) -> None:
        if len(self._held) > self._max_group_bytes:
            raise ProtocolError(
                f"a group of fields of more than {self._max_group_bytes} bytes in a {self._name} response"
            )

    def _finish(self) -> None:
        self._is_finished = True


def checked_count(count: int) -> int:
    if count < -1:
        raise ProtocolError(f"array length {count}")
    if count > MAX_ARRAY_ELEMENTS:
        raise LimitExceededError(f"an array of {count} elements; the limit is {MAX_ARRAY_ELEMENTS}")
    return count

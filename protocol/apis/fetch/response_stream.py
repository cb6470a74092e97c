"""A walk over a response that forwards it while it arrives. A patch never changes the length of a field.

The walk never holds or copies record bytes. It advances in steps, and each step reads one group of fields. If the group
is incomplete, the step raises `TruncatedError` and changes nothing; its few bytes then wait for the next chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from protocol.errors import LimitExceededError, ProtocolError, TruncatedError
from protocol.primitives import MAX_ARRAY_ELEMENTS, Buffer

_GROWTH_BYTES = 64


class StreamedResponse:
    """The walk over one response. The caller feeds the payload, response header included; a subclass has the steps.

    A subclass assigns its next step to `_step`. A step may append `(position, bytes)` to `_edits`: those bytes replace
    as many bytes of its group. A step may set `_passing_bytes`: that many bytes pass unread before the next step.
    """

    def __init__(self, name: str, max_group_bytes: int) -> None:
        self._step: Callable[[Buffer, int], int]
        self._edits: list[tuple[int, bytes]] = []
        self._passing_bytes = 0
        self._is_finished = False
        self._held = bytearray()
        self.untaken_bytes = 0
        """How many of the last bytes of a `feed` were not taken. The caller feeds them again."""
        self._name = name
        self._max_group_bytes = max_group_bytes

    @property
    def is_complete(self) -> bool:
        """Whether the whole response has been fed."""
        return self._is_finished and not self._passing_bytes

    @property
    def passing_bytes(self) -> int:
        """The number of bytes that come next and pass unread."""
        return self._passing_bytes

    def skip(self, count: int) -> None:
        """Goes on behind `count` bytes that were not fed. They are at most `passing_bytes`."""
        self._passing_bytes -= count

    def feed(self, data: memoryview, max_groups: int = MAX_ARRAY_ELEMENTS) -> Sequence[Buffer]:
        """Returns the buffers that the caller may forward now: all bytes except an incomplete last group of fields.

        Takes at most `max_groups` groups whole: see `untaken_bytes`. Most of the buffers alias `data`. Raises
        `ProtocolError` for malformed bytes and for bytes after the end.
        """
        out: list[Buffer] = []
        pos = self.untaken_bytes = 0
        if self._held:
            pos = self._feed_held(data, out)
            max_groups -= 1
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
                raise ProtocolError(f"{size - pos} bytes follow the end of a {self._name} response")
            if not max_groups:
                self.untaken_bytes = size - pos
                break
            max_groups -= 1
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
        """Completes the held group from the head of `data`. Returns the number of bytes of `data` that it used."""
        held = self._held
        pos = 0
        while pos < len(data):
            before = len(held)
            # The portions grow. So a long group takes few attempts, and a short one copies few bytes of the records.
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
                f"found a group of fields of more than {self._max_group_bytes} bytes in a {self._name} response"
            )

    def _finish(self) -> None:
        self._is_finished = True


def checked_count(count: int) -> int:
    if count < -1:
        raise ProtocolError(f"the array length {count} is invalid")
    if count > MAX_ARRAY_ELEMENTS:
        raise LimitExceededError(f"an array of {count} elements exceeds the limit of {MAX_ARRAY_ELEMENTS}")
    return count

"""`FrameDecoder`: whole frames of a connection, for tests that read answers."""

from __future__ import annotations

from protocol.frame import LENGTH_BYTES, MAX_REQUEST_BYTES, FrameTracker
from protocol.primitives import Buffer


class FrameDecoder:
    """Collects whole payloads. Copies the bytes that it is fed, and allocates only for bytes that have arrived."""

    __slots__ = ("_payload", "_tracker")

    def __init__(self, max_frame_bytes: int = MAX_REQUEST_BYTES) -> None:
        self._tracker = FrameTracker(0, max_frame_bytes)
        self._payload = bytearray()

    @property
    def is_between_frames(self) -> bool:
        return self._tracker.is_between_frames

    def feed(self, data: Buffer) -> list[bytes]:
        """Returns the payloads that `data` completes, in order. Raises `FrameSizeError`."""
        payloads: list[bytes] = []
        for part in self._tracker.feed(data):
            body = part.data[LENGTH_BYTES:] if part.is_start else part.data
            if part.is_start and not part.remaining:
                payloads.append(bytes(body))
                continue
            self._payload += body
            if not part.remaining:
                payloads.append(bytes(self._payload))
                self._payload = bytearray()
        return payloads

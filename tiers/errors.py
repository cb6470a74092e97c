"""The errors of the remote log. `retriable` tells whether the same call may succeed later."""

from __future__ import annotations

import os
import re
from enum import StrEnum
from typing import Final

from protocol.errors import ErrorCode

_MAX_REASON: Final = 160
_PATH_OF_URL: Final = re.compile(r"(\w+://[^/\s\"']+)/[^\s\"':]*")
TRY_AGAIN = "try again; if it still fails, check that the store runs and that its address is right"
"""The advice for a retriable error of a store."""


class RemoteLogError(Exception):
    """The base class of all errors of the remote log."""

    retriable = False


class RemoteStorageError(RemoteLogError):
    """The store refused or failed."""


class RetriableRemoteStorageError(RemoteStorageError):
    """The store is slow, throttles or is unreachable. The caller may retry with backoff."""

    retriable = True


class StoreOverloadedError(RetriableRemoteStorageError):
    """The store throttles, or moved no byte within the deadline. Fewer requests at a time may help."""


class ThrottledError(StoreOverloadedError):
    """The store refused a request because of the rate of requests, and did nothing."""


class RemoteResourceNotFoundError(RemoteStorageError):
    """The object does not exist, or an eventually consistent store does not show it yet."""

    retriable = True


class CredentialsRefusedError(RemoteStorageError):
    """The store refuses the credentials, their rights are too few, or there are none. It did nothing."""


class CorruptSegmentError(RemoteStorageError):
    """Stored bytes do not match their checksum or their format. They are never served."""


class LaterFormatError(CorruptSegmentError):
    """A stored object has a version of its format that this release does not read. A later one may have written it."""


class EncryptionKeyError(RemoteStorageError):
    """The key ring lacks the key that wrapped a segment's key, or has another key with its name."""


class RemoteLogMetadataError(RemoteLogError):
    """A metadata record could not be written or read."""


class RemoteLogMetadataNotReadyError(RemoteLogMetadataError):
    """The metadata topic has not been read up to the required offset."""

    retriable = True


class NotKnownNow(RemoteLogError):
    """What the log has is not known now, so it is no answer. `proxy/handlers/base.py` maps the error for each API."""

    retriable = True


class OwnershipLostError(RemoteLogMetadataError):
    """The process no longer owns the metadata partition: there is a newer member or a newer producer epoch."""


class InvalidTransitionError(RemoteLogMetadataError):
    """The state machine does not allow this transition of a segment or a partition (docs/semantics.md 11.2)."""


class CustomMetadataTooLargeError(RemoteLogError):
    """The custom metadata exceeds remote.log.metadata.custom.metadata.max.bytes (KIP-917)."""


class ReaderQueueFullError(RemoteLogError):
    """The queue of downloads is full: remote.log.reader.max.pending.tasks downloads wait already."""

    retriable = True


class CircuitOpenError(RetriableRemoteStorageError):
    """The store failed several times in a row, so the circuit breaker rejects calls for a moment."""


class RemoteReadTimeoutError(RemoteLogError):
    """The read passed its deadline.

    `cause` is the last error; None when the download did not fail and is only slow."""

    retriable = True

    def __init__(self, message: str, cause: Exception | None = None) -> None:
        super().__init__(message)
        self.cause = cause


class OffsetBelowLogStartError(RemoteLogError):
    """The offset is below the log start, so it no longer exists for clients."""


class LogDivergedError(RemoteLogError):
    """The leader's log does not continue the copied segments (docs/semantics.md 6.5). The owner must not delete
    anything."""


class MetadataLostError(RemoteLogError):
    """The brokers or the store have more of a partition than the metadata knows. The owner must not copy or delete."""


class OffsetGapError(RemoteLogError):
    """The offset is below the local log start, and no remote segment holds it (docs/design.md, safety rule 5)."""


class BrokerError(RemoteLogError):
    """A broker answered with an error code, or could not be reached."""

    def __init__(self, message: str, code: int | None = None, *, retriable: bool = False) -> None:
        super().__init__(message)
        self.code = code
        self.retriable = retriable


class BrokerRefusedError(BrokerError):
    """The TLS handshake or the SASL authentication with a broker failed. The message names the setting to check.

    The error is retriable, because the broker may accept the certificate or the user later. A process that has never
    connected successfully should give up instead."""

    def __init__(self, message: str, code: int | None = None) -> None:
        super().__init__(message, code, retriable=True)


class Peer(StrEnum):
    """Who has to answer before work can go on."""

    STORE = "store"
    BROKERS = "brokers"


def silent_peer(error: BaseException | None) -> Peer | None:
    """Returns who did not answer, or refused the credentials, by an error and its causes. None: another cause."""
    while isinstance(error, RemoteLogError):
        if isinstance(error, RetriableRemoteStorageError | CredentialsRefusedError):
            return Peer.STORE
        if isinstance(error, BrokerError) and error.retriable and error.code in (None, ErrorCode.LEADER_NOT_AVAILABLE):
            return Peer.BROKERS
        error = error.__cause__
    return None


def reason_of(error: BaseException) -> str:
    """Returns why a call failed in few words: the system's word for it, or the message without the paths of URLs."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno:
            said = os.strerror(cause.errno) if cause.errno > 0 else cause.strerror or str(cause)
            return said.lower()
        # botocore raises its errors without a cause.
        cause = cause.__cause__ or (None if isinstance(cause, RemoteLogError) else cause.__context__)
    return short_reason(str(error) or repr(error))


def short_reason(message: str, longest: int = _MAX_REASON) -> str:
    """Returns the message of an error without the paths of its URLs, cut if it is still long."""
    text = _PATH_OF_URL.sub(r"\1", message)
    return text if len(text) <= longest else f"{text[: longest - 1]}…"

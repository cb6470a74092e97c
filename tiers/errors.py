"""What may go wrong with the remote log. `retriable` says whether the same call may succeed later, unchanged."""

from __future__ import annotations


class RemoteLogError(Exception):
    """The root of this layer's errors."""

    retriable = False


class RemoteStorageError(RemoteLogError):
    """The store refused or failed."""


class RetriableRemoteStorageError(RemoteStorageError):
    """The store is slow, throttling or unreachable: try again with backoff."""

    retriable = True


class SomeStoresInTroubleError(RetriableRemoteStorageError):
    """Of several stores that are one remote tier some did it, others are slow, throttling or unreachable."""


class RemoteResourceNotFoundError(RemoteStorageError):
    """The object does not exist, or a store that is eventually consistent does not show it yet."""

    retriable = True


class CorruptSegmentError(RemoteStorageError):
    """Stored bytes do not match their checksum. They are never served."""


class EncryptionKeyError(RemoteStorageError):
    """The key ring lacks the key that a segment was encrypted with, or has another under its name."""


class RemoteLogMetadataError(RemoteLogError):
    """A metadata record could not be written or read."""


class RemoteLogMetadataNotReadyError(RemoteLogMetadataError):
    """The metadata topic has not been read far enough to answer."""

    retriable = True


class OwnershipLostError(RemoteLogMetadataError):
    """This process no longer owns the metadata partition: a newer member or a newer producer epoch exists."""


class InvalidTransitionError(RemoteLogMetadataError):
    """A segment's or partition's state cannot move this way (semantics 11.2)."""


class CustomMetadataTooLargeError(RemoteLogError):
    """Custom metadata above remote.log.metadata.custom.metadata.max.bytes (KIP-917)."""


class ReaderQueueFullError(RemoteLogError):
    """remote.log.reader.max.pending.tasks downloads wait already."""

    retriable = True


class CircuitOpenError(RetriableRemoteStorageError):
    """The store failed so often that it is left alone for a moment."""


class RemoteReadTimeoutError(RemoteLogError):
    """The read did not end by its deadline. `cause` is what failed last; None: the download is healthy, only slow."""

    retriable = True

    def __init__(self, message: str, cause: Exception | None = None) -> None:
        super().__init__(message)
        self.cause = cause


class OffsetBelowLogStartError(RemoteLogError):
    """The offset lies below the tier's log start: it does not exist for clients any more."""


class LogDivergedError(RemoteLogError):
    """The leader's log does not continue what has been copied (semantics 6.5). Nothing may be deleted."""


class MetadataLostError(LogDivergedError):
    """The brokers or the store show more of a partition than the metadata knows. The owner must not copy or delete."""


class OffsetGapError(RemoteLogError):
    """The offset lies below the local log start, and no remote segment has it (DESIGN, safety rule 5)."""


class BrokerError(RemoteLogError):
    """A broker answered with an error code, or could not be reached."""

    def __init__(self, message: str, code: int | None = None, *, retriable: bool = False) -> None:
        super().__init__(message)
        self.code = code
        self.retriable = retriable


class BrokerRefusedError(BrokerError):
    """Broker and proxy do not agree on who they are: TLS or SASL. The message names the setting to look at.

    Retriable all the same: a certificate or a user may come later. Who was never let in had better give up."""

    def __init__(self, message: str, code: int | None = None) -> None:
        super().__init__(message, code, retriable=True)

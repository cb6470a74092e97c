"""Maps what the remote log does not know now to Kafka error codes (docs/semantics.md 3.5, 5.2, 9.1).

An unavailable partition gets REPLICA_NOT_AVAILABLE, because every client retries that error silently. Sarama does too,
but hands KAFKA_STORAGE_ERROR to the application. The error is never OFFSET_OUT_OF_RANGE, which makes consumers jump,
nor a code that ends an application's poll loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from protocol.api_keys import ApiKey
from protocol.errors import ErrorCode
from tiers.errors import RemoteLogError, RemoteReadTimeoutError, RetriableRemoteStorageError

NOT_KNOWN_NOW: Final[Mapping[ApiKey, ErrorCode]] = {
    ApiKey.FETCH: ErrorCode.REPLICA_NOT_AVAILABLE,
    ApiKey.LIST_OFFSETS: ErrorCode.REPLICA_NOT_AVAILABLE,  # the local tier's later offset would be a wrong answer
    ApiKey.DELETE_RECORDS: ErrorCode.REQUEST_TIMED_OUT,  # as a broker answers if a replica does not respond in time
}
"""The error code of each API for `NotKnownNow`, and for every other error of the remote log."""

UNAVAILABLE: Final = NOT_KNOWN_NOW[ApiKey.FETCH]


def fetch_error(error: RemoteLogError) -> ErrorCode:
    """Returns the error code for a partition whose remote read failed.

    If the store is slow or does not answer, the code is NONE: the client gets an empty partition and asks again. After
    an error, kafkajs sends no heartbeats, and gives up soon. An outage would then cost every group a rebalance. The
    function never returns OFFSET_OUT_OF_RANGE: the proxy only relays that error, after it has asked the leader."""
    cause = error.cause if isinstance(error, RemoteReadTimeoutError) else error
    return ErrorCode.NONE if cause is None or isinstance(cause, RetriableRemoteStorageError) else UNAVAILABLE

"""Exceptions as Kafka's error codes: the only place where the one becomes the other (semantics 3.5, 5.2, 9.1).

Unavailability is REPLICA_NOT_AVAILABLE: every client retries it silently, Sarama included, which surfaces
KAFKA_STORAGE_ERROR. It is never OFFSET_OUT_OF_RANGE, which makes consumers jump, nor a code that kills a poll loop.
"""

from __future__ import annotations

from protocol.errors import ErrorCode
from tiers.errors import RemoteLogError, RemoteReadTimeoutError

UNAVAILABLE = ErrorCode.REPLICA_NOT_AVAILABLE


def fetch_error(error: RemoteLogError) -> ErrorCode:
    """Returns the error code for a partition whose remote read failed.

    NONE for a healthy read that was only too slow: the client gets an empty partition and asks again. The function
    never returns OFFSET_OUT_OF_RANGE: the proxy only relays that error, after it has asked the leader."""
    if isinstance(error, RemoteReadTimeoutError) and error.cause is None:
        return ErrorCode.NONE
    return UNAVAILABLE


def list_offsets_error(error: RemoteLogError) -> ErrorCode:
    """For a look-up that could not be completed: never the local tier's later offset."""
    return UNAVAILABLE


def delete_records_error(error: RemoteLogError) -> ErrorCode:
    """The broker has deleted, the tier's log start was not recorded: as when a replica does not answer in time."""
    return ErrorCode.REQUEST_TIMED_OUT

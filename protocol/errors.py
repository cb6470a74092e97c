"""Kafka's error codes, and the exceptions for malformed bytes from a peer."""

from __future__ import annotations

from enum import IntEnum


class ErrorCode(IntEnum):
    """The error codes of `org.apache.kafka.common.protocol.Errors` that this project uses."""

    UNKNOWN_SERVER_ERROR = -1
    NONE = 0
    OFFSET_OUT_OF_RANGE = 1
    CORRUPT_MESSAGE = 2
    UNKNOWN_TOPIC_OR_PARTITION = 3
    LEADER_NOT_AVAILABLE = 5
    NOT_LEADER_OR_FOLLOWER = 6
    REQUEST_TIMED_OUT = 7
    REPLICA_NOT_AVAILABLE = 9
    COORDINATOR_LOAD_IN_PROGRESS = 14
    COORDINATOR_NOT_AVAILABLE = 15
    NOT_COORDINATOR = 16
    NOT_ENOUGH_REPLICAS = 19
    NOT_ENOUGH_REPLICAS_AFTER_APPEND = 20
    ILLEGAL_GENERATION = 22
    UNKNOWN_MEMBER_ID = 25
    INVALID_SESSION_TIMEOUT = 26
    REBALANCE_IN_PROGRESS = 27
    TOPIC_AUTHORIZATION_FAILED = 29
    GROUP_AUTHORIZATION_FAILED = 30
    CLUSTER_AUTHORIZATION_FAILED = 31
    ILLEGAL_SASL_STATE = 34
    UNSUPPORTED_VERSION = 35
    TOPIC_ALREADY_EXISTS = 36
    INVALID_CONFIG = 40
    INVALID_REQUEST = 42
    POLICY_VIOLATION = 44
    DUPLICATE_SEQUENCE_NUMBER = 46
    INVALID_PRODUCER_EPOCH = 47
    CONCURRENT_TRANSACTIONS = 51
    TRANSACTIONAL_ID_AUTHORIZATION_FAILED = 53
    KAFKA_STORAGE_ERROR = 56
    SASL_AUTHENTICATION_FAILED = 58
    FETCH_SESSION_ID_NOT_FOUND = 70
    INVALID_FETCH_SESSION_EPOCH = 71
    FENCED_LEADER_EPOCH = 74
    UNKNOWN_LEADER_EPOCH = 75
    UNSUPPORTED_COMPRESSION_TYPE = 76
    OFFSET_NOT_AVAILABLE = 78
    MEMBER_ID_REQUIRED = 79
    FENCED_INSTANCE_ID = 82
    PRODUCER_FENCED = 90
    UNKNOWN_TOPIC_ID = 100
    INCONSISTENT_TOPIC_ID = 103
    FETCH_SESSION_TOPIC_ID_ERROR = 106


class ProtocolError(Exception):
    """The peer's bytes break the protocol; the connection to that peer must close.

    `position` is the position of the faulty field in its message, if the reader knows it."""

    def __init__(self, message: str, position: int | None = None) -> None:
        super().__init__(message)
        self.position = position


class TruncatedError(ProtocolError):
    """A field runs past the end of its message."""


class FrameSizeError(ProtocolError):
    """A frame's length is negative or above the limit."""


class TlsHandshakeError(FrameSizeError):
    """The peer speaks TLS on a plaintext connection: its first bytes begin a TLS record, not a frame."""


class HttpError(FrameSizeError):
    """The peer speaks HTTP: its first bytes are the begin of an HTTP message, not the length of a frame."""


class LimitExceededError(ProtocolError):
    """A message has more entries than Kafka or the proxy accepts."""


class CorruptBatchError(ProtocolError):
    """A record batch or its content is malformed, or its CRC does not match. The bytes must not be forwarded."""

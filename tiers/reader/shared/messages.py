"""The messages between the process that reads the remote tier and the processes that ask it."""

from __future__ import annotations

import pickle
from typing import Final, NamedTuple
from uuid import UUID

from tiers.errors import RemoteLogError, RemoteReadTimeoutError
from tiers.model.log_source import AbortedTransaction

READ: Final = "read"
LEADER_EPOCHS: Final = "leader_epochs"
OFFSET_FOR_TIMESTAMP: Final = "offset_for_timestamp"
MAX_TIMESTAMP: Final = "max_timestamp"


class Ask(NamedTuple):
    """Asks for a call of `method`. The answer has the same number."""

    number: int
    method: str
    arguments: tuple[object, ...]
    keywords: dict[str, object]


class Cancel(NamedTuple):
    """Ends the call with this number. It gets no answer, unless that left before."""

    number: int


class GiveBack(NamedTuple):
    """Ends one loan of each of these buffers."""

    buffers: tuple[int, ...]


class Answer(NamedTuple):
    number: int
    result: object
    error: RemoteLogError | None


class Lent(NamedTuple):
    """Bytes of a shared buffer, lent until they are given back."""

    buffer: int
    start: int
    size_bytes: int


class LentRead(NamedTuple):
    """A `RemoteRead` whose records are lent, or are in the message.

    `new_buffers` are those that the receiver has not seen: the message has their descriptors, in this order."""

    records: tuple[Lent | bytes, ...]
    new_buffers: tuple[int, ...]
    size_bytes: int
    first_offset: int
    next_offset: int
    aborted_transactions: tuple[AbortedTransaction, ...] | None
    segment_id: UUID | None
    is_cache_hit: bool


class Dropped(NamedTuple):
    """Names a buffer that is used no more."""

    buffer: int


def sendable(error: RemoteLogError) -> RemoteLogError:
    """Returns the error, or one that says the same if it holds objects of a library that cannot be sent."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        said: RemoteLogError
        if isinstance(error, RemoteReadTimeoutError):
            said = RemoteReadTimeoutError(
                str(error), None if error.cause is None else RemoteLogError(repr(error.cause))
            )
        else:
            said = RemoteLogError(str(error))
        said.retriable = error.retriable
        return said
    return error

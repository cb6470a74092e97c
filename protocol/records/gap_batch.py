"""The batch that takes a consumer across offsets that no tier has, when no record follows them yet.

After compaction, a batch without records takes a consumer across. Two clients do not get past such a batch when an
answer holds nothing else: kafka-go restarts at offset 1, and kafkajs asks for the same offset forever.
So this module builds a control batch. Its marker has no producer, so it ends no transaction. Clients that know control
batches do not show the marker. The marker can have one of two offsets:

* The marker has the gap's last offset, like a marker that a transaction left there. Every client continues after it.
  But kafka-go does not know control batches and shows the marker as a message.
* The marker lies just below the requested offset, in a batch that reaches to the gap's end. Every client continues
  after the batch. No client shows a record below the requested offset, and neither does kafka-go. But kafkajs advances
  by one offset per request.

Up to Fetch version 10, the newest that kafka-go supports, the marker lies below the requested offset. From version 11
on, which kafkajs supports, the marker has the gap's last offset.
"""

from __future__ import annotations

from struct import Struct

from protocol.records.record_batch import (
    BATCH_HEADER_BYTES,
    LOG_OVERHEAD_BYTES,
    NO_PRODUCER_ID,
    NO_TIMESTAMP,
    crc32c,
)

MAX_OFFSETS = (1 << 31) - 1
"""The most offsets that one batch can take a client across.

The last offset delta is an int32, and the batch also holds the offset below the requested one."""

_MARKER_LAST_FROM = 11

_UP_TO_CRC = Struct(">qiibI")
_AFTER_CRC = Struct(">hiqqqhii")
_MAGIC = 2
_CONTROL = 0x20
_NO_PRODUCER_EPOCH = -1
_NO_SEQUENCE = -1
_COMMIT = bytes.fromhex(
    "20 00 00 00"  # length 16, attributes, timestamp delta, offset delta
    "08 0000 0001"  # key: version 0, COMMIT
    "0c 0000 00000000"  # value: version 0, coordinator epoch 0
    "00"  # no headers
)


def gap_batch(fetch_version: int, fetch_offset: int, next_offset: int, leader_epoch: int) -> bytes:
    """Returns the records of an answer to a Fetch at `fetch_offset`, after which the client asks for `next_offset`.

    When one batch cannot reach that far, the client next asks for an offset in between, and needs another such batch.
    `leader_epoch` is the leader epoch of the records around the gap, or -1. A record always lies below a gap, so
    `fetch_offset` is above 0. Raises `ValueError` for other offsets.
    """
    if not 0 < fetch_offset < next_offset:
        raise ValueError(f"the offsets [{fetch_offset}, {next_offset}) are no gap after a record")
    if fetch_version >= _MARKER_LAST_FROM:
        return _marker(next_offset - 1, next_offset, leader_epoch)
    return _marker(fetch_offset - 1, min(next_offset, fetch_offset + MAX_OFFSETS), leader_epoch)


def _marker(base_offset: int, next_offset: int, leader_epoch: int) -> bytes:
    """Returns a control batch for the offsets [`base_offset`, `next_offset`), with its marker at `base_offset`."""
    after_crc = (
        _AFTER_CRC.pack(
            _CONTROL,
            next_offset - base_offset - 1,
            NO_TIMESTAMP,
            NO_TIMESTAMP,
            NO_PRODUCER_ID,
            _NO_PRODUCER_EPOCH,
            _NO_SEQUENCE,
            1,
        )
        + _COMMIT
    )
    length = BATCH_HEADER_BYTES - LOG_OVERHEAD_BYTES + len(_COMMIT)
    crc = crc32c(after_crc, 0, len(after_crc))
    return _UP_TO_CRC.pack(base_offset, length, leader_epoch, _MAGIC, crc) + after_crc

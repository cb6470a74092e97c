"""What must hold for any bytes that a peer may send.

Each target takes arbitrary bytes, of which the first few choose an API and a version. It returns whether they were a
message at all, and raises `AssertionError`, or anything but the documented exception, when its invariant does not hold.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from struct import Struct

from protocol.addresses import Address, rewrite_addresses
from protocol.api_keys import ApiKey
from protocol.apis.delete_records import (
    DeleteRecordsAnswer,
    parse_delete_records_request,
    parse_delete_records_response,
    patch_delete_records_response,
)
from protocol.apis.list_offsets import (
    ListOffsetsAnswer,
    parse_list_offsets_request,
    parse_list_offsets_response,
    patch_list_offsets_response,
)
from protocol.apis.offset_for_leader_epoch import (
    EpochAnswer,
    parse_offset_for_leader_epoch_request,
    parse_offset_for_leader_epoch_response,
    patch_offset_for_leader_epoch_response,
)
from protocol.apis.produce import peek_acks
from protocol.errors import FrameSizeError, ProtocolError, TruncatedError
from protocol.frame import FramePart, FrameTracker
from protocol.header import (
    build_request_header,
    parse_request_head,
    parse_request_header,
    response_body_position,
    response_header_version,
)
from protocol.schema import MessagePlan, compile_message
from tests.support.fakes.frame_decoder import FrameDecoder

MAX_PREFIXES = 200
_MESSAGE = Struct(">hhb")
_API = Struct(">hh")


def prefixes_are_truncated(end: int, read: Callable[[int], object]) -> None:
    """`read(size)` of every size below `end` raises `TruncatedError`, and nothing else."""
    for size in range(0, end, max(1, end // MAX_PREFIXES)):
        try:
            read(size)
        except TruncatedError:
            continue
        raise AssertionError(f"{size} of {end} bytes were enough")


def frame(data: bytes) -> bool:
    """Frames are the same in one piece as byte by byte, and so is the error that ends them."""
    if len(data) < 2:
        return False
    head_bytes, limit = (0, 4, 8)[data[0] % 3], (1 << 8, 1 << 16, 0x7FFF_FFFF)[data[1] % 3]
    stream = data[2:]
    pieces = [stream[n : n + 1] for n in range(len(stream))]
    whole = _frames(FrameTracker(head_bytes, limit), [stream], head_bytes)
    singly = _frames(FrameTracker(head_bytes, limit), pieces, head_bytes)
    assert whole[1] == singly[1]
    decoded = _payloads(FrameDecoder(limit), [stream])
    assert decoded == _payloads(FrameDecoder(limit), pieces) or decoded[1] is not None
    assert decoded[1] == whole[1]
    if whole[1] is not None:
        return False
    assert whole == singly
    complete = [payload for payload, remaining in whole[0] if not remaining]
    assert decoded[0] == complete
    return bool(complete)


def _frames(
    tracker: FrameTracker, pieces: list[bytes], head_bytes: int
) -> tuple[list[tuple[bytes, int]], tuple[type, str] | None]:
    frames: list[tuple[bytes, int]] = []
    try:
        for piece in pieces:
            for part in tracker.feed(piece):
                _add_part(frames, part, head_bytes)
    except FrameSizeError as error:
        return [], (type(error), str(error))
    return frames, None


def _add_part(frames: list[tuple[bytes, int]], part: FramePart, head_bytes: int) -> None:
    if part.is_start:
        assert not frames or not frames[-1][1]
        payload = bytes(part.data[4:])
        assert len(payload) >= min(head_bytes, part.size)
    else:
        assert part.data
        payload = frames.pop()[0] + bytes(part.data)
    assert len(payload) + part.remaining == part.size
    frames.append((payload, part.remaining))


def _payloads(decoder: FrameDecoder, pieces: list[bytes]) -> tuple[list[bytes], tuple[type, str] | None]:
    payloads: list[bytes] = []
    try:
        for piece in pieces:
            payloads += decoder.feed(piece)
    except FrameSizeError as error:
        return [], (type(error), str(error))
    return payloads, None


def header(data: bytes) -> bool:
    """A header is read from all of its bytes or not at all; written again it reads the same."""
    try:
        parsed = parse_request_header(data)
    except ProtocolError:
        return False
    api_key, api_version, correlation_id, client_id, body = parsed
    assert 8 <= body <= len(data)
    assert parse_request_head(data) == parsed[:3]
    prefixes_are_truncated(body, lambda size: parse_request_header(data[:size]))
    again = parse_request_header(build_request_header(api_key, api_version, correlation_id, (client_id or "")[:10_000]))
    assert again[:4] == (api_key, api_version, correlation_id, client_id or "")
    try:
        position = response_body_position(api_key, api_version, data)
    except ProtocolError:
        assert response_header_version(api_key, api_version) == 1
        return True
    prefixes_are_truncated(position, lambda size: response_body_position(api_key, api_version, data[:size]))
    if api_key == ApiKey.PRODUCE:
        _acks(data)
    return True


def _acks(data: bytes) -> None:
    """Once the prefix tells the acks, more bytes do not change them."""
    try:
        acks = peek_acks(memoryview(data))
    except ProtocolError:
        return
    for size in range(8, len(data), max(1, len(data) // MAX_PREFIXES)):
        assert peek_acks(memoryview(data)[:size]) in (None, acks)


def _plan(data: bytes) -> tuple[MessagePlan, bytes] | None:
    if len(data) < _MESSAGE.size:
        return None
    api_key, version, kind = _MESSAGE.unpack_from(data)
    try:
        return compile_message(api_key, version, "Response" if kind else "Request"), data[_MESSAGE.size :]
    except ProtocolError:
        return None


def schema_walker(data: bytes) -> bool:
    """A walk reports every byte once; skipping ends where it does; a message that is cut short is known to be so."""
    chosen = _plan(data)
    if chosen is None:
        return False
    plan, body = chosen
    end = None
    with contextlib.suppress(ProtocolError):
        end = plan.skip(body, 0)
    try:
        spans = plan.walk(body, 0)
    except ProtocolError:
        return False  # it looks into tagged fields, which are skipped by their size
    pos = 0
    for span in spans:
        assert span.start == pos <= span.end
        pos = span.end
    assert end == pos <= len(body)
    prefixes_are_truncated(pos, lambda size: plan.skip(body[:size], 0))
    return True


def _advertised(node_id: int) -> Address | None:
    return None if node_id % 5 == 4 else (f"proxy-{node_id % 3}" * (1 + node_id % 30), 19_092 + node_id % 1000)


def addresses(data: bytes) -> bool:
    """A rewritten message has the same shape and the advertised addresses alone. A second rewrite changes nothing."""
    if len(data) < _API.size:
        return False
    api_key, version = _API.unpack_from(data)
    payload = data[_API.size :]
    try:
        out = bytes(rewrite_addresses(api_key, version, payload, _advertised))
    except ProtocolError:
        return False
    assert rewrite_addresses(api_key, version, out, _advertised) == out
    try:
        plan = compile_message(api_key, version, "Response")
        body = response_body_position(api_key, version, payload)
        before = plan.walk(payload, body)
    except ProtocolError:
        return False
    after = plan.walk(out, body)
    assert [span[:2] for span in before] == [span[:2] for span in after]
    for one, other in zip(before, after, strict=True):
        if one.path[-1:] not in (("Host",), ("Port",), ("NodeEndpoints",)):
            assert payload[one.start : one.end] == out[other.start : other.end], one
    return out != payload


_ANSWERED: dict[int, range] = {
    ApiKey.LIST_OFFSETS: range(1, 12),
    ApiKey.OFFSET_FOR_LEADER_EPOCH: range(2, 5),
    ApiKey.DELETE_RECORDS: range(3),
}


def partition_answers(data: bytes) -> bool:
    """ListOffsets, OffsetForLeaderEpoch, DeleteRecords: read as by the schema, and an answer that is overwritten says
    what was written, while all else stays."""
    chosen = _plan(data)
    if chosen is None:
        return False
    plan, body = chosen
    api_key, version, kind = _MESSAGE.unpack_from(data)
    if version not in _ANSWERED.get(api_key, ()):
        return False
    try:
        (_patched if kind else _asked)(api_key, version, body)
    except ProtocolError as error:
        if "UTF-8" not in str(error) and _is_by_schema(plan, body):
            raise AssertionError("the schema takes it for a message") from error
        return False
    end = len(body) if kind else end_of_request(api_key, version, body)
    prefixes_are_truncated(end, lambda size: (_patched if kind else _asked)(api_key, version, body[:size]))
    return True


def _is_by_schema(plan: MessagePlan, body: bytes) -> bool:
    try:
        spans = plan.walk(body, 0)
    except ProtocolError:
        return False
    return spans[-1].end == len(body)


def is_by_schema(api_key: int, version: int, kind: str, body: bytes, position: int) -> bool:
    """Whether the schema walker takes all of it for one message."""
    plan = compile_message(api_key, version, "Response" if kind == "Response" else "Request")
    return _is_by_schema(plan, body[position:])


def end_of_request(api_key: int, version: int, body: bytes) -> int:
    """Returns where a request ends by its schema; 0 without an end. A broker ignores what follows."""
    try:
        return compile_message(api_key, version, "Request").skip(body, 0)
    except ProtocolError:
        return 0


def _asked(api_key: int, version: int, body: bytes) -> int:
    if api_key == ApiKey.LIST_OFFSETS:
        return len(parse_list_offsets_request(body, 0, version).partitions)
    if api_key == ApiKey.DELETE_RECORDS:
        return len(parse_delete_records_request(body, 0, version).partitions)
    return len(parse_offset_for_leader_epoch_request(body, 0, version).partitions)


def _patched(api_key: int, version: int, body: bytes) -> int:
    if api_key == ApiKey.LIST_OFFSETS:
        listed = parse_list_offsets_response(body, 0, version)
        answer = ListOffsetsAnswer(9, 12, 1 << 40, 7)
        out = patch_list_offsets_response(listed, dict.fromkeys(range(len(listed.partitions)), answer))
        for before, after in zip(
            listed.partitions, parse_list_offsets_response(out, 0, version).partitions, strict=True
        ):
            assert after == before._replace(
                error_code=9, timestamp=12, offset=1 << 40, leader_epoch=7 if version >= 4 else -1
            )
        assert patch_list_offsets_response(listed, {}) == body
        return len(listed.partitions)
    if api_key == ApiKey.DELETE_RECORDS:
        deleted = parse_delete_records_response(body, 0, version)
        out = patch_delete_records_response(
            deleted, {n: DeleteRecordsAnswer(5, 7) for n in range(len(deleted.partitions))}
        )
        for was, one in zip(deleted.partitions, parse_delete_records_response(out, 0, version).partitions, strict=True):
            assert one == was._replace(low_watermark=5, error_code=7)
        return len(deleted.partitions)
    ended = parse_offset_for_leader_epoch_response(body, 0, version)
    answers = dict.fromkeys(range(len(ended.partitions)), EpochAnswer(0, 3, 99))
    out = patch_offset_for_leader_epoch_response(ended, answers)
    again = parse_offset_for_leader_epoch_response(out, 0, version)
    for epoch, patched in zip(ended.partitions, again.partitions, strict=True):
        assert (patched.leader_epoch, patched.end_offset) == (3, 99)
        assert (patched.topic, patched.partition, patched.position) == (epoch.topic, epoch.partition, epoch.position)
    return len(ended.partitions)

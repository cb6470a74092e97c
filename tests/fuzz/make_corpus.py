"""Writes the seeds of `corpus/`: messages by Kafka's schemas, batches of every format, metadata, `.indexes` objects.

    python -m tests.fuzz.make_corpus

Inputs that were found since, `found-*`, stay as they are. Nothing here is made by the code that the targets try, but
for what has no other writer.
"""

from __future__ import annotations

import random
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

from protocol.addresses import ADDRESS_FIELDS, carries_addresses
from protocol.api_keys import ApiKey
from protocol.message_schema import message_name
from tests.fuzz.connection_targets import IN_FLIGHT, TOGETHER, Step
from tests.fuzz.connection_world import KINDS, MALFORMED
from tests.fuzz.local_index_targets import stored_files
from tests.fuzz.targets import TARGETS
from tests.support.fakes.log_starts import user_log_start
from tests.support.fakes.message_encoder import (
    UNKNOWN_TAGS,
    Schema,
    Value,
    encode,
    is_flexible,
    message_schema,
    versions_of,
)
from tests.support.fakes.record_batches import (
    batch_of,
    build_batch,
    control_batch,
    legacy_message,
    legacy_wrapper,
    record,
)
from tests.support.fakes.segments import PARTITION, build_segment, metadata_of
from tiers.metadata.records.serde import encode_value
from tiers.model.log_start import LogGap
from tiers.model.segment_metadata import (
    LogGapUpdate,
    LogStartOffsetUpdate,
    RemoteLogSegmentMetadataUpdate,
    RemoteLogSegmentState,
    RemotePartitionDeleteState,
)
from tiers.model.segment_metadata import RemotePartitionDeleteMetadata as PartitionDelete
from tiers.segment.segment_builder import Carried

CORPUS = Path(__file__).parent / "corpus"
MAX_SEED_BYTES = 2047
_WALKED = (
    ApiKey.PRODUCE, ApiKey.METADATA, ApiKey.FIND_COORDINATOR, ApiKey.JOIN_GROUP, ApiKey.API_VERSIONS,
    ApiKey.CREATE_TOPICS, ApiKey.DESCRIBE_CONFIGS, ApiKey.DESCRIBE_CLUSTER, ApiKey.OFFSET_FETCH,
)  # fmt: skip
_ANSWERED = {
    ApiKey.LIST_OFFSETS: range(1, 12),
    ApiKey.OFFSET_FOR_LEADER_EPOCH: range(2, 5),
    ApiKey.DELETE_RECORDS: range(3),
}
_BITS = {"int8": 8, "int16": 16, "int32": 32, "int64": 64}


def _within(version: int, text: str) -> bool:
    first, _, last = text.rstrip("+").partition("-")
    return text != "none" and int(first) <= version <= (1 << 15 if text.endswith("+") else int(last or first))


class Messages:
    """Plain values of any message, by the schema."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def encoded(self, name: str, version: int) -> bytes:
        flexible = is_flexible(name, version)
        return bytes(encode(name, version, self._struct(message_schema(name)["fields"], version, flexible)).data)

    def _struct(self, fields: list[Schema], version: int, flexible: bool) -> Value:
        value: Value = {}
        for field in fields:
            if not _within(version, field["versions"]):
                continue
            if "tag" in field and _within(version, field["taggedVersions"]) and self._rng.random() < 0.5:
                continue
            value[field["name"]] = self._field(field, version, flexible)
        if flexible and self._rng.random() < 0.2:
            value[UNKNOWN_TAGS] = {100: b"tag"}
        return value

    def _field(self, field: Schema, version: int, flexible: bool) -> object:
        rng, kind = self._rng, field["type"].removeprefix("[]")
        if _within(version, field.get("nullableVersions", "none")) and rng.random() < 0.25:
            return None
        count = rng.choice((0, 1, 1, 2, 3)) if field["type"].startswith("[]") else None
        values = [self._value(field, kind, version, flexible) for _ in range(1 if count is None else count)]
        return values[0] if count is None else values

    def _value(self, field: Schema, kind: str, version: int, flexible: bool) -> object:
        rng = self._rng
        if "fields" in field:
            return self._struct(field["fields"], version, flexible)
        if kind in _BITS:
            return rng.choice((-1, 0, 1, 5, rng.randrange(1 << _BITS[kind] - 1)))
        if kind == "records":
            return batch_of(rng.randrange(100), rng.randrange(1, 4))
        return {
            "string": rng.choice(("", "orders", "tøpic", "x" * 130)),
            "bytes": rng.choice((b"", b"bytes", bytes(130))),
            "uuid": UUID(int=rng.randrange(1, 1 << 128)),
            "bool": rng.random() < 0.5,
            "uint16": 19_092,
            "float64": 0.5,
        }[kind]


def _message(messages: Messages, api_key: int, version: int, kind: str) -> bytes:
    head = struct.pack(">hhb", api_key, version, kind == "Response")
    return head + messages.encoded(message_name(api_key, "Response" if kind == "Response" else "Request"), version)


def _request_frame(api_key: int, version: int, body: bytes) -> bytes:
    tags = b"\x00" if is_flexible(message_name(api_key, "Request"), version) else b""
    return struct.pack(">hhih", api_key, version, 7, 4) + b"test" + tags + body


def _response_frame(api_key: int, version: int, body: bytes) -> bytes:
    has_tags = is_flexible(message_name(api_key, "Response"), version) and api_key != ApiKey.API_VERSIONS
    return struct.pack(">i", 7) + (b"\x00" if has_tags else b"") + body


def seeds(folder: Path, rng: random.Random) -> Iterator[tuple[str, str, bytes]]:
    """`(target, name, input)`."""
    messages = Messages(rng)
    for version in range(4, 19):
        for number in range(3):
            first = bytes((version - 4, rng.randrange(256)))
            yield "fetch_request", f"v{version}-{number}", first + messages.encoded("FetchRequest", version)
            payload = _response_frame(ApiKey.FETCH, version, messages.encoded("FetchResponse", version))
            yield "fetch_response", f"v{version}-{number}", first + payload
    for walked in _WALKED:
        for kind in ("Request", "Response"):
            versions = versions_of(message_name(walked, "Request"))
            for version in sorted({versions[0], versions[len(versions) // 2], versions[-1]}):
                name = f"{walked.name.lower()}-v{version}-{kind.lower()}"
                message = _message(messages, walked, version, kind)
                yield "schema_walker", name, message
                if kind == "Request":
                    yield "header", name, _request_frame(walked, version, message[5:])
    for key in map(ApiKey, ADDRESS_FIELDS):
        for version in versions_of(message_name(key, "Response")):
            if carries_addresses(key, version):
                payload = _response_frame(key, version, messages.encoded(message_name(key, "Response"), version))
                yield "addresses", f"{key.name.lower()}-v{version}", struct.pack(">hh", key, version) + payload
    for key, answered in _ANSWERED.items():
        for version in answered:
            for kind in ("Request", "Response"):
                name = f"{key.name.lower()}-v{version}-{kind.lower()}"
                yield "partition_answers", name, _message(messages, key, version, kind)
    yield from _frames(rng)
    for name, program in _programs():
        yield "connections", name, program
    for name, log in _logs().items():
        yield "record_batches", name, log
    yield from _stored(folder)
    whole = stored_files()
    for name, cut in (("whole", 0), ("cut-1", 1), ("cut-7", 7), ("cut-20", 20)):  # the offset index is at the end
        yield "local_index_files", name, whole[: len(whole) - cut]
    for version in (1, 2):
        for number in range(6):
            payload = _response_frame(ApiKey.SHARE_FETCH, version, messages.encoded("ShareFetchResponse", version))
            yield "share_fetch_response", f"v{version}-{number}", bytes((version - 1,)) + payload
    yield from _decoded()


def _decoded() -> Iterator[tuple[str, str, bytes]]:
    """The batches of `_logs` with right checksums, a good one after an aborted transaction, and a full record."""
    for name, log in _logs().items():
        yield "decoded_records", name, b"\x01" + log
    transactions = [
        build_batch(offset, [record(offset)], producer_id=9, producer_epoch=1, transactional=True)
        for offset in (10, 12)
    ]
    abort = control_batch(11, commit=False, producer_id=9, producer_epoch=1)
    yield "decoded_records", "aborted", b"\x03" + transactions[0] + abort + transactions[1]
    rows = [
        record(10, 1_700_000_000_000, b"k" * 70, b"v" * 300, [("tøpic", b""), ("", None)]),
        record(14, 1_600_000_000_000, b"", None, [("h" * 70, b"x" * 70)]),
        record(300, 1_800_000_000_000, None, b""),
    ]
    for codec in range(5):
        yield "decoded_records", f"whole-{codec}", b"\x01" + build_batch(10, rows, codec=codec)
    yield "decoded_records", "range", b"\x05" + build_batch(10, rows) + batch_of(301, 2)


def _frames(rng: random.Random) -> Iterator[tuple[str, str, bytes]]:
    for number in range(9):
        payloads = [rng.randbytes(rng.choice((0, 1, 3, 4, 8, 30, 200))) for _ in range(rng.randrange(1, 6))]
        stream = b"".join(struct.pack(">i", len(payload)) + payload for payload in payloads)
        yield "frame", f"frames-{number}", bytes((number % 3, number // 3)) + stream
    yield "frame", "tls", b"\x00\x00" + b"\x16\x03\x01\x02\x00\x01"
    yield "frame", "negative", b"\x01\x01" + b"\x00\x00\x00\x01a" + b"\xff\xff\xff\xff"
    yield "frame", "too-large", b"\x01\x00" + b"\x00\x00\x00\x01a" + b"\x00\x00\x01\x01"


def _logs() -> dict[str, bytes]:
    rows = [
        record(10, key=b"k", headers=[("h", b"1"), ("n", None)]),
        record(11, value=None),
        record(12, value=b"v" * 70),
    ]
    logs = {f"codec-{codec}": build_batch(10, rows, codec=codec) for codec in range(5)}
    logs["xerial"] = build_batch(10, rows, codec=2, xerial=True)
    logs["append-time"] = build_batch(10, rows, log_append_time_ms=1_700_000_000_000)
    logs["compacted"] = build_batch(10, [], last_offset=15)
    logs["transaction"] = build_batch(10, rows, producer_id=9, producer_epoch=1, transactional=True) + control_batch(
        13, commit=False, producer_id=9, producer_epoch=1
    )
    logs["three"] = b"".join(batch_of(offset, 3) for offset in (0, 3, 9))
    logs["cut-short"] = logs["three"][:-5]
    logs["wrong-crc"] = logs["three"][:-1] + b"\x00"
    for magic in (0, 1):
        logs[f"magic-{magic}"] = b"".join(legacy_message(magic, n, 1_600_000_000_000, b"k", b"v") for n in range(3))
        for codec in (1, 2, 3):
            plain = [record(offset, key=b"k") for offset in (5, 6, 7)]
            logs[f"magic-{magic}-codec-{codec}"] = legacy_wrapper(magic, 5, plain, codec)
    return logs


def _stored(folder: Path) -> Iterator[tuple[str, str, bytes]]:
    logs = {
        "one": [batch_of(0, 3)],
        "three": [batch_of(offset, 10, value_bytes=200, leader_epoch=offset // 10) for offset in (0, 10, 20)],
        "aborted": [
            build_batch(0, [record(0)], producer_id=9, producer_epoch=1, transactional=True),
            control_batch(1, commit=False, producer_id=9, producer_epoch=1),
        ],
        "producers": [
            build_batch(offset, [record(offset)], producer_id=offset % 7 * (1 << offset), producer_epoch=0)
            for offset in range(20)
        ],
    }
    for number, (name, batches) in enumerate(logs.items()):
        built = build_segment(folder / name, [b"".join(batches)], chunk_bytes=1000)
        metadata = metadata_of(built, segment_uuid=UUID(int=number + 1))
        content = built.log_segment_data(metadata).indexes
        for flag in (0, 1):
            yield "indexes_object", f"{name}-{flag}", bytes((flag,)) + content
            if Carried.behind(built.indexes).producers:
                yield "producer_snapshot", f"{name}-{flag}", bytes((flag,)) + bytes(built.indexes.producer_snapshot)
        yield "metadata_record", f"{name}-started", encode_value(metadata)
        segment_id = metadata.segment_id
        for state in RemoteLogSegmentState:
            update = RemoteLogSegmentMetadataUpdate(segment_id, 1, 1_700_000_000_000, state, b"custom" * number or None)
            yield "metadata_record", f"{name}-{state.name.lower()}", encode_value(update)
    for deletion in RemotePartitionDeleteState:
        record_of_it = PartitionDelete(PARTITION, 1, 1_700_000_000_000, deletion)
        yield "metadata_record", deletion.name.lower(), encode_value(record_of_it)
    log_start = LogStartOffsetUpdate(PARTITION, "writer", 1_700_000_000_000, user_log_start(77))
    yield "metadata_record", "log-start", encode_value(log_start)
    gap = LogGapUpdate(PARTITION, "writer", 1_700_000_000_000, LogGap(77, 99), 3)
    yield "metadata_record", "log-gap", encode_value(gap)


def _programs() -> Iterator[tuple[str, bytes]]:
    """Yields programs of `connections`. The first number is that of the limit of requests in flight."""
    every_kind = [number for kind in range(KINDS) for number in (Step.REQUEST | TOGETHER, 0, kind, 50)]
    torn = [number for kind in range(KINDS) for number in (Step.PART_OF_REQUEST, 0, kind, 255, 14 + kind)]
    answers = [Step.ANSWER, 0] * KINDS
    torn_answers = [number for size in range(3, 40) for number in (Step.PART_OF_ANSWER, 0, size)]
    at_once, stalls, reads = [Step.CLUSTER, 7], [Step.CLIENT_STALLS, 0], [Step.CLIENT_READS, 0, 0]
    first = [Step.REQUEST, 0, 0, 0]
    for in_flight in range(len(IN_FLIGHT)):
        yield f"pipelined-{in_flight}", bytes([in_flight, *every_kind, Step.TIME, 0, *answers])
        yield f"torn-{in_flight}", bytes([in_flight, *torn, *torn_answers])
        burst = [number for kind in range(KINDS) for number in (Step.BURST, 0, kind, 15)]
        yield f"bursts-{in_flight}", bytes([in_flight, *first, *at_once, *burst])
        yield f"stalled-{in_flight}", bytes([in_flight, *first, *at_once, *stalls, *burst, Step.CLIENT_READS, 0, 255])
    self_answered = [Step.BURST, 0, 3, 120] * 12
    yield "never-reads", bytes([0, *first, *stalls, *self_answered])
    yield "reads-late", bytes([1, *first, *stalls, *self_answered, *reads, *at_once])
    for which in range(len(MALFORMED)):
        yield f"malformed-{which}", bytes([0, *every_kind, Step.MALFORMED, 0, which, *answers])
    for how in (0, 1):
        yield f"client-leaves-{how}", bytes([0, *every_kind, Step.ANSWER, 0, Step.CLIENT_LEAVES, 0, how, *answers])
        yield f"broker-leaves-{how}", bytes([0, *every_kind, Step.ANSWER, 0, Step.BROKER_LEAVES, 0, how, *first])
    yield "broker-stalls", bytes([0, *first, Step.BROKER_STALLS, 0, *[Step.BURST, 0, 4, 255] * 3, *torn])
    yield "noise", bytes([0, *every_kind, Step.NOISE, 0, 1, 8, 0, 0, 0, 4, 9, 9, 9, 9])
    yield "stray-answer", bytes([0, *every_kind, Step.ANSWER, 0, Step.NOISE, 0, 0, *answers])
    yield "stray-answer-to-nobody", bytes([0, *first, Step.ANSWER, 0, Step.NOISE, 0, 0, *first])
    yield "drain", bytes([0, *every_kind, Step.PART_OF_ANSWER, 0, 9, Step.CLUSTER, 0, *answers])
    yield "refused", bytes([0, Step.CLUSTER, 1, *every_kind, Step.TIME, 120, Step.CLUSTER, 1, *at_once])
    two = [number for client in (0, 1, 2) for number in (Step.BURST, client, 0, 30)]
    yield "three-clients", bytes([0, *two, *stalls, *[Step.ANSWER, 0, Step.ANSWER, 1, Step.ANSWER, 2] * 30])


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        made = list(seeds(Path(folder), random.Random(4)))
    for name in TARGETS:
        for stale in (CORPUS / name).glob("*"):
            if not stale.name.startswith("found-"):
                stale.unlink()
    for target, name, content in made:
        if len(content) <= MAX_SEED_BYTES:
            path = CORPUS / target / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


if __name__ == "__main__":
    main()

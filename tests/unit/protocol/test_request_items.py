"""The items of a request are limited, and a request above the limit is refused before its items are decoded."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from protocol.api_keys import ApiKey
from protocol.apis import config_entries, coordinated_ids, named_topics
from protocol.apis.delete_records import parse_delete_records_request
from protocol.apis.fetch.request import parse_fetch_request
from protocol.apis.list_offsets import parse_list_offsets_request
from protocol.apis.offset_for_leader_epoch import parse_offset_for_leader_epoch_request
from protocol.errors import LimitExceededError
from protocol.header import build_request_header, parse_request_header
from protocol.primitives import INT32, MAX_ITEMS, Buffer, write_array_length, write_string

Decode = Callable[[Buffer], object]
Parse = Callable[[Buffer, int, int], object]
NAME = write_string("a", compact=False)


def by_position(parse: Parse) -> Decode:
    def decode(frame: Buffer) -> object:
        header = parse_request_header(frame)
        return parse(frame, header.body_position, header.api_version)

    return decode


CASES: dict[str, tuple[Decode, ApiKey, int, bytes, bytes, bytes, int]] = {
    "topics of DeleteTopics": (
        named_topics.named_topics, ApiKey.DELETE_TOPICS, 1, b"", NAME, INT32.pack(1), MAX_ITEMS
    ),
    "topics of CreatePartitions": (
        named_topics.named_topics, ApiKey.CREATE_PARTITIONS, 0, b"", NAME + bytes(4) + INT32.pack(-1), bytes(5),
        MAX_ITEMS
    ),
    "topics of Metadata": (named_topics.named_topics, ApiKey.METADATA, 1, b"", NAME, b"", MAX_ITEMS),
    "groups of DeleteGroups": (
        coordinated_ids.deleted_groups, ApiKey.DELETE_GROUPS, 0, b"", NAME, b"", MAX_ITEMS
    ),
    "resources of AlterConfigs": (
        config_entries.parse_config_request, ApiKey.ALTER_CONFIGS, 0, b"", b"\x02" + NAME + bytes(4), b"\x00",
        MAX_ITEMS
    ),
    "settings of AlterConfigs": (
        config_entries.parse_config_request, ApiKey.ALTER_CONFIGS, 0, INT32.pack(1) + b"\x02" + NAME, NAME + NAME,
        b"\x00", MAX_ITEMS
    ),
    "resources of DescribeConfigs": (
        config_entries.parse_describe_configs_request, ApiKey.DESCRIBE_CONFIGS, 1, b"", b"\x02" + NAME + bytes(4),
        b"\x00", MAX_ITEMS
    ),
    "keys of DescribeConfigs": (
        config_entries.parse_describe_configs_request, ApiKey.DESCRIBE_CONFIGS, 1, INT32.pack(1) + b"\x02" + NAME, NAME,
        b"\x00", MAX_ITEMS - 1
    ),
    "partitions of ListOffsets": (
        by_position(parse_list_offsets_request), ApiKey.LIST_OFFSETS, 1, INT32.pack(-1) + INT32.pack(1) + NAME,
        bytes(12), b"", MAX_ITEMS - 1
    ),
    "partitions of OffsetForLeaderEpoch": (
        by_position(parse_offset_for_leader_epoch_request), ApiKey.OFFSET_FOR_LEADER_EPOCH, 2, INT32.pack(1) + NAME,
        bytes(12), b"", MAX_ITEMS - 1
    ),
    "partitions of DeleteRecords": (
        by_position(parse_delete_records_request), ApiKey.DELETE_RECORDS, 0, INT32.pack(1) + NAME, bytes(12), bytes(4),
        MAX_ITEMS - 1
    ),
    "partitions of Fetch": (
        by_position(parse_fetch_request), ApiKey.FETCH, 4, INT32.pack(-1) + bytes(13) + INT32.pack(1) + NAME,
        bytes(16), b"", MAX_ITEMS - 1
    ),
    "topics of Fetch": (
        by_position(parse_fetch_request), ApiKey.FETCH, 4, INT32.pack(-1) + bytes(13), NAME + bytes(4), b"",
        MAX_ITEMS
    ),
    "forgotten topics of Fetch": (
        by_position(parse_fetch_request), ApiKey.FETCH, 7, INT32.pack(-1) + bytes(21 + 4), NAME + bytes(4), b"",
        MAX_ITEMS
    ),
}  # fmt: skip
"""By case: the decoder, the API key, the version, the bytes before the array, an item, the bytes behind the array, and
the most items."""


@pytest.mark.parametrize("case", CASES)
def test_a_request_with_too_many_items_is_refused(case: str) -> None:
    decode, api_key, version, before, item, behind, most = CASES[case]
    head = build_request_header(api_key, version, 1, "client") + before
    decode(head + write_array_length(most, compact=False) + item * most + behind)
    with pytest.raises(LimitExceededError, match=r"above the limit of"):
        decode(head + write_array_length(most + 1, compact=False) + item * (most + 1) + behind)


def test_the_settings_of_1000_mirrored_topics_are_decoded() -> None:
    """MirrorMaker 2 changes every setting of every topic in one request."""
    topics, settings = 1_000, 35
    change = write_string("segment.ms", compact=False) + b"\x00" + write_string("604800000", compact=False)
    names = [write_string(f"source.topic-{number}", compact=False) for number in range(topics)]
    resources = b"".join(b"\x02" + name + INT32.pack(settings) + change * settings for name in names)
    head = build_request_header(ApiKey.INCREMENTAL_ALTER_CONFIGS, 0, 1, "mirror")
    request = config_entries.parse_config_request(head + INT32.pack(topics) + resources + b"\x00")
    assert sum(len(resource.changes) for resource in request.resources) == topics * settings


def test_a_large_request_with_an_id_of_the_owners_is_refused() -> None:
    item = write_string("a", compact=True) + b"\x01\x00"
    count = coordinated_ids.MAX_REFUSED_BYTES // len(item)
    head = build_request_header(ApiKey.OFFSET_COMMIT, 8, 1, "client") + b"\x02g" + bytes(4) + b"\x01\x00"
    with pytest.raises(LimitExceededError, match=r"an id of the remote log's own"):
        coordinated_ids.refusal(head + write_array_length(count, compact=True) + item * count + b"\x00", 30)

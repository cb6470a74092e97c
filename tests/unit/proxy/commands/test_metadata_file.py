"""The replay of a file that `import` read."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID

import pytest

from proxy.commands.tier import metadata
from proxy.commands.tier.metadata import partition_to_export, records_of_file
from tests.support.proxy.command_bench import CommandBench
from tests.support.proxy.parsed_config import parse_config
from tests.support.tiers.segment_metadata import segment
from tiers.access.open_tier import RemoteTierError
from tiers.metadata.records.flat_file import FlatFile, PartitionDeleteEntry, encode_flat_file
from tiers.metadata.records.serde import decode_key, decode_value
from tiers.metadata.state.layout import StateIdentity
from tiers.metadata.state.replay import MetadataEvent, PartitionRead
from tiers.metadata.state.writer import RemoteLogMetadataStateWriter
from tiers.model.ids import TopicIdPartition
from tiers.model.log_start import LogStart, LogStartReason
from tiers.model.segment_metadata import LogStartOffsetUpdate, RemoteLogSegmentState, RemotePartitionDeleteState

PARTITION = TopicIdPartition(UUID(int=7), 2, "orders")


def test_every_state_is_what_it_was(tmp_path: Path) -> None:
    made = [segment(PARTITION, 10 * number, 10 * number + 9) for number in range(3)]
    states = RemoteLogSegmentState
    wanted = [
        replace(made[0], state=states.DELETE_SEGMENT_STARTED, custom_metadata=b"there"),
        replace(made[1], state=states.COPY_SEGMENT_FINISHED, custom_metadata=b"here"),
        replace(made[2], state=states.COPY_SEGMENT_STARTED),
    ]
    deletion = PartitionDeleteEntry(-1, 0, RemotePartitionDeleteState.DELETE_PARTITION_STARTED)
    records = records_of_file(FlatFile(PARTITION.topic_id, 5, tuple(wanted), deletion), PARTITION, 12, 1)
    events = []
    for offset, (key, value) in enumerate(records):
        assert value is not None
        events.append(MetadataEvent(offset, 1, decode_key(key), decode_value(value)))
    state = RemoteLogMetadataStateWriter.open(tmp_path, StateIdentity("c", UUID(int=1), 1), map_size_bytes=1 << 20)
    try:
        state.apply([PartitionRead(0, events, len(events))])
        found = {each.start_offset: each for each in state.list_remote_log_segments(PARTITION)}
        assert {start: (each.state, each.custom_metadata) for start, each in found.items()} == {
            each.start_offset: (each.state, each.custom_metadata) for each in wanted
        }
        assert (state.earliest_offset(PARTITION), state.log_start_offset(PARTITION)) == (10, 12)
        assert state.remote_partition_delete_state(PARTITION) is deletion.state
    finally:
        state.close()


@pytest.mark.parametrize(
    ("ranges", "last_epoch"),
    [
        ([(0, 89, 3), (90, 120, 4)], 4),
        ([(0, 99, 3), (100, 120, 4)], 3),
        ([(100, 120, 4)], -1),
    ],
)
def test_the_log_start_names_the_epoch_of_the_record_before_it(
    ranges: list[tuple[int, int, int]], last_epoch: int
) -> None:
    """A leader that was cut off in epoch 3 may have other records up to the log start."""
    finished = RemoteLogSegmentState.COPY_SEGMENT_FINISHED
    made = [replace(segment(PARTITION, start, end, epoch=epoch), state=finished) for start, end, epoch in ranges]
    *_, (_, value) = records_of_file(FlatFile(PARTITION.topic_id, 5, tuple(made)), PARTITION, 100, 1)
    assert value is not None
    update = decode_value(value)
    assert isinstance(update, LogStartOffsetUpdate)
    assert update.log_start == LogStart(100, 4, LogStartReason.USER, last_epoch)


async def test_the_existing_one_of_two_topics_of_a_name_is_exported(bench: CommandBench) -> None:
    before = replace(PARTITION, topic_id=UUID(int=6))
    for partition in (before, PARTITION):
        await bench.rlmm.add_remote_log_segment_metadata(segment(partition, 0, 9))

    def among(*topic_ids: UUID) -> TopicIdPartition:
        cluster = SimpleNamespace(topics_by_id=dict.fromkeys(topic_ids))
        return partition_to_export(replace(bench.tier(), cluster=cast(Any, cluster)), "orders:2")

    assert among(PARTITION.topic_id) == PARTITION
    with pytest.raises(RemoteTierError, match="orders:2 is ambiguous: 2 deleted topics had this name"):
        among()


async def test_a_partition_is_imported_once_and_only_if_it_exists(
    bench: CommandBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also without --yes."""
    await bench.rlmm.add_remote_log_segment_metadata(segment(PARTITION, 0, 9))
    topic = SimpleNamespace(topic_id=PARTITION.topic_id, partitions={1: None, 2: None})
    cluster = SimpleNamespace(topics={"orders": topic, "__remote_log_metadata": None})

    @asynccontextmanager
    async def opened(*_: object, **__: object) -> AsyncIterator[tuple[None, SimpleNamespace]]:
        yield None, cluster

    @asynccontextmanager
    async def known(*_: object, **__: object) -> AsyncIterator[object]:
        yield bench.rlmm

    monkeypatch.setattr(metadata, "tiered_cluster", opened)
    monkeypatch.setattr(metadata, "metadata_to_now", known)
    data = encode_flat_file(FlatFile(PARTITION.topic_id, 5, (segment(PARTITION, 0, 9),)))
    config = parse_config('[upstream]\nbootstrap.servers = "localhost:1"\n')
    assert len((await metadata.import_into(config, "orders", 1, data, None, write=False)).segments) == 1
    for number, said in ((2, "orders:2 already has metadata"), (3, "topic orders has no partition 3")):
        with pytest.raises(RemoteTierError, match=said):
            await metadata.import_into(config, "orders", number, data, None, write=False)
    del cluster.topics["__remote_log_metadata"]
    assert len((await metadata.import_into(config, "orders", 2, data, None, write=False)).segments) == 1

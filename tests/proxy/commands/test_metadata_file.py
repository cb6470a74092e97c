"""What `import` makes of a file, once it is replayed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from uuid import UUID

from proxy.commands.metadata import records_of_file
from tests.contract.test_remote_log_metadata_manager import segment
from tiers.metadata.flat_file import FlatFile, PartitionDeleteEntry
from tiers.metadata.serde import decode_key, decode_value
from tiers.metadata.state_layout import StateIdentity
from tiers.metadata.state_replay import MetadataEvent, PartitionRead
from tiers.metadata.state_writer import RemoteLogMetadataStateWriter
from tiers.model.ids import TopicIdPartition
from tiers.model.segment_state import RemoteLogSegmentState, RemotePartitionDeleteState

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
    state = RemoteLogMetadataStateWriter.open(
        tmp_path, StateIdentity("c", UUID(int=1), 1), wall_clock_ms=lambda: 0, map_size_bytes=1 << 20
    )
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

"""The owner gives the index of each segment that it copied to the local index files, and removes what is deleted."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from tests.support.tiers.attempts import batches
from tests.support.tiers.topic_deletion_bench import Existence
from tests.support.tiers.workbench import PARTITION, POLICY, Workbench
from tiers.model.ids import TopicIdPartition
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.tasks.deletion.topic_deletion import TopicDeletionTask


@dataclass
class LocalFiles:
    """Notes the calls. Each `put` fails while it is broken."""

    is_broken: bool = False
    kept: dict[int, bytes] = field(default_factory=dict)
    removed_below: list[int] = field(default_factory=list)

    async def put(self, segment: RemoteLogSegmentMetadata, raw: bytes) -> None:
        if self.is_broken:
            raise ZeroDivisionError
        self.kept[segment.start_offset] = raw

    async def remove_below(self, partition: TopicIdPartition, offset: int) -> None:
        self.removed_below.append(offset)


@pytest.fixture
async def files(bench: Workbench) -> LocalFiles:
    made = LocalFiles()
    bench.services = replace(bench.services, local_indexes=made)
    bench.restart()
    bench.log.append(*batches(0, 70))
    return made


async def test_each_copied_segment_is_in_the_local_files(bench: Workbench, files: LocalFiles) -> None:
    await bench.copy_all()
    stored = {segment.start_offset: await bench.store.fetch_indexes(segment) for segment in bench.segments}
    assert files.kept == stored
    assert sorted(stored) == [0, 30]


async def test_no_error_of_the_local_files_fails_a_copy(
    bench: Workbench, files: LocalFiles, caplog: pytest.LogCaptureFixture
) -> None:
    files.is_broken = True
    await bench.copy_all()
    assert bench.finished == [(0, 29), (30, 59)]
    assert "is not in the local index files" in caplog.text


async def test_the_owner_removes_the_files_of_what_it_deletes(bench: Workbench, files: LocalFiles) -> None:
    await bench.copy_all()
    await bench.expire(replace(POLICY, retention_bytes=bench.segments[1].segment_size_bytes))
    assert files.removed_below == [30]
    await bench.metadata.put_topic_deletion(PARTITION.topic_id, PARTITION.topic, is_confirmed=True)
    deletion = TopicDeletionTask(bench.services, Existence(PARTITION.topic_id))
    assert await deletion.run() == 0
    bench.now_ms += bench.services.settings.remote_log.topic_deletion_delay_ms
    assert await deletion.run() == 1
    assert files.removed_below[-1] > 60

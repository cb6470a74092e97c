"""A topic in both tiers, and its copiers, which are processes that a test may kill after each step."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from protocol.records.record_batch import verify_batches
from tests.support.servers.copier import CopierOptions
from tests.support.servers.kafka import KafkaCluster
from tiers.log.broker_log import BrokerLogSource
from tiers.metadata.remote_log_metadata_manager import RemoteLogMetadataManager
from tiers.model.ids import TopicIdPartition
from tiers.model.segment_metadata import RemoteLogSegmentMetadata, RemoteLogSegmentState

TIMEOUT_MS = 300_000
LIMIT_S = 300
"""The time limit of a copier from its start on, with a dozen copiers on a busy machine."""
STEPS = [
    ("segment-built", 2),
    ("copy-started-written", 1),
    ("objects-written", 2),
    ("copy-verified", 3),
    ("copy-finished-written", 2),
    ("trim-decided", 1),
    ("trimmed", 1),
]


class Tiers:
    """A topic in both tiers, and the broker's segment file from before the first copy."""

    def __init__(
        self,
        kafka: KafkaCluster,
        source: BrokerLogSource,
        partition: TopicIdPartition,
        options: CopierOptions,
        reader: RemoteLogMetadataManager,
    ) -> None:
        """`reader` reads the metadata as another process does, which copies nothing."""
        self.source = source
        self.partition = partition
        self.options = options
        self._reader = reader
        self.original = (kafka.log_folder(partition.topic, 0) / f"{0:020}.log").read_bytes()
        self.next_offset = verify_batches(self.original)[-1].next_offset

    async def metadata(self) -> RemoteLogMetadataManager:
        await self._reader.log.ensure_fresh(self.partition, 0, TIMEOUT_MS)
        return self._reader

    async def segments(self) -> list[RemoteLogSegmentMetadata]:
        return list((await self.metadata()).state.list_remote_log_segments(self.partition))

    async def remote_bytes(self) -> bytes:
        store = self.options.store()
        await store.open()
        try:
            parts = [
                bytes(await store.fetch_log_segment(one, 0, one.segment_size_bytes + 1))
                for one in await self.segments()
                if one.state is RemoteLogSegmentState.COPY_SEGMENT_FINISHED
            ]
        finally:
            await store.close()
        return b"".join(parts)

    async def local_bytes(self, offset: int) -> bytes:
        data = b""
        while (read := await self.source.read(self.partition, offset, 1 << 20, TIMEOUT_MS)).records:
            data += read.records
            offset = verify_batches(read.records)[-1].next_offset
        return data

    async def log_start(self) -> int:
        return (await self.source.bounds(self.partition, TIMEOUT_MS)).log_start_offset

    async def check_that_every_offset_is_readable(self) -> None:
        remote = await self.remote_bytes()
        assert remote == self.original[: len(remote)]
        end = verify_batches(remote)[-1].next_offset if remote else 0
        local_start = await self.log_start()
        assert local_start <= end
        assert remote + await self.local_bytes(end) == self.original

    async def check_that_nothing_is_left_over(self) -> None:
        segments = await self.segments()
        assert {one.state for one in segments} == {RemoteLogSegmentState.COPY_SEGMENT_FINISHED}
        paths = [path for path in self.options.remote_folder.rglob("*") if path.is_file()]
        objects = [path for path in paths if path.suffix in (".log", ".indexes") and path.parent.name != ".tmp"]
        assert len(objects) == 2 * len(segments), objects
        assert list(self.options.spool_folder.iterdir()) == []

    async def is_settled(self) -> bool:
        """Whether every record is remote, and all but the newest segment is trimmed."""
        metadata = await self.metadata()
        if metadata.state.remote_end_offset(self.partition) != self.next_offset - 1:
            return False
        newest = metadata.state.remote_log_segment_metadata(self.partition, self.next_offset - 1)
        return newest is not None and await self.log_start() == newest.start_offset


@asynccontextmanager
async def copier(options: CopierOptions) -> AsyncIterator[asyncio.subprocess.Process]:
    """Runs the copier, and stops it cleanly at the end. If it failed, the error has its output."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*options.command(), stdout=pipe, stderr=pipe)
    try:
        assert process.stdout is not None
        await asyncio.wait_for(process.stdout.readline(), LIMIT_S)
        yield process
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        _, errors = await asyncio.wait_for(process.communicate(), LIMIT_S)
        if process.returncode not in (0, -signal.SIGKILL):
            raise AssertionError(errors.decode())


async def until_settled(tiers: Tiers, options: CopierOptions) -> None:
    async with copier(options) as process, asyncio.timeout(LIMIT_S):
        while not await tiers.is_settled():
            assert process.returncode is None
            await asyncio.sleep(0.1)

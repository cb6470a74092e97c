"""A tier whose metadata is in memory and whose store is a folder."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from pipeline.config import PipelineConfig, parse_pipeline_config
from tests.support.fakes.segments import build_segment, metadata_of
from tests.support.pipeline.inline_runner import InlineRunner
from tests.support.proxy.command_bench import CLUSTER_ID, CommandBench, command_bench
from tiers.access.open_tier import OpenTier
from tiers.model.segment_metadata import RemoteLogSegmentMetadata, RemoteLogSegmentMetadataUpdate, RemoteLogSegmentState
from tiers.segment.segment_encryption import KeyRing, seal_segment

KEY = b"k" * 32


class ScrubBench(CommandBench):
    """Segments have what batches they are given."""

    runner: InlineRunner
    config: PipelineConfig

    def tier(self) -> OpenTier:
        return replace(super().tier(), config=self.config)

    async def finished(
        self, start: int, batches: Sequence[bytes], chunk_bytes: int = 1 << 20
    ) -> RemoteLogSegmentMetadata:
        self._made += 1
        built = build_segment(self.folder / f"log{self._made}", batches, start, chunk_bytes=chunk_bytes)
        segment = metadata_of(built)
        if self.ring.current is not None:
            built = seal_segment(built, segment.segment_id.id, self.ring, self.folder / f"sealed{self._made}")
        await self.storage.copy_log_segment_data(segment, built.log_segment_data(segment))
        await self.rlmm.add_remote_log_segment_metadata(segment)
        await self.move(segment, RemoteLogSegmentState.COPY_SEGMENT_FINISHED)
        return replace(segment, state=RemoteLogSegmentState.COPY_SEGMENT_FINISHED)

    async def move(self, segment: RemoteLogSegmentMetadata, state: RemoteLogSegmentState) -> None:
        update = RemoteLogSegmentMetadataUpdate(segment.segment_id, 1, 1, state)
        await self.rlmm.update_remote_log_segment_metadata(update)

    def file(self, segment: RemoteLogSegmentMetadata, suffix: str) -> Path:
        [found] = [path for path in self.files() if path.name.endswith(f"{segment.segment_id.id}{suffix}")]
        return found

    def change(self, segment: RemoteLogSegmentMetadata, suffix: str, change: Callable[[bytes], bytes]) -> None:
        path = self.file(segment, suffix)
        path.write_bytes(change(path.read_bytes()))

    def forget(self, segment: RemoteLogSegmentMetadata) -> None:
        del self.rlmm.segments[segment.segment_id]

    def seal_from_now_on(self) -> None:
        self.ring = KeyRing({"k1": KEY}, "k1")


@asynccontextmanager
async def scrub_bench(tmp_path: Path) -> AsyncIterator[ScrubBench]:
    (tmp_path / "k1").write_bytes(KEY)
    async with command_bench(tmp_path) as made:
        bench = ScrubBench(tmp_path, made.storage)
        bench.runner = InlineRunner()
        bench.config = parse_pipeline_config(
            f"""
            [upstream]
            bootstrap.servers = "localhost:1"
            [storage]
            implementation = "local"
            path = "{tmp_path / "remote"}"
            "cluster.id" = "{CLUSTER_ID}"
            [encryption]
            keys.k1 = "{tmp_path / "k1"}"
            """
        )
        yield bench

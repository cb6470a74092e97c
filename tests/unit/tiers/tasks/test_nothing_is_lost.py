"""After any sequence of events, every offset from the log start to the LSO is in one of the tiers."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from dataclasses import replace
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.records.record_batch import iterate_batches
from tests.support.fakes.record_batches import batch_of
from tests.support.tiers.workbench import PARTITION, POLICY, ProcessEnded, Workbench, workbench
from tiers.errors import LogDivergedError
from tiers.model.segment_state import RemoteLogSegmentState
from tiers.reader.chunk_fetcher import Caller
from tiers.reader.remote_log_reader import RemoteLogReader, RemoteReadRequest, monotonic_ms
from tiers.storage.object_key import parse_segment_key

STEPS = [
    "segment-built",
    "copy-started-written",
    "objects-written",
    "copy-verified",
    "copy-finished-written",
    "trim-decided",
    "trimmed",
    "cut-written",
    "log-start-raised",
    "delete-started-written",
    "objects-deleted",
    "delete-finished-written",
]
KEEP_LITTLE = replace(POLICY, local_retention_bytes=500, retention_bytes=4000)

happening = st.one_of(
    st.tuples(st.just("append"), st.integers(1, 8)),
    st.tuples(st.just("round"), st.just(0)),
    st.tuples(st.just("end after"), st.integers(0, len(STEPS) - 1)),
    st.tuples(st.just("restart"), st.just(0)),
    st.tuples(st.just("time"), st.sampled_from([5_000, 10_000, 60_000])),
    st.tuples(st.just("election"), st.just(0)),
    st.tuples(st.just("unclean election"), st.integers(0, 100)),
    st.tuples(st.just("delete records"), st.integers(0, 100)),
)


class History:
    def __init__(self, bench: Workbench) -> None:
        self.bench = bench
        self.user_start = 0
        self.start_before = 0
        """Where the log started before its end was replaced: retention saw more bytes then."""

    async def happens(self, what: str, number: int) -> None:
        bench, log = self.bench, self.bench.log
        if what == "append":
            for _ in range(number):
                log.append(batch_of(log.end_offset, 10, value_bytes=15, leader_epoch=log.leader_epoch))
        elif what == "end after":
            bench.end_after = STEPS[number]
        elif what == "time":
            bench.now_ms += number
        elif what == "election":
            log.leader_epoch += 1
        elif what == "unclean election":
            # Every replica that may lead has the trims and the log's beginning. Otherwise the partition would stop.
            start = bench.state.log_start_offset(PARTITION) or 0
            first = max(1, log.log_start_offset, start)
            ends = [batch.next_offset for batch in iterate_batches(log.records) if batch.next_offset >= first]
            if ends:
                log.elect_unclean(ends[(len(ends) - 1) * number // 100])
                self.start_before = max(start, self.start_before)
        elif what == "delete records":
            self.user_start = max(self.user_start, log.end_offset * number // 200)
            log.log_start_offset = max(log.log_start_offset, self.user_start)
            await bench.record_log_start(self.user_start, log.leader_epoch)
        elif what == "restart":
            bench.restart()
        else:
            with contextlib.suppress(ProcessEnded, LogDivergedError):
                await bench.copy(KEEP_LITTLE)
                await bench.trim(KEEP_LITTLE)
                await bench.expire(KEEP_LITTLE)
            if bench.end_after in bench.steps:
                bench.restart()
                bench.end_after = ""
            bench.steps.clear()

    async def check(self) -> None:
        bench, log = self.bench, self.bench.log
        start = max(self.user_start, bench.state.log_start_offset(PARTITION) or 0)
        total_bytes = len(log.bytes_of(start, log.end_offset)) if start < log.end_offset else 0
        assert start <= log.end_offset
        expected_start = max(self.user_start, self.start_before)
        assert start <= expected_start or total_bytes >= KEEP_LITTLE.retention_bytes
        for batch in iterate_batches(log.records):
            if batch.last_offset < start or max(batch.base_offset, start) >= log.log_start_offset:
                continue
            segment = bench.state.remote_log_segment_metadata(PARTITION, max(batch.base_offset, start))
            assert segment is not None, f"offset {batch.base_offset} is in no tier"
            stored = bytes(await bench.store.fetch_log_segment(segment, 0, segment.segment_size_bytes))
            assert log.records[batch.start : batch.end] in stored

    async def check_that_it_ends_well(self) -> None:
        """With no more trouble everything is copied, and nothing is left over."""
        bench = self.bench
        bench.end_after = ""
        bench.restart()
        bench.now_ms += POLICY.segment_ms
        for _ in range(30):
            await self.happens("round", 0)
            bench.now_ms += POLICY.segment_ms
            await self.happens("round", 0)
        await self.check()
        await self.check_what_is_served()
        assert {one.state for one in bench.segments} <= {RemoteLogSegmentState.COPY_SEGMENT_FINISHED}
        objects = [name for name in await bench.objects() if parse_segment_key(name)]
        assert len(objects) == 2 * len(bench.segments)
        remote_end = bench.state.remote_end_offset(PARTITION)
        start = max(self.user_start, bench.state.log_start_offset(PARTITION) or 0)
        assert remote_end == bench.log.end_offset - 1 or start == bench.log.end_offset

    async def check_what_is_served(self) -> None:
        """The remote tier has no byte above a CUT: it reads as the leader's log."""
        bench = self.bench
        start = max(self.user_start, bench.state.log_start_offset(PARTITION) or 0)
        end = bench.state.remote_end_offset(PARTITION)
        if end is None or end < start:
            return
        served, offset = b"", start
        async with RemoteLogReader(bench.metadata.log, bench.store) as reader:
            while offset <= end:
                read = await reader.read(
                    RemoteReadRequest(
                        PARTITION,
                        offset,
                        700,
                        min_one_message=True,
                        isolation_level=0,
                        deadline_ms=monotonic_ms() + 30_000,
                        connection_id=1,
                    )
                )
                served += b"".join(bytes(view) for view in read.records)
                offset = max(batch.next_offset for batch in iterate_batches(served))
            epochs = await reader.leader_epochs(PARTITION, Caller(monotonic_ms() + 30_000, 1))
        assert served == bench.log.bytes_of(start, end)
        assert {each.leader_epoch for each in iterate_batches(served)} <= {entry.epoch for entry in epochs}
        history = {each.leader_epoch for each in iterate_batches(bench.log.records)}
        assert {entry.epoch for entry in epochs} <= history


@settings(max_examples=15, deadline=None)
@given(st.lists(happening, min_size=5, max_size=40))
def test_every_offset_is_in_one_of_the_tiers(history: list[tuple[str, int]]) -> None:
    async def run() -> None:
        with tempfile.TemporaryDirectory() as folder:
            async with workbench(Path(folder)) as bench:
                happened = History(bench)
                for what, number in history:
                    await happened.happens(what, number)
                    await happened.check()
                await happened.check_that_it_ends_well()

    asyncio.run(run())

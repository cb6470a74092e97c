"""`TierAudit` repeatedly compares the metadata with the broker's log and the store's objects.

Each look first reads the later event, such as a trim or a missing object. Then it reads the metadata that must have
been committed before that event. No fault can make two looks in this order disagree, so a contradiction is a violation.
"""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from uuid import UUID

from bench.offsets import EARLIEST, list_offsets
from protocol.errors import ProtocolError
from protocol.records.record_batch import verify_batches
from tests.drill.acknowledged_records import AcknowledgedRecords, Place
from tests.drill.metadata_audit import MetadataAudit
from tests.drill.rig import RETENTION_BYTES, SEGMENT_BYTES, VISIBLE_AFTER_MS, DrillRig
from tests.drill.tier_model import Segment, TierModel
from tests.drill.violations import CHOICE, LOG_START, OBJECTS, SEGMENT, TRIM, TRIM_OWNER, Violations
from tiers.broker.client import BrokerClient
from tiers.errors import RemoteLogError
from tiers.model.segment_metadata import RemoteLogSegmentState as State
from tiers.storage.object_key import INDEXES_SUFFIX, LOG_SUFFIX, SegmentObjectKey, parse_segment_key

_PAUSE_S = 0.1
_LISTING_S = 5.0
_PATIENCE_S = 15.0


class TierAudit:
    """Call `run` in its own thread. After `stop` it looks at everything once more, and ends."""

    def __init__(self, rig: DrillRig, acknowledged: AcknowledgedRecords, violations: Violations) -> None:
        self._rig = rig
        self._acknowledged = acknowledged
        self._violations = violations
        self._stopping = threading.Event()
        self.opened = threading.Event()
        """Set when the audit reads the topics from their start positions, so that it misses nothing."""
        self._local_starts: dict[Place, int] = {}
        self._folder = rig.gateway.folder / "data" / rig.bucket
        self.model = TierModel(
            acknowledged,
            violations,
            retained_bytes=self._retained_bytes,
            on_finished=self._check_segment,
        )
        self.transactions = 0
        self.trimmed_offsets = 0
        self.looks = 0
        self.duplicates = 0
        """The number of finished segments with the same data as others. They are legal, and are deleted later."""
        self.left_over = 0
        """The number of segments with objects after their deletion: a copy continued after the segment was given up."""
        self.error: str | None = None

    def _retained_bytes(self, place: Place) -> int | None:
        """Returns the bytes that retention must leave. Records that are not remote yet count too.

        These are the records that are not due, and those of the segment in progress."""
        return RETENTION_BYTES - 2 * SEGMENT_BYTES if place[0] == self._rig.topics.expiring else None

    def stop(self) -> None:
        self._stopping.set()

    def run(self) -> None:
        try:
            asyncio.run(self._run())
        except Exception as error:
            self.error = f"the audit ended: {error!r}"
            raise

    async def _run(self) -> None:
        client = BrokerClient([self._rig.cluster.address()], client_id="drill-audit")
        try:
            audit = MetadataAudit(client, self._rig.metadata_topic, self._violations)
            await self._open(audit)
            last, listed_at_s = not self.opened.is_set(), 0.0
            while not last:
                last = self._stopping.is_set()
                with_objects = last or time.monotonic() - listed_at_s > _LISTING_S
                try:
                    await self._look(audit, with_objects)
                    if with_objects:
                        listed_at_s = time.monotonic()
                        await audit.check_proofs()
                except (RemoteLogError, OSError):  # faults hit the broker too
                    last = False
                    if self._stopping.is_set() and time.monotonic() - listed_at_s > _PATIENCE_S:
                        raise
                self.transactions = audit.transactions
                await asyncio.sleep(_PAUSE_S)
        finally:
            await client.close()

    async def _open(self, audit: MetadataAudit) -> None:
        while not self._stopping.is_set():
            try:
                await audit.open()
            except RemoteLogError:
                await asyncio.sleep(_PAUSE_S)
            else:
                self.opened.set()
                return

    async def _look(self, audit: MetadataAudit, with_objects: bool) -> None:
        starts = {
            (topic, partition): start
            for topic in self._rig.topics.names
            for partition, start in (
                await asyncio.to_thread(
                    list_offsets, self._rig.cluster.address(), topic, range(self._rig.topics.partitions), EARLIEST
                )
            ).items()
        }
        polled_at_ms = time.time_ns() // 1_000_000
        expected = self._must_be_there() if with_objects else {}
        objects = await asyncio.to_thread(self._list) if with_objects else None
        self.model.take(await audit.events())
        for place, start in starts.items():
            self._check_trim(place, start, polled_at_ms)
        if objects is not None:
            self._check_objects(objects, expected)
        self.looks += 1

    def _check_trim(self, place: Place, start: int, polled_at_ms: int) -> None:
        model, before = self.model.partitions[place], self._local_starts.get(place, 0)
        self._local_starts[place] = max(before, start)
        if start < before:
            self._violations.add(LOG_START, f"{place}: the broker's log starts at {start} after {before}")
        if start <= before:
            return
        self.trimmed_offsets += start - before
        removed = max(self._acknowledged[place].asked_start, model.log_start)
        if start > max(removed, model.announced_start):
            self._violations.add(TRIM_OWNER, f"{place}: trimmed to {start}, announced to {model.announced_start}")
        visible = model.covered_to(removed, polled_at_ms - VISIBLE_AFTER_MS)
        if start > max(removed, visible):
            self._violations.add(TRIM, f"{place}: trimmed to {start}, while only what is below {visible} was visible")

    def _check_segment(self, place: Place, segment: Segment) -> None:
        """Checks that a segment has whole batches without a gap, and equals other segments at shared offsets."""
        checksums = self._checksums(segment)
        if checksums is None:  # it was deleted meanwhile, or the check of the objects reports it
            return
        metadata = segment.metadata
        next_offset = metadata.start_offset
        for base, (last, _) in checksums.items():
            if base > next_offset or last < next_offset:
                self._violations.add(SEGMENT, f"{place} {metadata.segment_id.id}: {base} follows {next_offset - 1}")
            next_offset = last + 1
        if next_offset != metadata.end_offset + 1:
            self._violations.add(SEGMENT, f"{place} {metadata.segment_id.id}: ends at {next_offset - 1}")
        for other in self.model.partitions[place].readable():
            first = max(metadata.start_offset, other.metadata.start_offset)
            last = min(metadata.end_offset, other.metadata.end_offset)
            if other is not segment and first <= last:
                self.duplicates += 1
                self._compare(place, first, last, checksums, self._checksums(other))

    def _compare(
        self,
        place: Place,
        first: int,
        last: int,
        one: dict[int, tuple[int, int]],
        other: dict[int, tuple[int, int]] | None,
    ) -> None:
        if other is None:
            return
        ones = {base: said for base, said in one.items() if base <= last and said[0] >= first}
        others = {base: said for base, said in other.items() if base <= last and said[0] >= first}
        if ones != others:
            self._violations.add(CHOICE, f"{place}: two finished segments differ at offsets {first} to {last}")

    def _checksums(self, segment: Segment) -> dict[int, tuple[int, int]] | None:
        """Returns the last offset and the checked CRC of each batch, by base offset. None: there is no object."""
        uuid = segment.metadata.segment_id.id
        found = list(self._folder.glob(f"*/*/*/*/*{uuid}{LOG_SUFFIX}"))
        try:
            data = found[0].read_bytes() if found else None
        except FileNotFoundError:
            data = None
        if data is None:
            return None
        try:
            return {batch.base_offset: (batch.last_offset, batch.crc) for batch in verify_batches(data)}
        except ProtocolError as error:
            self._violations.add(SEGMENT, f"{uuid}: {error}")
            return {}

    def _must_be_there(self) -> dict[UUID, Place]:
        return {
            uuid: place
            for place, model in self.model.partitions.items()
            for uuid, segment in model.segments.items()
            if segment.is_readable
        }

    def _list(self) -> dict[UUID, set[str]]:
        found: dict[UUID, set[str]] = {}
        for path in self._folder.rglob(f"*/*{LOG_SUFFIX}"):
            self._found(found, path)
        for path in self._folder.rglob(f"*/*{INDEXES_SUFFIX}"):
            self._found(found, path)
        return found

    def _found(self, found: dict[UUID, set[str]], path: Path) -> None:
        key: SegmentObjectKey | None = parse_segment_key(path.relative_to(self._folder).as_posix())
        if key is not None:
            found.setdefault(key.segment_uuid, set()).add(key.suffix)

    def _check_objects(self, objects: dict[UUID, set[str]], expected: dict[UUID, Place]) -> None:
        """Checks a listing. Segments that were readable before it (`expected`) and after it must have been listed."""
        known = {uuid: one for model in self.model.partitions.values() for uuid, one in model.segments.items()}
        for uuid, place in expected.items():
            if known[uuid].is_readable and objects.get(uuid) != {LOG_SUFFIX, INDEXES_SUFFIX}:
                self._violations.add(
                    OBJECTS, f"{place} {uuid}: finished and not deleted, but objects are missing in the store"
                )
        for uuid in objects.keys() - known.keys():
            self._violations.add(OBJECTS, f"{uuid}: the store has objects, but the metadata has no record")
        gone = {uuid for uuid, one in known.items() if one.state is State.DELETE_SEGMENT_FINISHED}
        self.left_over = len(objects.keys() & gone)

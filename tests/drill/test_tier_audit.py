"""The violations that the drill finds when it compares the metadata with the broker's log and the store's objects."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from tests.drill.acknowledged_records import AcknowledgedRecords
from tests.drill.rig import VISIBLE_AFTER_MS, DrillTopics
from tests.drill.tier_audit import TierAudit
from tests.drill.violations import CHOICE, LOG_START, OBJECTS, SEGMENT, TRIM, TRIM_OWNER, Violations
from tests.support.fakes.record_batches import batch_of
from tests.support.tiers.tier_model_records import PARTITION, PLACE, segment, take, to
from tiers.model.log_start import OffsetAndEpoch
from tiers.model.segment_metadata import LocalLogStartUpdate, RemoteLogSegmentMetadata
from tiers.model.segment_metadata import RemoteLogSegmentState as State
from tiers.storage.object_key import INDEXES_SUFFIX, LOG_SUFFIX, indexes_key, log_key

FINISHED_AT_MS = 1_000_000
BUCKET = "bucket"


@pytest.fixture
def violations() -> Violations:
    return Violations()


@pytest.fixture
def audit(violations: Violations, tmp_path: Path) -> TierAudit:
    topics = DrillTopics(PLACE[0], "expiring", 1)
    rig: Any = SimpleNamespace(gateway=SimpleNamespace(folder=tmp_path), bucket=BUCKET, topics=topics)
    return TierAudit(rig, AcknowledgedRecords(topics.places, violations), violations)


def store(folder: Path, one: RemoteLogSegmentMetadata, *batches: bytes) -> None:
    for key, data in ((log_key("cluster", one), b"".join(batches)), (indexes_key("cluster", one), b"indexes")):
        path = folder / "data" / BUCKET / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def finish(audit: TierAudit, one: RemoteLogSegmentMetadata) -> None:
    take(audit.model, one, to(one, State.COPY_SEGMENT_FINISHED), timestamp_ms=FINISHED_AT_MS)


def test_a_trim_must_be_announced_and_visible(audit: TierAudit, violations: Violations) -> None:
    finish(audit, segment(1, 0, 9))
    take(audit.model, LocalLogStartUpdate(PARTITION, "w", 0, OffsetAndEpoch(10, 0)))
    audit._check_trim(PLACE, 10, FINISHED_AT_MS + VISIBLE_AFTER_MS)
    assert violations.total == 0
    audit._check_trim(PLACE, 11, FINISHED_AT_MS + VISIBLE_AFTER_MS)
    assert violations.count == {TRIM: 1, TRIM_OWNER: 1}


def test_a_trim_too_early_and_one_that_went_back_are_noticed(audit: TierAudit, violations: Violations) -> None:
    finish(audit, segment(1, 0, 9))
    take(audit.model, LocalLogStartUpdate(PARTITION, "w", 0, OffsetAndEpoch(10, 0)))
    audit._check_trim(PLACE, 10, FINISHED_AT_MS + VISIBLE_AFTER_MS - 1)
    assert violations.count == {TRIM: 1}
    audit._check_trim(PLACE, 9, FINISHED_AT_MS + VISIBLE_AFTER_MS)
    assert violations.count == {TRIM: 1, LOG_START: 1}


def test_records_that_a_client_deleted_need_no_announcement(audit: TierAudit, violations: Violations) -> None:
    audit._acknowledged[PLACE].ask_to_delete(10)
    audit._check_trim(PLACE, 10, 0)
    assert violations.total == 0


@pytest.mark.parametrize(
    ("batches", "is_right"),
    [
        ([batch_of(0, 5), batch_of(5, 5)], True),
        ([batch_of(0, 4), batch_of(5, 5)], False),
        ([batch_of(0, 5)], False),
        ([batch_of(0, 5), batch_of(5, 5)[:-1] + b"?"], False),
    ],
    ids=["whole", "a gap", "cut short", "damaged"],
)
def test_a_segment_is_read_as_it_is_finished(
    audit: TierAudit, violations: Violations, tmp_path: Path, batches: list[bytes], is_right: bool
) -> None:
    store(tmp_path, segment(1, 0, 9), *batches)
    finish(audit, segment(1, 0, 9))
    assert set(violations.count) == (set() if is_right else {SEGMENT})


@pytest.mark.parametrize("are_alike", [True, False])
def test_two_finished_segments_may_share_offsets_only_when_they_are_alike(
    audit: TierAudit, violations: Violations, tmp_path: Path, are_alike: bool
) -> None:
    store(tmp_path, segment(1, 0, 9), batch_of(0, 5), batch_of(5, 5))
    store(tmp_path, segment(2, 5, 14), batch_of(5, 5, timestamp=1_600_000_000_000 + (not are_alike)), batch_of(10, 5))
    finish(audit, segment(1, 0, 9))
    finish(audit, segment(2, 5, 14))
    assert audit.duplicates == 1
    assert set(violations.count) == (set() if are_alike else {CHOICE})


def test_objects_have_a_record_and_are_there_while_it_is_finished(
    audit: TierAudit, violations: Violations, tmp_path: Path
) -> None:
    one = segment(1, 0, 9)
    store(tmp_path, one, batch_of(0, 10))
    finish(audit, one)
    listed = audit._list()
    assert listed == {UUID(int=1): {LOG_SUFFIX, INDEXES_SUFFIX}}
    audit._check_objects(listed, audit._must_be_there())
    assert violations.total == 0
    audit._check_objects({}, audit._must_be_there())
    assert violations.count == {OBJECTS: 1}
    audit._check_objects(listed | {UUID(int=2): {LOG_SUFFIX}}, {})
    assert violations.count == {OBJECTS: 2}


def test_objects_may_go_once_their_deletion_is_on_record(audit: TierAudit, violations: Violations) -> None:
    one = segment(1, 0, 9)
    finish(audit, one)
    expected = audit._must_be_there()
    audit._acknowledged[PLACE].ask_to_delete(10)
    audit.model.partitions[PLACE].log_start = 10
    take(audit.model, to(one, State.DELETE_SEGMENT_STARTED))
    audit._check_objects({}, expected)
    assert violations.total == 0

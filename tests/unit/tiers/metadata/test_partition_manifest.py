from __future__ import annotations

from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiers.errors import RemoteLogMetadataError
from tiers.metadata.partition_manifest import (
    ManifestSegment,
    PartitionManifest,
    decode_partition_manifest,
    encode_partition_manifest,
)
from tiers.metadata.remote_log_metadata_manager import MetadataPosition
from tiers.model.ids import TopicIdPartition
from tiers.model.log_start import LogGap, LogStart, LogStartReason, OffsetAndEpoch
from tiers.model.segment_metadata import Cut, LeaderEpochEntry

int64s = st.integers(0, (1 << 63) - 1)
int32s = st.integers(0, (1 << 31) - 1)
segments = st.builds(
    ManifestSegment,
    st.uuids(),
    int64s,
    int64s,
    int32s,
    st.lists(st.builds(LeaderEpochEntry, int32s, int64s), min_size=1, max_size=3).map(tuple),
    int32s,
    st.none() | st.binary(max_size=128),
)
positions = st.builds(MetadataPosition, st.uuids(), int32s, int64s)
manifests = st.builds(
    PartitionManifest,
    cluster_id=st.text(max_size=20),
    topic_id_partition=st.builds(TopicIdPartition, st.uuids(), int32s, st.text(max_size=20)),
    log_start=st.none() | st.builds(LogStart, int64s, int32s, st.sampled_from(LogStartReason)),
    local_log_start=st.none() | st.builds(OffsetAndEpoch, int64s, int32s),
    position=positions,
    gaps=st.lists(st.builds(LogGap, int64s, int64s), max_size=3).map(tuple),
    cuts=st.lists(st.builds(Cut, int32s, int64s, int64s), max_size=3).map(tuple),
    segments=st.lists(segments, max_size=4).map(tuple),
    dead=st.lists(st.uuids(), max_size=3, unique=True).map(lambda ids: tuple(sorted(ids, key=str))),
    tier_config=st.dictionaries(st.text(max_size=10), st.text(max_size=10), max_size=3),
    settings_position=st.none() | positions,
)
ONE = PartitionManifest(
    "c",
    TopicIdPartition(UUID(int=1), 0, "orders"),
    LogStart(5, 2, LogStartReason.USER),
    None,
    MetadataPosition(UUID(int=9), 1, 77),
    (LogGap(8, 9),),
)


@given(manifests)
def test_a_manifest_survives_its_bytes(manifest: PartitionManifest) -> None:
    decoded = decode_partition_manifest(encode_partition_manifest(manifest))
    assert decoded == manifest
    assert decoded.topic_id_partition.topic == manifest.topic_id_partition.topic


@given(st.data())
def test_a_torn_or_changed_manifest_is_refused(data: st.DataObject) -> None:
    whole = encode_partition_manifest(ONE)
    at = data.draw(st.integers(0, len(whole) - 1))
    for torn in (whole[:at], whole[:at] + bytes((whole[at] ^ 1 << data.draw(st.integers(0, 7)),)) + whole[at + 1 :]):
        with pytest.raises(RemoteLogMetadataError):
            decode_partition_manifest(torn)


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"checksum":"0","manifest":{}}', b"[" * 100_000])
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(RemoteLogMetadataError):
        decode_partition_manifest(data)

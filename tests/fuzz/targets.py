"""All targets by name; each has a folder of that name in `corpus/`."""

from __future__ import annotations

from collections.abc import Callable

from tests.fuzz import (
    connection_targets,
    decode_targets,
    fetch_targets,
    local_index_targets,
    share_fetch_targets,
    stored_targets,
    wire_targets,
)

Target = Callable[[bytes], bool]

TARGETS: dict[str, Target] = {
    target.__name__: target
    for target in (
        wire_targets.frame,
        wire_targets.header,
        wire_targets.schema_walker,
        wire_targets.addresses,
        wire_targets.partition_answers,
        fetch_targets.fetch_request,
        fetch_targets.fetch_response,
        share_fetch_targets.share_fetch_response,
        stored_targets.record_batches,
        stored_targets.metadata_record,
        stored_targets.indexes_object,
        stored_targets.producer_snapshot,
        local_index_targets.local_index_files,
        decode_targets.decoded_records,
        connection_targets.connections,
    )
}

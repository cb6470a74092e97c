"""`write_parquet`: writes Arrow batches to one Parquet file, in row groups of bounded size.

Columns with repeated values use a dictionary, and columns that readers filter by have statistics. Keys and values have
neither, because both would only cost time. No column uses delta encodings, which some readers of Iceberg tables lack.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from tiers.model.log_start import UNKNOWN_EPOCH

ROW_GROUP_BYTES = 64 << 20
"""Size in Arrow's memory. The writer holds about this much while it writes a file."""
LAYOUT_KEY = b"tidegate.layout"
LEADER_EPOCH_KEY = b"tidegate.leader-epoch"

_REPEATED = ("topic", "partition", "timestampType")
_FILTERED_BY = ("partition", "offset", "timestamp", "timestampType", "topic")


class WrittenFile(NamedTuple):
    """A file that exists. `leader_epoch` is that of the leader when its offsets were planned, or `UNKNOWN_EPOCH`."""

    layout: str
    leader_epoch: int
    records: int


def write_parquet(
    path: Path, batches: Iterable[pa.RecordBatch], schema: pa.Schema, layout: str, leader_epoch: int = UNKNOWN_EPOCH
) -> int:
    """Writes the file and returns the number of rows. The file's metadata holds the rest, for `written_file`."""
    schema = schema.with_metadata({LAYOUT_KEY: layout.encode(), LEADER_EPOCH_KEY: str(leader_epoch).encode()})
    rows = 0
    with pq.ParquetWriter(
        path,
        schema,
        compression="zstd",
        use_dictionary=[name for name in _REPEATED if name in schema.names],
        write_statistics=[name for name in _FILTERED_BY if name in schema.names],
        store_schema=True,
    ) as writer:
        for group in _groups(batches):
            table = pa.Table.from_batches(group).replace_schema_metadata(schema.metadata)
            writer.write_table(table, row_group_size=max(1, table.num_rows))
            rows += table.num_rows
    return rows


def _groups(batches: Iterable[pa.RecordBatch]) -> Iterator[list[pa.RecordBatch]]:
    group: list[pa.RecordBatch] = []
    size_bytes = 0
    for batch in batches:
        if group and size_bytes + batch.nbytes > ROW_GROUP_BYTES:
            yield group
            group, size_bytes = [], 0
        group.append(batch)
        size_bytes += batch.nbytes
    if group:
        yield group


def written_file(file: bytes) -> WrittenFile:
    """Returns what a whole file says of itself. Raises `ValueError` (Arrow's) for bytes that are no Parquet file."""
    metadata = pq.read_metadata(pa.BufferReader(file))
    own = metadata.metadata or {}
    leader_epoch = int(own.get(LEADER_EPOCH_KEY, str(UNKNOWN_EPOCH)))
    return WrittenFile(own.get(LAYOUT_KEY, b"").decode(), leader_epoch, metadata.num_rows)

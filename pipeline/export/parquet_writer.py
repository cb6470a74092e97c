"""`write_parquet`: writes Arrow batches to one Parquet file, in row groups of bounded size.

Columns with repeated values use a dictionary, and columns that readers filter by have statistics. Keys and values have
neither, because both would only cost time. No column uses delta encodings, which some readers of Iceberg tables lack.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

ROW_GROUP_BYTES = 64 << 20
"""Size in Arrow's memory. The writer holds about this much while it writes a file."""
LAYOUT_KEY = b"tidegate.layout"

_REPEATED = ("topic", "partition", "timestampType")
_FILTERED_BY = ("partition", "offset", "timestamp", "timestampType", "topic")


def write_parquet(path: Path, batches: Iterable[pa.RecordBatch], schema: pa.Schema, layout: str) -> int:
    """Writes the file and returns the number of rows. The file's metadata holds `layout`, for `layout_of`."""
    schema = schema.with_metadata({LAYOUT_KEY: layout.encode()})
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


def layout_of(file: bytes) -> tuple[str, int]:
    """Returns the layout and the number of rows of a whole file of ours. Raises `ValueError` (Arrow's) for other
    files."""
    metadata = pq.read_metadata(pa.BufferReader(file))
    return (metadata.metadata or {}).get(LAYOUT_KEY, b"").decode(), metadata.num_rows

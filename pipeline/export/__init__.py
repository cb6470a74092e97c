"""A topic as Parquet files or an Iceberg table."""

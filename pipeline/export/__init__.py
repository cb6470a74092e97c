"""Exports a topic to Parquet files or an Iceberg table."""

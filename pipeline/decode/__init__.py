"""Decodes record batches into Arrow batches with the column names of Spark's own Kafka source."""

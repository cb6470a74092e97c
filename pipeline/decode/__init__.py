"""Record batches as they lie in a log, made into Arrow batches as Spark's own Kafka source would name their columns."""

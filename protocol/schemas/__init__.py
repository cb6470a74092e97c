"""Messages that kafka-python has no schema of, in Kafka's own JSON."""

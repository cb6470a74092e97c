"""Schemas of the messages for which kafka-python has none, in Kafka's own JSON format."""

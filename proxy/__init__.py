"""Sockets, order and policy: the Kafka-protocol proxy and its command `tidegate`. Internal to Tidegate."""

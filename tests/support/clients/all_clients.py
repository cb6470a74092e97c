"""All clients of the matrix, by name. A client that is not installed fails the tests that use it."""

from __future__ import annotations

from collections.abc import Mapping

from tests.support.clients.aio import AioKafka
from tests.support.clients.client import CONSUMER, Client, Positioned, Reader
from tests.support.clients.java_client import JavaClient
from tests.support.clients.kafka_python import KafkaPython
from tests.support.clients.librdkafka import Librdkafka
from tests.support.clients.programs import FranzGo, KafkaGo, KafkaJs, Sarama
from tests.support.servers.kafka import KAFKA_VERSION

CLIENTS: Mapping[str, Client] = {
    "kafka-python": KafkaPython(),
    "aiokafka": AioKafka(),
    "confluent-kafka": Librdkafka(),
    "franz-go": FranzGo(),
    "java": JavaClient(),
}

GROUP_MEMBERS: Mapping[str, tuple[str, Client]] = {
    **{name: (name, client) for name, client in CLIENTS.items()},
    **(
        {}
        if KAFKA_VERSION.startswith("3.")
        else {
            "confluent-kafka-kip-848": ("confluent-kafka", Librdkafka(CONSUMER)),
            "java-kip-848": ("java", JavaClient(CONSUMER)),
        }
    ),
}
"""The clients as members of groups, with the classic protocol and with that of KIP-848 (brokers since 4.0).

The keys are names for tests. The values are the client's name and the client."""

READERS: Mapping[str, Reader] = {**CLIENTS, "kafka-go": KafkaGo(), "kafkajs": KafkaJs(), "sarama": Sarama()}
"""All clients, and those that have no part in the matrix of writers and groups."""

POSITIONED: Mapping[str, Positioned] = {
    "kafka-python": KafkaPython(),
    "aiokafka": AioKafka(),
    "confluent-kafka": Librdkafka(),
    "java": JavaClient(),
    "kafka-go": KafkaGo(),
    "kafkajs": KafkaJs(),
}
"""The clients that tell their position. Outside of a group, franz-go gives only records."""

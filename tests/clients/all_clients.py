"""Every client of the matrix, by name. One that is not installed fails what asks for it."""

from __future__ import annotations

from collections.abc import Mapping

from tests.clients.aio import AioKafka
from tests.clients.client import CONSUMER, Client, Positioned, Reader
from tests.clients.franz_go import FranzGo
from tests.clients.java_client import JavaClient
from tests.clients.kafka_go import KafkaGo
from tests.clients.kafka_js import KafkaJs
from tests.clients.kafka_python import KafkaPython
from tests.clients.librdkafka import Librdkafka
from tests.servers.kafka import KAFKA_VERSION

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
"""By a name of its own: the client's name, and the client. Brokers speak the group protocol of KIP-848 since 4.0."""

READERS: Mapping[str, Reader] = {**CLIENTS, "kafka-go": KafkaGo(), "kafkajs": KafkaJs()}
"""The clients, and those that the tests only have read."""

POSITIONED: Mapping[str, Positioned] = {
    "kafka-python": KafkaPython(),
    "aiokafka": AioKafka(),
    "confluent-kafka": Librdkafka(),
    "java": JavaClient(),
    "kafka-go": KafkaGo(),
    "kafkajs": KafkaJs(),
}
"""Those that tell where they stand. Of a reader outside of a group franz-go shows only its records."""

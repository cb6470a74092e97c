"""DeleteRecords with librdkafka's admin client, and with retries, which that client does not make."""

from __future__ import annotations

import time

from confluent_kafka import KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import KafkaError

from tests.support.rigs.waiting import TIMEOUT_S


def delete_records(bootstrap: str, topic: str, offset: int, partition: int = 0) -> int:
    """Deletes the records below `offset`. Returns the low watermark.

    Retries a timeout, as Kafka's own tools do. The deletion is idempotent."""
    at = TopicPartition(topic, partition, offset)
    admin = AdminClient({"bootstrap.servers": bootstrap})
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        try:
            return int(admin.delete_records([at])[at].result(TIMEOUT_S).low_watermark)
        except KafkaException as error:
            if error.args[0].code() != KafkaError.REQUEST_TIMED_OUT or time.monotonic() > deadline:
                raise
        time.sleep(0.1)

"""Kafka's own tiered storage (KIP-405) on the same jars: a broker with LocalTieredStorage behind a modelled store."""

from __future__ import annotations

import os
from pathlib import Path

from bench.rig.store_model import PLAIN, StoreModel
from tests.support.clients.java_process import compiled
from tests.support.servers.jars import jars
from tests.support.servers.kafka import KAFKA_VERSION, KafkaCluster, kafka_libs

FOLDER = Path(__file__).resolve().parents[1] / "native"
NAME = "ModelledTieredStorage"
TOPIC_SETTINGS = {"remote.storage.enable": "true", "local.retention.bytes": "1"}


class NativeTier(KafkaCluster):
    """One broker. Its topics with `TOPIC_SETTINGS` move to a folder below `home`."""

    def __init__(self, home: Path) -> None:
        self._model_file = home / "model"
        libs = jars(FOLDER / "pom.xml", f"kafka-storage-test-{KAFKA_VERSION}", {"kafka.version": KAFKA_VERSION})
        classpath = [f"{kafka_libs()}/*", f"{libs}/*"]
        classes = compiled(FOLDER / f"{NAME}.java", os.pathsep.join(classpath), libs.parent)
        (home / "tier").mkdir(parents=True)
        self.set_model(PLAIN)
        super().__init__(
            settings={
                "remote.log.storage.system.enable": "true",
                "remote.log.storage.manager.class.name": NAME,
                "remote.log.storage.manager.class.path": f"{classes}/{os.pathsep}{libs}/*",
                "remote.log.storage.manager.impl.prefix": "rsm.config.",
                "rsm.config.dir": str(home / "tier"),
                "rsm.config.delete.on.close": "false",
                "rsm.config.model.file": str(self._model_file),
                "remote.log.metadata.manager.listener.name": "PLAINTEXT",
                "rlmm.config.remote.log.metadata.topic.replication.factor": "1",
                "rlmm.config.remote.log.metadata.topic.num.partitions": "4",
                "remote.log.manager.task.interval.ms": "1000",
                "log.retention.check.interval.ms": "1000",
                "log.initial.task.delay.ms": "1000",
            }
        )

    def set_model(self, model: StoreModel) -> None:
        """Sets the model of the store for all fetches that begin after the call."""
        partial = self._model_file.with_suffix(".partial")
        partial.write_text(f"{model.first_byte_ms} {model.bytes_per_s}")
        partial.replace(self._model_file)

"""Every client of the matrix with a user and a SASL mechanism. It reads one partition, outside of any group."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiokafka  # type: ignore[import-untyped]  # ships no types
import aiokafka.abc  # type: ignore[import-untyped]  # ships no types
import aiokafka.helpers  # type: ignore[import-untyped]  # ships no types

from tests.support.clients.client import FETCH_BYTES, parse_records
from tests.support.clients.java_process import JavaProcess
from tests.support.rigs.security_rig import (
    RECORD,
    TIMEOUT_S,
    for_kafka_python,
    for_librdkafka,
    read_by_kafka_python,
    read_by_librdkafka,
)
from tests.support.servers.franz import binary
from tests.support.servers.secure_kafka import USERS, token

_SCRAM = "org.apache.kafka.common.security.scram.ScramLoginModule"
_LOGIN = {
    "PLAIN": "org.apache.kafka.common.security.plain.PlainLoginModule",
    "SCRAM-SHA-256": _SCRAM,
    "SCRAM-SHA-512": _SCRAM,
    "OAUTHBEARER": "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule",
}
_UNSECURED = "org.apache.kafka.common.security.oauthbearer.internals.unsecured.OAuthBearerUnsecuredLoginCallbackHandler"


@dataclass(frozen=True)
class Who:
    user: str
    mechanism: str
    ca: Path | None = None
    """The certificate authority. None: plain text."""


def read_as_kafka_python(bootstrap: str, topic: str, offset: int, count: int, who: Who) -> list[RECORD]:
    return read_by_kafka_python(bootstrap, topic, count, for_kafka_python(who.user, who.mechanism, who.ca), offset)


def read_as_librdkafka(bootstrap: str, topic: str, offset: int, count: int, who: Who) -> list[RECORD]:
    return read_by_librdkafka(bootstrap, topic, count, for_librdkafka(who.user, who.mechanism, who.ca), offset)


class _Token(aiokafka.abc.AbstractTokenProvider):  # type: ignore[misc]  # aiokafka ships no types
    def __init__(self, user: str) -> None:
        self._token = token(user)

    async def token(self) -> str:
        return self._token


def read_as_aiokafka(bootstrap: str, topic: str, offset: int, count: int, who: Who) -> list[RECORD]:
    settings: dict[str, Any] = {
        "security_protocol": "SASL_PLAINTEXT" if who.ca is None else "SASL_SSL",
        "sasl_mechanism": who.mechanism,
    }
    if who.ca is not None:
        settings["ssl_context"] = aiokafka.helpers.create_ssl_context(cafile=str(who.ca))

    async def run() -> list[RECORD]:
        if who.mechanism == "OAUTHBEARER":
            settings["sasl_oauth_token_provider"] = _Token(who.user)
        else:
            settings.update(sasl_plain_username=who.user, sasl_plain_password=USERS[who.user])
        consumer = aiokafka.AIOKafkaConsumer(bootstrap_servers=bootstrap, auto_offset_reset="none", **settings)
        async with asyncio.timeout(TIMEOUT_S):
            await consumer.start()
            try:
                partition = aiokafka.TopicPartition(topic, 0)
                consumer.assign([partition])
                consumer.seek(partition, offset)
                found = [await consumer.getone() for _ in range(count)]
            finally:
                await consumer.stop()
        return [(each.offset, each.value) for each in found]

    return asyncio.run(run())


def read_as_franz_go(bootstrap: str, topic: str, offset: int, count: int, who: Who) -> list[RECORD]:
    secret = token(who.user) if who.mechanism == "OAUTHBEARER" else USERS[who.user]
    environment = {"FRANZ_MECHANISM": who.mechanism, "FRANZ_USER": who.user, "FRANZ_SECRET": secret}
    if who.ca is not None:
        environment["FRANZ_CA"] = str(who.ca)
    command = [str(binary()), "read", bootstrap, topic, str(offset), str(count), "read_committed", str(FETCH_BYTES)]
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    return [(each.offset, each.value or b"") for each in parse_records(done.stdout)]


class SecuredJavaClient:
    """A Java client in one process. `folder` has the user's settings, which every call writes again."""

    def __init__(self, folder: Path) -> None:
        self._settings = folder / "client.properties"
        self._settings.touch()
        self._process = JavaProcess("MatrixClient", options=[f"-Dclient.settings={self._settings}"])

    def read(self, bootstrap: str, topic: str, offset: int, count: int, who: Who) -> list[RECORD]:
        self._settings.write_text("".join(f"{key}={value}\n" for key, value in _java_settings(who).items()))
        answer = self._process.ask(f"read {bootstrap} {topic} {offset} {count} read_committed {FETCH_BYTES}")
        return [(each.offset, each.value or b"") for each in parse_records(answer)]

    def stop(self) -> None:
        self._process.stop()


def _java_settings(who: Who) -> Mapping[str, str]:
    options = f'username="{who.user}" password="{USERS[who.user]}"'
    settings = {
        "security.protocol": "SASL_PLAINTEXT" if who.ca is None else "SASL_SSL",
        "sasl.mechanism": who.mechanism,
    }
    if who.mechanism == "OAUTHBEARER":
        options = f'unsecuredLoginStringClaim_sub="{who.user}"'
        settings["sasl.login.callback.handler.class"] = _UNSECURED
    settings["sasl.jaas.config"] = f"{_LOGIN[who.mechanism]} required {options};"
    if who.ca is not None:
        settings |= {"ssl.truststore.type": "PEM", "ssl.truststore.location": str(who.ca)}
    return settings

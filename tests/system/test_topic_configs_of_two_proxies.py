"""Two proxies change a topic's tier settings at the same time: no change is lost, and no conflict is accepted."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import ExitStack

import pytest
from confluent_kafka.cimpl import KafkaError

from tests.support.rigs.topic_config_client import alter, described
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.producing import create_topic
from tests.support.servers.tidegate import tidegate_over

pytestmark = pytest.mark.integration

TIMEOUT_S = 300.0
ENABLE, COPY_DISABLE = "remote.storage.enable", "remote.log.copy.disable"
LOCAL_MS, LOCAL_BYTES, RETENTION_MS = "local.retention.ms", "local.retention.bytes", "retention.ms"
ROUNDS = 2


@pytest.fixture(scope="module")
def proxies(kafka: KafkaCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Yields the bootstrap addresses of two proxies with one metadata topic and separate folders.

    The second proxy has a worker."""
    settings: dict[str, str | int] = {"remote.log.metadata.topic.name": "__remote_log_metadata_of_two_proxies"}
    folder = tmp_path_factory.mktemp("two-proxies")
    (folder / "tier").mkdir()
    storage = {"implementation": "local", "path": str(folder / "tier")}
    with ExitStack() as stack:
        found = [
            stack.enter_context(
                tidegate_over(kafka, folder / str(workers), storage=storage, settings={**settings, "workers": workers})
            )
            for workers in (0, 1)
        ]
        yield found[0].bootstrap_servers, found[1].bootstrap_servers


def values(bootstrap: str, topic: str) -> dict[str, str]:
    keys = (ENABLE, COPY_DISABLE, LOCAL_MS, LOCAL_BYTES, RETENTION_MS)
    return {key: entry.value or "" for key, entry in described(bootstrap, topic).items() if key in keys}


async def until_shown(bootstraps: tuple[str, str], topic: str, expected: Mapping[str, str]) -> None:
    """Waits until both proxies show the settings. The proxy that did not make the change learns of it as a follower."""

    async def is_shown(bootstrap: str) -> bool:
        return not expected.items() - (await asyncio.to_thread(values, bootstrap, topic)).items()

    async with asyncio.timeout(TIMEOUT_S):
        for bootstrap in bootstraps:
            while not await is_shown(bootstrap):  # noqa: ASYNC110 - another process reads them
                await asyncio.sleep(0.1)


async def together(bootstraps: tuple[str, str], topic: str, changes: list[dict[str, str | None]]) -> list[int]:
    """Sends one change through each proxy, at the same time. Returns the error codes."""
    codes = await asyncio.gather(
        *(
            asyncio.to_thread(alter, bootstrap, {topic: change})
            for bootstrap, change in zip(bootstraps, changes, strict=True)
        )
    )
    return [code for (code,) in codes]


async def test_changes_of_different_keys_both_hold(proxies: tuple[str, str], topic_name: str) -> None:
    create_topic(proxies[0], topic_name)
    for number in range(1, ROUNDS + 1):
        changes: list[dict[str, str | None]] = [{LOCAL_MS: str(number)}, {LOCAL_BYTES: str(number)}]
        assert await together(proxies, topic_name, changes) == [0, 0]
        await until_shown(proxies, topic_name, {LOCAL_MS: str(number), LOCAL_BYTES: str(number), ENABLE: "false"})
    assert await together(proxies, topic_name, [{ENABLE: "true", LOCAL_MS: None}, {LOCAL_BYTES: None}]) == [0, 0]
    await until_shown(proxies, topic_name, {ENABLE: "true", LOCAL_MS: "-2", LOCAL_BYTES: "-2"})


async def test_one_of_two_conflicting_changes_is_refused(proxies: tuple[str, str], topic_name: str) -> None:
    create_topic(proxies[0], topic_name, config={ENABLE: "true"})
    for _ in range(ROUNDS):
        codes = await together(proxies, topic_name, [{COPY_DISABLE: "true"}, {LOCAL_MS: "5"}])
        assert sorted(codes) == [0, KafkaError.INVALID_CONFIG]
        shown = {COPY_DISABLE: "true", LOCAL_MS: "-2"} if codes[0] == 0 else {COPY_DISABLE: "false", LOCAL_MS: "5"}
        await until_shown(proxies, topic_name, shown)
        assert await asyncio.to_thread(alter, proxies[0], {topic_name: {COPY_DISABLE: None, LOCAL_MS: None}}) == [0]


async def test_a_change_at_one_proxy_binds_the_other_at_once(proxies: tuple[str, str], topic_name: str) -> None:
    one, other = proxies
    create_topic(one, topic_name)

    refused = KafkaError.INVALID_CONFIG
    for bootstrap, changes, code in (
        (one, {ENABLE: "true", LOCAL_MS: "5000"}, 0),
        (other, {"cleanup.policy": "compact"}, refused),
        (other, {RETENTION_MS: "4999"}, refused),
        (one, {RETENTION_MS: "6000"}, 0),
        (other, {LOCAL_MS: "6001"}, refused),
        (other, {COPY_DISABLE: "true", LOCAL_MS: None}, 0),
        (one, {LOCAL_BYTES: "7"}, refused),
        (one, {ENABLE: "false"}, refused),
    ):
        assert await asyncio.to_thread(alter, bootstrap, {topic_name: changes}) == [code], changes
        if RETENTION_MS in changes and code == 0:
            # The broker shows its own setting shortly after the controller has accepted it.
            await until_shown(proxies, topic_name, {RETENTION_MS: "6000"})

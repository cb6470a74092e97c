"""The operator's commands as processes, on a real cluster and a real S3: show, verify, clean up, and rebuild."""

from __future__ import annotations

import asyncio
import json
import secrets
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from confluent_kafka import Producer

from tests.support.rigs import tier_command
from tests.support.rigs.strict_consumer import consumer_at, read, until_trimmed
from tests.support.rigs.topic_config_client import alter
from tests.support.rigs.waiting import until
from tests.support.servers.jars import ServerUnavailable
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.producing import create_topic, delete_topic, produce, random_values
from tests.support.servers.tidegate import TidegateProcess, tidegate_over
from tests.support.servers.versitygw import VersityGateway
from tiers.metadata.partition_facts import PartitionFacts, decode_partition_facts
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.segment.indexes.indexes_object import decode_indexes_object

pytestmark = pytest.mark.integration

RECORDS = 2_500
BUCKET = "commands"


class Site:
    """An operator's cluster, bucket and settings. `proxy` returns a proxy with the current settings."""

    def __init__(self, kafka: KafkaCluster, s3: VersityGateway, home: Path, topic: str) -> None:
        self.kafka, self.s3, self.home = kafka, s3, home
        self.plain, self.sealed = f"{topic}-plain", f"{topic}-sealed"
        self.metadata_topic = f"__metadata-{topic}"[:200]
        self.bucket = s3.folder / "data" / BUCKET
        self.storage = {"implementation": "s3", "timeout.ms": "60000", "prefix": f"{topic[-8:]}/"}
        self.storage |= s3.settings(BUCKET)
        self.keys: dict[str, Path] = {}
        self.current = ""

    def new_key(self, name: str) -> None:
        self.keys[name] = self.home / name
        self.keys[name].write_bytes(secrets.token_bytes(32))
        self.current = name

    def proxy(self) -> TidegateProcess:
        encryption = [f'keys.{name} = "{path}"' for name, path in self.keys.items()]
        encryption += [f'current = "{self.current}"'] if self.current else []
        return tidegate_over(
            self.kafka,
            self.home,
            tiered=[self.plain, self.sealed],
            segment_bytes=400_000,
            storage=self.storage,
            settings={
                "remote.log.metadata.topic.name": self.metadata_topic,
                "remote.log.visible.after.ms": 1000,
            },
            more="\n".join(["[encryption]", *encryption]),
        )

    def objects(self, topic_id: str, suffix: str) -> list[Path]:
        return sorted(path for path in self.bucket.rglob(f"*{suffix}") if topic_id in str(path))

    def stored(self) -> dict[Path, bytes]:
        """The objects of the tier, without those of a proxy's probe and the temporary files of the server."""
        paths = [path for path in self.bucket.rglob("*") if path.is_file()]
        return {path: path.read_bytes() for path in paths if "/." not in str(path.relative_to(self.bucket.parent))}

    def segments(self, topic: str) -> list[RemoteLogSegmentMetadata]:
        """The segments of the topic by the `.indexes` objects in the store."""
        decoded = (decode_indexes_object(path.read_bytes()).metadata for path in self.bucket.rglob("*.indexes"))
        found = [each for each in decoded if each.topic_id_partition.topic == topic]
        return sorted(found, key=lambda each: each.start_offset)

    def facts(self, topic: str) -> list[PartitionFacts]:
        """The facts of the topic, in objects of their own and with its segments."""
        alone = [path.read_bytes() for path in self.bucket.rglob("*.facts")]
        indexes = (decode_indexes_object(path.read_bytes()) for path in self.bucket.rglob("*.indexes"))
        found = map(decode_partition_facts, [*alone, *(bytes(each.indexes.facts) for each in indexes)])
        return [each for each in found if each.topic_id_partition.topic == topic]

    def is_stored(self, topic: str) -> bool:
        """Whether the store has all segments of the topic."""
        segments = self.segments(topic)
        return bool(segments) and segments[-1].end_offset == RECORDS - 1

    def settings(self) -> Path:
        proxy = self.proxy()
        config = self.home / "operator.toml"
        config.write_text(proxy.config.read_text())
        proxy.stop()
        return config

    async def as_process(self, *arguments: str) -> tuple[int, str, str]:
        return await tier_command.as_process(self.settings(), *arguments)

    async def run(self, *arguments: str) -> tuple[int, str, str]:
        return await tier_command.run(self.settings(), *arguments)

    async def json(self, *arguments: str) -> tuple[int, Any]:
        code, out, err = await self.run(*arguments, "--json")
        assert out, err
        return code, json.loads(out)


def set_local_retention(bootstrap: str, topic: str) -> None:
    assert alter(bootstrap, {topic: {"local.retention.ms": "60000"}}) == [0]


async def tiered(site: Site, values: Mapping[str, Sequence[bytes]]) -> None:
    """Tiers one topic without encryption, and the other with a key. Stops the proxy."""
    for topic in (site.plain, site.sealed):
        if topic == site.sealed:
            site.new_key("k1")
        await asyncio.to_thread(create_topic, site.kafka.bootstrap_servers, topic)
        with site.proxy() as proxy:
            await asyncio.to_thread(produce, proxy.bootstrap_servers, topic, values[topic])
            await asyncio.to_thread(until_trimmed, site.kafka, topic, RECORDS // 2)
            await asyncio.to_thread(until, partial(site.is_stored, topic))
            if topic == site.sealed:
                await asyncio.to_thread(set_local_retention, proxy.bootstrap_servers, topic)
                await asyncio.to_thread(until, lambda: any(each.tier_config for each in site.facts(site.sealed)))


async def test_the_commands_of_an_operator_find_and_repair_damage(
    kafka: KafkaCluster, s3: VersityGateway, topic_name: str, tmp_path: Path
) -> None:
    await s3.create_bucket(BUCKET)
    site = Site(kafka, s3, tmp_path, topic_name[:60] + topic_name[-9:])
    values = {topic: random_values(RECORDS) for topic in (site.plain, site.sealed)}
    await tiered(site, values)

    await look(site)
    await break_and_verify(site)
    await leave_orphans(site)
    await change_the_key(site)
    await export_and_import(site)
    await lose_the_metadata(site, values)
    await lose_a_topic_too(site)


async def look(site: Site) -> None:
    code, found = await site.json("topics")
    assert code == 0
    by_topic = {each["topic"]: each for each in found}
    sealed = by_topic[site.sealed]
    assert (sealed["partitions"], sealed["exists"]) == (1, True)
    assert sealed["size_bytes"] > RECORDS * 1000
    assert [*sealed["settings"]["local.retention.ms"].values()] == ["local.retention.ms", "60000", "topic"]
    of_rule = by_topic[site.plain]["settings"]["local.retention.bytes"]
    assert (of_rule["value"], of_rule["source"]) == ("1", "file")
    assert by_topic[site.plain]["settings"]["local.retention.ms"]["source"] == "default"
    assert by_topic[site.plain]["settings"]["retention.ms"]["source"] == "broker"

    code, lines = await site.json("segments", site.sealed, "--keys")
    assert [each["start_offset"] for each in lines] == [0, *(each["end_offset"] + 1 for each in lines[:-1])]
    assert {(each["state"], each["key"], each["location"]) for each in lines} == {
        ("COPY_SEGMENT_FINISHED", "k1", "home")
    }
    code, out, _ = await site.run("segments", f"{site.plain}:0", "--keys")
    assert (code, out.count("none")) == (0, by_topic[site.plain]["segments"])
    assert await site.as_process("segments", "nothing") == (
        2,
        "",
        "tidegate: neither the cluster nor the remote tier has the topic nothing\n",
    )
    assert (await site.run("segments", "no:number"))[0] == 2

    code, out, err = await site.as_process("verify")
    assert (code, err) == (0, "")
    assert out.endswith(": no findings\n")


async def break_and_verify(site: Site) -> None:
    for topic in (site.plain, site.sealed):
        segments = site.segments(topic)
        topic_id, segment = str(segments[1].topic_id_partition.topic_id), segments[1].segment_id
        (log,) = (path for path in site.objects(topic_id, ".log") if str(segment.id) in str(path))
        indexes = log.with_suffix(".indexes")
        chunk = decode_indexes_object(indexes.read_bytes()).chunks()[-1]
        whole = log.read_bytes()
        at = chunk.stored_position + chunk.stored_bytes // 2
        log.write_bytes(whole[:at] + bytes((whole[at] ^ 1,)) + whole[at + 1 :])
        notes = site.home / f"notes-{topic}"
        code, found = await site.json("verify", topic, "--resume", str(notes))
        assert code == 1
        [finding] = found["findings"]
        assert (finding["topic"], finding["partition"], finding["segment"]) == (topic, 0, str(segment.id))
        place = (finding["first_offset"], finding["last_offset"], finding["position"])
        assert place == (chunk.first_offset, chunk.last_offset, chunk.stored_position)
        assert "is not what was stored" in finding["what"] or "fails authentication" in finding["what"]

        log.write_bytes(whole)
        code, found = await site.json("verify", topic, "--resume", str(notes))
        assert (code, found["segments"], found["already_verified"]) == (0, 1, len(segments) - 1)

    content = indexes.read_bytes()
    indexes.unlink()
    code, out, err = await site.as_process("verify", topic)
    assert err == ""
    assert (code, "the .indexes object is missing" in out) == (1, True)
    code, found = await site.json("orphans")
    assert (code, [each["segment"] for each in found["orphans"]]) == (1, [str(segment.id)])
    code, found = await site.json("rebuild")
    [dropped] = [each["dropped"] for each in found["partitions"] if each["topic"] == topic]
    assert (code, "its copy did not end" in dropped[0]) == (0, True)
    indexes.write_bytes(content)


async def leave_orphans(site: Site) -> None:
    assert (await site.run("orphans"))[0] == 0
    first = site.segments(site.plain)[0]
    log = site.objects(str(first.topic_id_partition.topic_id), ".log")[0]
    orphan = log.with_name(log.name.replace(str(first.segment_id.id), str(uuid4())))
    orphan.write_bytes(log.read_bytes())
    async with site.s3.client() as client:  # as if a request was repeated, and the copy ended with the other upload
        await client.create_multipart_upload(Bucket=BUCKET, Key=str(log.relative_to(site.bucket)))
    code, found = await site.json("orphans")
    assert [each["what"] for each in found["orphans"]] == ["no record names it", "an unfinished upload"]
    assert code == 1
    code, _, err = await site.run("orphans", "--delete", "--grace", "0s")
    assert (code, "Nothing was deleted" in err, orphan.exists()) == (1, True, True)
    code, found = await site.json("orphans", "--delete", "--yes")
    assert (code, found["deleted"], found["aborted"], orphan.exists()) == (1, 0, 0, True)
    code, found = await site.json("orphans", "--delete", "--yes", "--grace", "0s")
    assert (code, found["deleted"], found["aborted"], orphan.exists()) == (0, 1, 1, False)
    assert await site.s3.uploads(BUCKET) == 0
    assert log.exists()


async def change_the_key(site: Site) -> None:
    site.new_key("k2")
    code, found = await site.json("rewrap")
    segments = site.segments(site.sealed)
    assert (code, found["written"], len(found["segments"])) == (0, False, len(segments))
    assert (await site.json("segments", site.sealed, "--keys"))[1][0]["key"] == "k1"
    code, found = await site.json("rewrap", "--yes")
    assert (code, [each["trouble"] for each in found["segments"]]) == (0, [None] * len(segments))
    assert (await site.json("rewrap", "--yes"))[1]["segments"] == []
    del site.keys["k1"]
    code, out, _ = await site.run("verify")
    assert (code, out.endswith(": no findings\n")) == (0, True)


async def export_and_import(site: Site) -> None:
    file, again = site.home / "plain-0", site.home / "plain-0-again"
    before = (await site.json("segments", site.plain))[1]
    code, said = await site.json("metadata", "export", f"{site.plain}:0", str(file))
    assert (code, said["segments"], said["log_start_offset"]) == (0, len(before), 0)
    for more in ([], ["--yes"]):
        code, _, err = await site.run("metadata", "import", f"{site.plain}:0", str(file), *more)
        assert (code, "already has metadata" in err) == (3, True)
    topic = site.metadata_topic
    site.metadata_topic = f"{topic}-imported"
    code, _, err = await site.run("metadata", "import", f"{site.plain}:0", str(file))
    assert (code, "Nothing was written" in err) == (0, True)
    code, _, err = await site.run("metadata", "import", f"{site.plain}:0", str(file), "--yes")
    assert (code, err) == (0, "")
    assert (await site.json("segments", site.plain))[1] == before
    await site.run("metadata", "export", f"{site.plain}:0", str(again))
    assert len(again.read_bytes()) == len(file.read_bytes())
    code, _, err = await site.run("metadata", "import", f"{site.sealed}:0", str(file), "--yes")
    assert (code, "does not belong to" in err) == (3, True)
    site.metadata_topic = topic


async def begin_without(site: Site) -> None:
    """A proxy without metadata does not create the metadata topic, and does not start with one without records.

    If another program wrote to the topic, the proxy copies no segments beside the existing ones, and changes
    no object."""
    topic, home = site.metadata_topic, site.home
    site.metadata_topic, site.home = f"{site.metadata_topic}-begun", site.home / "begun"
    site.home.mkdir()
    compacted = {"cleanup.policy": "compact", "message.timestamp.type": "LogAppendTime"}
    for is_there in (False, True):
        if is_there:
            create_topic(site.kafka.bootstrap_servers, site.metadata_topic, partitions=4, config=compacted)
        refused = site.proxy()
        with pytest.raises(ServerUnavailable, match="the store holds segments of this cluster"):
            await asyncio.to_thread(refused.start)
        shutil.rmtree(refused.folder)
    stranger = Producer({"bootstrap.servers": site.kafka.bootstrap_servers})
    stranger.produce(site.metadata_topic, key=b"of another program", value=b"a record")
    assert stranger.flush(60) == 0
    before = site.stored()
    with site.proxy() as proxy:

        def is_refused(name: str) -> bool:
            return proxy.metric("tidegate_remote_log_alarms_total", reason="metadata-lost", topic=name) > 0

        for name in (site.plain, site.sealed):
            await asyncio.to_thread(until, partial(is_refused, name))
    assert site.stored() == before
    site.metadata_topic, site.home = topic, home


async def lose_the_metadata(site: Site, values: Mapping[str, Sequence[bytes]]) -> None:
    before = [(await site.json("segments", topic))[1] for topic in (site.plain, site.sealed)]
    code, out, err = await site.run("rebuild", "--yes")
    assert (code, out.count(" already in the metadata"), "Nothing needs a rebuild" in err) == (0, 2, True), out + err
    await asyncio.to_thread(delete_topic, site.kafka.bootstrap_servers, site.metadata_topic)
    await begin_without(site)
    site.metadata_topic += "-rebuilt"
    code, found = await site.json("rebuild")
    assert (code, found["written"]) == (0, False)
    assert [each["refused"] + each["dropped"] + each["notes"] for each in found["partitions"]] == [[], []]
    code, out, err = await site.run("rebuild", "--yes")
    assert (code, out.count(" written"), err) == (0, 2, ""), out
    assert [(await site.json("segments", topic))[1] for topic in (site.plain, site.sealed)] == before
    sealed = {each["topic"]: each for each in (await site.json("topics"))[1]}[site.sealed]
    assert [*sealed["settings"]["local.retention.ms"].values()] == ["local.retention.ms", "60000", "topic"]

    site.home = site.home / "elsewhere"
    site.home.mkdir()
    with site.proxy() as proxy:
        for topic, written in values.items():
            with consumer_at(proxy.bootstrap_servers, topic, 0) as consumer:
                assert await asyncio.to_thread(read, consumer, RECORDS) == list(enumerate(written))
        assert proxy.metric("tidegate_request_latency_seconds_count", api="Fetch", tier="remote") > 0
        code, _, err = await site.run("metadata", "import", f"{site.plain}:0", str(tmp_file(site)), "--yes")
        assert (code, "stop every `tidegate serve`" in err) == (3, True)


async def lose_a_topic_too(site: Site) -> None:
    await asyncio.to_thread(delete_topic, site.kafka.bootstrap_servers, site.plain)
    site.metadata_topic += "-again"

    async def undecided(*arguments: str) -> tuple[int, dict[str, list[str]]]:
        code, found = await site.json("rebuild", *arguments)
        return code, {each["topic"]: each["refused"] for each in found["partitions"]}

    code, refused = await undecided()
    assert (code, refused[site.sealed]) == (1, [])
    assert "the cluster has no topic with the id" in refused[site.plain][0]
    assert await undecided("--with-unknown-topics") == (0, {site.plain: [], site.sealed: []})


def tmp_file(site: Site) -> Path:
    return site.home.parent / "plain-0"

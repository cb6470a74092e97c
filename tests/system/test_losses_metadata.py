"""The metadata topic loses its end or everything: the proxy treats no record as removed, and all records come back.

A power failure does this, if the disk has less of the metadata's log than of the topic's log. A proxy without a state
concludes nothing from an empty metadata topic.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

from protocol.errors import ErrorCode
from tests.support.rigs.loss_rig import (
    Site,
    Watch,
    alarms,
    cut_log,
    grow_log,
    leader_behind,
    lines_about,
    not_ready,
    numbered,
    records_from,
)
from tests.support.rigs.strict_consumer import until_trimmed
from tests.support.rigs.waiting import until
from tests.support.servers.kafka import SHORT_LIVED, SHRINKS_SOON, KafkaCluster
from tests.support.servers.producing import create_topic, delete_topic, produce, random_values
from tests.support.servers.tidegate import TidegateProcess
from tiers.metadata.records.serde import SEGMENT_METADATA_API_KEY, SEGMENT_METADATA_UPDATE_API_KEY

pytestmark = pytest.mark.integration

RECORDS, MORE = 1200, 300
COPY_STARTED, COPY_FINISHED = SEGMENT_METADATA_API_KEY, SEGMENT_METADATA_UPDATE_API_KEY
REBUILT = "__metadata-rebuilt"


@pytest.fixture
def broker() -> Iterator[KafkaCluster]:
    """A cluster of one broker, for one test only."""
    with KafkaCluster(settings=SHRINKS_SOON, java_options=SHORT_LIVED) as cluster:
        yield cluster


def tiered(site: Site, values: list[bytes]) -> None:
    """Produces the values, and waits until they are copied and trimmed. Stops the proxy."""
    create_topic(site.cluster.bootstrap_servers, site.topic)
    with site.proxy() as proxy:
        produce(proxy.bootstrap_servers, site.topic, values)
        until(lambda: site.is_remote_up_to(len(values) - 1))
        until_trimmed(site.cluster, site.topic, len(values) - 100)


def lose_the_tail(site: Site, last: int) -> tuple[int, int]:
    """Cuts only the metadata's log, while the broker is down. Returns the log end before and after."""
    site.cluster.stop_broker(1)
    ends = cut_log(site.cluster.log_folder(site.metadata_topic, 0), last)
    site.cluster.start_broker(1)
    return ends


def spread(end: int) -> list[int]:
    """Returns offsets from the whole log."""
    return [*range(0, end, 100), end - 1]


def rebuild(site: Site, into: str | None, covered: Collection[str] = ()) -> None:
    """Rebuilds the metadata as the documentation says: into another topic, or into a new topic of the same name."""
    code, out, err = site.tier("rebuild")
    assert (code, "is not empty" in err) == (0, True), out + err
    if into is None:
        delete_topic(site.cluster.bootstrap_servers, site.metadata_topic)
    code, out, err = site.tier("rebuild", *([] if into is None else ["--into", into]), "--yes")
    assert (code, err) == (0, ""), out
    site.metadata_topic = into or site.metadata_topic
    code, out, err = site.tier("bounds")
    assert code == 0, f"bounds: {out}{err}"
    code, out, err = site.tier("orphans")
    left = [line for line in out.splitlines() if ".log " in line or ".indexes " in line]
    assert all(any(segment in line for segment in covered) for line in left), f"orphans: {out}{err}"
    assert code == bool(left), f"orphans: {out}{err}"
    shutil.rmtree(site.state / "metadata")


def check_all_is_well(site: Site, values: list[bytes], covered: Collection[str] = ()) -> None:
    """Checks that all records are readable, and that copying and trimming continue.

    `covered` are segments whose records other segments have."""
    with site.proxy() as proxy:
        watch = Watch(site, proxy, spread(len(values)), covered=covered)
        assert records_from(proxy.bootstrap_servers, site.topic, 0, len(values)) == numbered(values)
        more = random_values(MORE)
        produce(proxy.bootstrap_servers, site.topic, more)
        values += more
        watch.until(lambda: site.is_remote_up_to(len(values) - 1))
        until_trimmed(site.cluster, site.topic, len(values) - 100)
        watch.check()
        assert records_from(proxy.bootstrap_servers, site.topic, 0, len(values)) == numbered(values)
        assert (alarms(proxy, site.topic), not_ready(proxy)) == (0, "")
        assert proxy.metric("tidegate_remote_log_metadata_alarm") == 0


def lose_the_state_too(site: Site, last: int) -> tuple[int, int]:
    """Cuts the metadata's log, and deletes the saved state. Returns the first offset that no record names any more,
    and the broker's log start."""
    local_log_start = site.local_log_start()
    lose_the_tail(site, last)
    shutil.rmtree(site.state)
    bounds = site.bounds()
    assert bounds["local_log_start"] == local_log_start
    known = bounds["remote_end"] + 1
    assert known < local_log_start - 200, "unknown segments lie between the tiers"
    return known, local_log_start


def segments(site: Site, state: str = "COPY_SEGMENT_FINISHED") -> dict[str, int]:
    """Returns the first offsets of the segments that the metadata has in this state, by segment id."""
    code, out, err = site.tier("segments", site.topic, "--json")
    assert code == 0, err
    return {each["segment"]: each["start_offset"] for each in json.loads(out) if each["state"] == state}


def is_doubted(proxy: TidegateProcess, topic: str) -> bool:
    """Whether the alarm is active."""
    return proxy.metric("tidegate_remote_log_alarm", topic=topic, reason="metadata-lost") == 1


def accept(site: Site) -> None:
    """Accepts as the documentation says: first without `--yes`, which changes nothing."""
    for arguments, said in (([], "Nothing was written"), (["--yes"], "The acceptance was written")):
        code, out, err = site.tier("accept", f"{site.topic}:0", *arguments)
        assert (code, said in err, f"{site.topic}-0" in out) == (0, True, True), out + err


@pytest.mark.parametrize("last", [COPY_STARTED, COPY_FINISHED], ids=["a-copy-began", "a-copy-ended"])
def test_a_proxy_that_knows_no_more_than_the_topic_deletes_nothing(
    broker: KafkaCluster, topic_name: str, tmp_path: Path, last: int
) -> None:
    """The copied records look like removed ones, or like an unfinished copy. The owner goes on copying behind them."""
    site, values = Site(broker, tmp_path, topic_name), random_values(RECORDS)
    tiered(site, values)
    known, local_log_start = lose_the_state_too(site, last)
    begun = segments(site, "COPY_SEGMENT_STARTED")
    assert list(begun.values()) == ([known] if last == COPY_STARTED else [])

    with site.alarmed_proxy() as proxy:
        watch = Watch(site, proxy, spread(RECORDS))
        watch.until(lambda: alarms(proxy, topic_name, "metadata-lost") > 0)
        until(lambda: bool(lines_about(proxy, f"{topic_name}-0", "tidegate tier rebuild")))
        produce(proxy.bootstrap_servers, topic_name, more := random_values(MORE))
        values += more
        watch.until(lambda: site.is_remote_up_to(len(values) - 1))
        assert begun.keys() <= segments(site).keys(), "a copy that had not ended is whole, and needs no operator"
        # The known records stay readable, and so do the broker's. The others are unavailable, and not skipped.
        assert records_from(proxy.bootstrap_servers, topic_name, 0, known) == numbered(values)[:known]
        found = records_from(proxy.bootstrap_servers, topic_name, local_log_start, len(values) - local_log_start)
        assert found == numbered(values)[local_log_start:]
        assert site.fetch_error(leader_behind(proxy), local_log_start - 1) == ErrorCode.REPLICA_NOT_AVAILABLE
        watch.check()
        assert site.earliest(leader_behind(proxy)) in (0, None)
        assert (is_doubted(proxy, topic_name), site.bounds()["gaps"]) == (True, [])
    assert site.local_log_start() == local_log_start


def test_a_rebuild_takes_the_copies_that_were_made_in_doubt(
    broker: KafkaCluster, topic_name: str, tmp_path: Path
) -> None:
    """The owner has copied the newest segment again, and records that only this copy has. If both copies have the same
    range, `rebuild` takes one of them, and the other one is orphaned."""
    site, values = Site(broker, tmp_path, topic_name), random_values(RECORDS)
    tiered(site, values)
    copied = segments(site)
    _, local_log_start = lose_the_state_too(site, COPY_FINISHED)
    newest = [each for each, start in copied.items() if start >= local_log_start]
    with site.alarmed_proxy() as proxy:
        watch = Watch(site, proxy, spread(RECORDS))
        produce(proxy.bootstrap_servers, topic_name, more := random_values(MORE))
        values += more
        watch.until(lambda: is_doubted(proxy, topic_name) and site.is_remote_up_to(len(values) - 1))
        twice = [*newest, *(each for each, start in segments(site).items() if start >= local_log_start)]

    rebuild(site, REBUILT, covered=twice)
    check_all_is_well(site, values, covered=twice)


@pytest.mark.parametrize("last", [COPY_STARTED, COPY_FINISHED], ids=["a-copy-began", "a-copy-ended"])
def test_an_acceptance_brings_back_what_only_the_store_knows(
    broker: KafkaCluster, topic_name: str, tmp_path: Path, last: int
) -> None:
    """The broker has the newest segment, and the owner copies it again. It may then delete the first copy of it."""
    site, values = Site(broker, tmp_path, topic_name), random_values(RECORDS)
    tiered(site, values)
    copied = segments(site)
    _, local_log_start = lose_the_state_too(site, last)
    lost = copied.keys() - segments(site).keys()
    newest = {each for each in lost if copied[each] >= local_log_start}
    assert len(newest) == 1

    with site.alarmed_proxy() as proxy:
        watch = Watch(site, proxy, spread(RECORDS), covered=newest)
        watch.until(lambda: is_doubted(proxy, topic_name))
        until(lambda: bool(lines_about(proxy, f"{topic_name}-0", "tidegate tier accept")))
        assert site.fetch_error(leader_behind(proxy), local_log_start - 1) == ErrorCode.REPLICA_NOT_AVAILABLE
        accept(site)
        watch.until(lambda: not is_doubted(proxy, topic_name))
        watch.until(lambda: lost - newest <= segments(site).keys())
        assert records_from(proxy.bootstrap_servers, topic_name, 0, RECORDS) == numbered(values)
        produce(proxy.bootstrap_servers, topic_name, more := random_values(MORE))
        values += more
        watch.until(lambda: site.is_remote_up_to(len(values) - 1))
        until_trimmed(broker, topic_name, len(values) - 100)
        watch.check()
        assert (site.bounds()["gaps"], alarms(proxy, topic_name, "gap")) == ([], 0)
        watch.until(lambda: orphans(site) == set())
    check_all_is_well(site, values)


def test_an_acceptance_makes_a_gap_of_what_the_store_has_lost_too(
    broker: KafkaCluster, topic_name: str, tmp_path: Path
) -> None:
    """The owner brings back the segments on both sides of the gap."""
    site, values = Site(broker, tmp_path, topic_name), random_values(RECORDS)
    tiered(site, values)
    copied = segments(site)
    known, local_log_start = lose_the_state_too(site, COPY_FINISHED)
    starts = sorted(start for start in copied.values() if known <= start <= local_log_start)
    assert (starts[0], starts[-1]) == (known, local_log_start)
    first, end = starts[1], starts[2]
    (gone,) = (each for each, start in copied.items() if start == first)
    for path in site.objects():
        if gone in path.name:
            path.unlink()

    newest = [each for each, start in copied.items() if start == local_log_start]
    with site.alarmed_proxy() as proxy:
        watch = Watch(site, proxy, spread(RECORDS), covered=newest)
        watch.until(lambda: is_doubted(proxy, topic_name))
        accept(site)
        watch.until(lambda: site.bounds()["gaps"] == [{"first_offset": first, "next_offset": end}])
        watch.until(lambda: not is_doubted(proxy, topic_name))
        produce(proxy.bootstrap_servers, topic_name, more := random_values(MORE))
        values += more
        watch.until(lambda: site.is_remote_up_to(len(values) - 1))
        until_trimmed(broker, topic_name, len(values) - 100)
        watch.check()
        check_readable_around(site, proxy, values, first, end)
        assert alarms(proxy, topic_name, "gap") == 1

    with site.proxy() as proxy:  # the proxy becomes ready
        watch = Watch(site, proxy, spread(len(values)))
        check_readable_around(site, proxy, values, first, end)
        watch.check()
        assert alarms(proxy, topic_name) == 0


def orphans(site: Site) -> set[str]:
    """Returns the segments in the store that no record names."""
    code, out, err = site.tier("orphans", "--json")
    found = {each["segment"] for each in json.loads(out)["orphans"]}
    assert code == (1 if found else 0), err
    return found


def check_readable_around(site: Site, proxy: TidegateProcess, values: list[bytes], first: int, end: int) -> None:
    """Checks that both sides of a gap are readable, from the log start and from within the gap."""
    assert site.until_earliest(leader_behind(proxy)) == 0
    behind = numbered(values)[end:]
    both = numbered(values)[:first] + behind
    assert records_from(proxy.bootstrap_servers, site.topic, 0, len(both)) == both
    assert records_from(proxy.bootstrap_servers, site.topic, (first + end) // 2, len(behind)) == behind


def test_a_proxy_that_read_the_lost_end_notices_the_loss_in_a_grown_log(
    broker: KafkaCluster, topic_name: str, tmp_path: Path
) -> None:
    """The offsets look complete, but the leader epochs do not."""
    site, values = Site(broker, tmp_path, topic_name), random_values(RECORDS)
    tiered(site, values)
    objects, local_log_start = site.objects(), site.local_log_start()
    end, cut_to = lose_the_tail(site, COPY_FINISHED)
    grow_log(broker.bootstrap_servers, site.metadata_topic, end - cut_to + 10)
    produce(broker.bootstrap_servers, topic_name, more := random_values(MORE))
    values += more

    with site.alarmed_proxy() as proxy:
        watch = Watch(site, proxy, spread(RECORDS))

        def is_noticed() -> bool:
            copied_bytes = proxy.metric("tidegate_remote_copy_bytes_total", topic=topic_name)
            assert copied_bytes == 0, "the proxy copies, although the metadata topic lost records"
            return "lost" in not_ready(proxy) or proxy.metric("tidegate_remote_log_metadata_alarm") == 1

        watch.until(is_noticed)
        until(lambda: bool(lines_about(proxy, "tidegate tier rebuild")))
        watch.until(is_noticed)
    assert (site.objects(), site.local_log_start()) == (objects, local_log_start)

    rebuild(site, None)
    check_all_is_well(site, values)


FEW = 600
"""The number of records when all metadata is lost."""


@pytest.mark.parametrize("workers", [0, 2])
def test_consumers_wait_where_metadata_was_lost(topic_name: str, tmp_path: Path, workers: int) -> None:
    with KafkaCluster(settings=SHRINKS_SOON, java_options=SHORT_LIVED) as broker:
        site, values = Site(broker, tmp_path, topic_name, workers=workers), random_values(FEW)
        create_topic(broker.bootstrap_servers, topic_name)
        with site.proxy() as proxy:
            produce(proxy.bootstrap_servers, topic_name, values)
            until(lambda: site.is_remote_up_to(FEW - 1))
            until_trimmed(broker, topic_name, FEW // 2)
        broker.stop_broker(1)
        shutil.rmtree(broker.log_folder(site.metadata_topic, 0))
        shutil.rmtree(site.state)
        broker.start_broker(1)
        grow_log(broker.bootstrap_servers, site.metadata_topic, 1)  # no proxy starts with an empty topic

        log_start = site.local_log_start()
        with site.alarmed_proxy() as proxy:
            watch = Watch(site, proxy, [0, log_start - 1, log_start, FEW - 1])
            watch.until(lambda: alarms(proxy, topic_name, "metadata-lost") > 0)
            leader = leader_behind(proxy)
            assert site.earliest(leader) is None
            assert site.fetch_error(leader, 0) == ErrorCode.REPLICA_NOT_AVAILABLE
            local = records_from(proxy.bootstrap_servers, topic_name, log_start, FEW - log_start)
            assert local == numbered(values)[log_start:]
            watch.check()

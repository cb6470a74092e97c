"""The part of `tidegate check` that tries the store and says which setting is wrong.

If the metadata names segments, the check also looks for some of them. The wrong store, or an empty folder without its
mount, passes the other checks.

The error of a store's library rarely tells a wrong host name from a server that is down. So if the store cannot be
reached, the check resolves and connects to the addresses of the settings itself.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from proxy.config import TidegateConfig
from tiers.access.open_tier import open_storage
from tiers.config.managers import create_storage
from tiers.config.settings import StorageConfig
from tiers.errors import RemoteLogError, RemoteResourceNotFoundError, RemoteStorageError
from tiers.metadata.state.state import RemoteLogMetadataState
from tiers.model.ids import TopicIdPartition
from tiers.model.segment_metadata import RemoteLogSegmentMetadata, RemoteLogSegmentState
from tiers.sockets import connected_socket
from tiers.storage.retries import with_retries

_CONNECT_TIMEOUT_S = 5.0
_LOOKS = 3
_ADDRESS_SETTINGS: Final = {"s3": "endpoint.url", "hdfs": "url"}
_PORTS: Final = {"http": 80, "https": 443}
_CHECK_OBJECT: Final = re.compile(r"/\.check-[0-9a-f-]{36}")


class StoreAddress(NamedTuple):
    """A server that the settings name. `setting` is the key, after the location that has it."""

    setting: str
    url: str
    host: str
    port: int


async def check_store(config: StorageConfig, cluster_id: str, timeout_ms: int) -> list[str]:
    """Writes, reads and deletes an object in every location. Returns the problems."""
    try:
        store = create_storage(config, cluster_id)
    except ValueError as error:
        return [f"{config.implementation}: {error}"]
    try:
        async with asyncio.timeout(timeout_ms / 1000):
            await store.open()
            await store.check()
            return []
    except TimeoutError:
        return await _unreachable(config) or [f"{config.implementation}: the store did not answer in time"]
    except RemoteLogError as error:
        # An answer with an error is a reason by itself. Only a failed connection needs a second look.
        found = await _unreachable(config) if isinstance(error, RemoteStorageError) and error.retriable else []
        return found or [f"{config.implementation}: {_CHECK_OBJECT.sub('', str(error))}"]
    finally:
        await store.close()


async def absent_segments(config: TidegateConfig, cluster_id: str, metadata: RemoteLogMetadataState) -> list[str]:
    """Looks for the newest segments of a few partitions. Returns one line if the store lacks some, else none.

    Raises `RemoteTierError`."""
    newest = list(islice(filter(None, map(partial(_newest_segment, metadata), metadata.partitions())), _LOOKS))
    lacking = []
    async with open_storage(config, cluster_id) as storage:
        for segment in newest:
            try:
                await with_retries(partial(storage.fetch_log_segment, segment, 0, 0))
            except RemoteResourceNotFoundError:
                lacking.append(str(segment.topic_id_partition))
    if not lacking:
        return []
    return [
        f"the store lacks the newest segment of {', '.join(lacking)}, in a sample of {len(newest)}. Most often"
        " [storage] names another place than the one to which the segments were copied, or its file system is not"
        " mounted: correct that. If the place is right, run `tidegate tier verify`, which finds all lost segments"
    ]


def _newest_segment(metadata: RemoteLogMetadataState, partition: TopicIdPartition) -> RemoteLogSegmentMetadata | None:
    segments = metadata.list_remote_log_segments(partition)
    finished = (each for each in segments if each.state is RemoteLogSegmentState.COPY_SEGMENT_FINISHED)
    return max(finished, key=lambda each: each.event_timestamp_ms, default=None)


async def _unreachable(config: StorageConfig) -> list[str]:
    """Returns a line for every address of the settings to which no connection can be made."""
    troubles = await asyncio.gather(*(_trouble_of(address) for address in sorted(set(_addresses(config)))))
    return [trouble for trouble in troubles if trouble is not None]


def _addresses(config: StorageConfig) -> Iterator[StoreAddress]:
    places = [("", config.implementation, config.plain_settings())]
    places += [(f"location {one.name!r}: ", *config.place_of(one)) for one in config.locations]
    seen = set()
    for where, implementation, settings in places:
        key = _ADDRESS_SETTINGS.get(implementation, "")
        url = settings.get(key, "")
        try:
            parts = urlsplit(url)
            port = parts.port or _PORTS.get(parts.scheme)
        except ValueError:  # the store itself rejects the URL
            continue
        # An HDFS URL without a port may name a nameservice, which is no host.
        if parts.hostname and port and url not in seen:
            seen.add(url)
            yield StoreAddress(f"{where}{key}", url, parts.hostname, port)


async def _trouble_of(address: StoreAddress) -> str | None:
    setting, url, host, port = address
    try:
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            (await connected_socket(host, port)).close()
    except socket.gaierror:
        return f"{setting}: the host name {host} in {url} is unknown: correct the name, or check the DNS"
    except ConnectionRefusedError:
        return f"{setting}: nothing listens at {url}: correct the address, or start the store"
    except TimeoutError:
        return f"{setting}: no connection to {url} within {_CONNECT_TIMEOUT_S:.0f} s: check the address and the network"
    except OSError as error:
        return f"{setting}: no connection to {url}: {error.strerror or error}: check the address and the network"
    return None

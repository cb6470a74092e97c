"""`ReplicaCount` asks the NameNode by WebHDFS how many DataNodes have a file, because hdfs-native does not tell.

A client gets its acknowledgements from the DataNodes that it was given, or that are left after failures. That may be a
single one. The NameNode knows a replica when its DataNode has reported it, which takes a moment.
"""

from __future__ import annotations

import getpass
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from tiers.errors import RetriableRemoteStorageError
from tiers.storage.activity import note_progress

_DEFAULT_PORT = 9870
_FIRST_PAUSE_S = 0.02
_PAUSE_S = 0.5


def default_urls(url: str) -> list[str]:
    """Returns the NameNode's usual web address; none for a nameservice, which is no host."""
    parts = urlsplit(url)
    return [f"http://{parts.hostname}:{_DEFAULT_PORT}"] if parts.hostname and parts.port else []


class ReplicaCount:
    """All calls block. `urls` are the web addresses of the NameNodes, one of which is active."""

    def __init__(self, urls: Sequence[str], minimum: int, timeout_s: float) -> None:
        """`timeout_s` is the deadline of a request, and the time in which DataNodes must report their replicas."""
        self._urls = [url.rstrip("/") for url in urls]
        self._minimum = minimum
        self._timeout_s = timeout_s

    def require(self, path: str, clock_s: Callable[[], float] = time.monotonic) -> None:
        """Returns when every block of the closed file has enough replicas. `path` is absolute.

        Raises `RetriableRemoteStorageError`, which names the settings, if that takes too long."""
        deadline_s, pause_s = clock_s() + self._timeout_s, _FIRST_PAUSE_S
        while True:
            found = self._fewest(path)
            if found >= self._minimum:
                return
            if clock_s() >= deadline_s:
                raise RetriableRemoteStorageError(
                    f"{path} has {found} of {self._minimum} replicas {self._timeout_s:g} s after it was closed: start"
                    " another DataNode, raise `replication`, or lower `min.replicas`"
                )
            note_progress()
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_S)

    def _fewest(self, path: str) -> int:
        """Returns the number of replicas of the block that has the fewest. An empty file has no block to lose."""
        blocks = self._ask(path)["LocatedBlocks"]["locatedBlocks"]
        return min((len(block["locations"]) for block in blocks), default=self._minimum)

    def _ask(self, path: str) -> Any:
        user = os.environ.get("HADOOP_USER_NAME") or getpass.getuser()
        query = urlencode({"op": "GET_BLOCK_LOCATIONS", "user.name": user})
        trouble = "`web.url` is not set"
        for url in self._urls:
            try:
                with urllib.request.urlopen(
                    f"{url}/webhdfs/v1{quote(path)}?{query}", timeout=self._timeout_s
                ) as answer:
                    return json.load(answer)
            except urllib.error.HTTPError as error:  # a NameNode in standby refuses as well
                trouble = f"{url}: {error.code} {error.read(500).decode(errors='replace')}"
            except (OSError, ValueError) as error:
                trouble = f"{url}: {error}"
        raise RetriableRemoteStorageError(
            f"the replicas of {path} cannot be counted: {trouble}: change `web.url`, or set `min.replicas` to 1 and"
            " dfs.namenode.replication.min to 2 on the NameNode"
        )

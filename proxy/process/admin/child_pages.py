"""`ChildPages`: how the supervisor reads the admin pages of its children."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import aiohttp

from proxy.process.supervisor import Child

ASK_TIMEOUT_S: Final = 2.0
FACTS_TIMEOUT_S: Final = 15.0
"""The child may wait for brokers that do not answer before it says so."""


class ChildPages:
    """`ports` are the ports of the children's own admin pages; none without an admin port. `session` has the token."""

    def __init__(self, ports: Mapping[str, int], session: aiohttp.ClientSession) -> None:
        self._ports = ports
        self._session = session

    async def ask(
        self, child: Child, path: str, parameters: Mapping[str, str] | None = None, timeout_s: float = ASK_TIMEOUT_S
    ) -> tuple[int, str]:
        """Returns the status and the text of a page; 503 and the reason if the child does not answer in time.

        A child that runs without pages answers 200."""
        if child.process is None:
            return 503, "the process is not running"
        if child.name not in self._ports:
            return 200, ""
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            address = f"http://127.0.0.1:{self._ports[child.name]}{path}"
            async with self._session.get(address, params=parameters, timeout=timeout) as answer:
                return answer.status, await answer.text()
        except (aiohttp.ClientError, TimeoutError):
            return 503, "the process does not answer"

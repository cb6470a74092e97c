"""A headless Chromium that a test drives over the DevTools protocol."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp

from tests.support.servers.jars import ServerUnavailable

START_TIMEOUT_S = 60
_ANSWER_TIMEOUT_S = 30


class BrowserPage:
    """One page of the browser."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.problems: list[str] = []
        """What the console has said of errors, and every request that failed or was blocked."""
        self._socket = socket
        self._numbers = count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._loaded = asyncio.Event()

    async def listen(self) -> None:
        """Takes what the browser says, until it ends."""
        async for message in self._socket:
            said = json.loads(message.data)
            match said.get("method"):
                case None:
                    self._answers.pop(said["id"]).set_result(said.get("result", {}))
                case "Page.loadEventFired":
                    self._loaded.set()
                case "Runtime.exceptionThrown":
                    self.problems.append(json.dumps(said["params"]["exceptionDetails"]))
                case "Log.entryAdded" if said["params"]["entry"]["level"] == "error":
                    self.problems.append(json.dumps(said["params"]["entry"]))

    async def send(self, method: str, **parameters: Any) -> Any:
        number = next(self._numbers)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        async with asyncio.timeout(_ANSWER_TIMEOUT_S):
            return await answer

    async def open(self, url: str) -> None:
        """Returns when the page and its scripts are loaded."""
        self._loaded.clear()
        await self.send("Page.navigate", url=url)
        async with asyncio.timeout(_ANSWER_TIMEOUT_S):
            await self._loaded.wait()

    async def run(self, script: str) -> Any:
        """Returns the value of an expression. Waits for a promise."""
        answer = await self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        # While another page loads, there is no result.
        return answer.get("result", {}).get("value")

    async def until(self, script: str) -> None:
        """Waits until an expression is true, also across the load of another page."""
        deadline = time.monotonic() + _ANSWER_TIMEOUT_S
        while not await self.run(script):
            assert time.monotonic() < deadline, f"never true: {script}"
            await asyncio.sleep(0.02)

    async def key(self, key: str) -> None:
        text = {"text": "\r"} if key == "Enter" else {"text": key} if len(key) == 1 else {}
        await self.send("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        await self.send("Input.dispatchKeyEvent", type="keyUp", key=key)

    async def write(self, text: str) -> None:
        await self.send("Input.insertText", text=text)

    async def show(self, width: int, height: int = 900, *, scheme: str = "light") -> None:
        """Sets the size of the window in CSS pixels, and the colours that the user prefers."""
        await self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        await self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])


@asynccontextmanager
async def browser_page(program: str = "chromium") -> AsyncIterator[BrowserPage]:
    """Starts a browser with one empty page, and ends it."""
    folder = Path(tempfile.mkdtemp(prefix="tidegate-chromium-"))
    process = await asyncio.create_subprocess_exec(
        program, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--remote-debugging-port=0",
        f"--user-data-dir={folder}", "about:blank",
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL, start_new_session=True,
        env={**os.environ, "TMPDIR": str(folder)},
    )  # fmt: skip
    try:
        async with aiohttp.ClientSession() as session:
            address = await _address_of_page(session, folder / "DevToolsActivePort")
            async with session.ws_connect(address, max_msg_size=0) as socket, asyncio.TaskGroup() as tasks:
                page = BrowserPage(socket)
                listening = tasks.create_task(page.listen())
                for domain in ("Page", "Runtime", "Log"):
                    await page.send(f"{domain}.enable")
                yield page
                listening.cancel()
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        shutil.rmtree(folder, ignore_errors=True)


async def _address_of_page(session: aiohttp.ClientSession, file: Path) -> str:
    """Returns the address of the page's debugger. The browser writes its port to `file` when it listens."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        port = await asyncio.to_thread(_port_in, file)
        if port is not None:
            async with session.get(f"http://127.0.0.1:{port}/json") as answer:
                targets: list[Mapping[str, str]] = await answer.json()
            for target in targets:
                if target["type"] == "page":
                    return target["webSocketDebuggerUrl"]
        await asyncio.sleep(0.05)
    raise ServerUnavailable(f"Chromium did not start within {START_TIMEOUT_S} s")


def _port_in(file: Path) -> int | None:
    try:
        lines = file.read_text().splitlines()
    except FileNotFoundError:
        return None
    return int(lines[0]) if len(lines) == 2 else None

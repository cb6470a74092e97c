"""A store is trusted or refused for all requests alike."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import pytest

from tests.support.servers.certificates import Authority
from tests.support.servers.stream_server import StreamServer
from tiers.errors import RemoteStorageError
from tiers.storage.s3.storage import S3RemoteStorageManager


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Takes each request without a body, and a PUT of 5 bytes."""
    while not reader.at_eof():
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, OSError):
            return
        if head.startswith(b"PUT"):
            await reader.readexactly(5)
            writer.write(b'HTTP/1.1 200 OK\r\nETag: "1"\r\nContent-Length: 0\r\n\r\n')
        else:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nbytes")


@pytest.mark.parametrize("is_trusted", [True, False])
async def test_reads_trust_the_authorities_of_writes(
    is_trusted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority(tmp_path)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(authority.identity("store"))
    monkeypatch.delenv("AWS_CA_BUNDLE", raising=False)
    if is_trusted:
        monkeypatch.setenv("AWS_CA_BUNDLE", str(authority.ca))
    async with StreamServer(answer, tls=tls) as server:
        manager = S3RemoteStorageManager(
            {
                "bucket": "b",
                "cluster.id": "c",
                "endpoint.url": f"https://127.0.0.1:{server.port}",
                "region": "us-east-1",
                "access.key.id": "key",
                "secret.access.key": "secret",
                "path.style": "true",
            }
        )
        await manager.open()
        try:
            if is_trusted:
                await manager.put_object("k", b"bytes")
                assert await manager.get_object("k") == b"bytes"
                return
            with pytest.raises(RemoteStorageError):
                await manager.put_object("k", b"bytes")
            with pytest.raises(RemoteStorageError, match="the trusted certificates"):
                await manager.get_object("k")
        finally:
            await manager.close()

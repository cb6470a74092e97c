"""Credentials that another program renews count without a restart, wherever they come from."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.support.fakes.copies import opened
from tests.support.servers.racing_s3 import RacingS3
from tiers.errors import CredentialsRefusedError
from tiers.storage.remote_storage_manager import check_by_an_object
from tiers.storage.s3.storage import S3RemoteStorageManager

Renew = Callable[[str], Awaitable[None]]


@pytest.fixture(autouse=True)
def no_other_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_PROFILE", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_WEB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@asynccontextmanager
async def shared_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Mapping[str, str], Renew]]:
    async def renew(key: str) -> None:
        text = f"[default]\naws_access_key_id = {key}\naws_secret_access_key = s\naws_session_token = t\n"
        (folder / "credentials").write_text(text)

    yield {}, renew


@asynccontextmanager
async def secret_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Mapping[str, str], Renew]]:
    async def renew(key: str) -> None:
        (folder / "id").write_text(f"{key}\n")
        (folder / "secret").write_text("s\n")

    yield {"access.key.id.file": str(folder / "id"), "secret.access.key.file": str(folder / "secret")}, renew


def store_of(server: RacingS3, given: Mapping[str, str]) -> S3RemoteStorageManager:
    settings = {key: value for key, value in server.settings().items() if "access" not in key}
    return S3RemoteStorageManager({**settings, **given, "cluster.id": "c"})


@pytest.mark.parametrize(
    ("source", "named"),
    [
        (shared_file, "the SDK's source shared-credentials-file"),
        (secret_files, "`access.key.id` and `secret.access.key`"),
    ],
)
async def test_calls_go_on_after_a_renewal(
    source: Callable[..., AsyncIterator[tuple[Mapping[str, str], Renew]]],
    named: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with RacingS3(races=()) as server, source(tmp_path, monkeypatch) as (given, renew):  # type: ignore[attr-defined]
        server.access_key_id = "former"
        await renew("former")
        async with opened(store_of(server, given)) as storage:
            await storage.put_object("k", b"before")
            assert await storage.get_object("k") == b"before"
            server.access_key_id = "latter"
            await renew("latter")
            assert await storage.get_object("k") == b"before"
            await storage.put_object("k", b"after")
            assert await storage.get_object("k") == b"after"
            server.access_key_id = "unknown"
            with pytest.raises(CredentialsRefusedError) as raised:
                await storage.put_object("k", b"never")
            assert str(raised.value).endswith(f"; the credentials come from {named}")


async def test_credentials_that_come_late_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with (
        RacingS3(races=()) as server,
        shared_file(tmp_path, monkeypatch) as (_, renew),
        opened(store_of(server, {})) as storage,
    ):
        await renew("any")
        await check_by_an_object(storage)


async def test_a_store_without_credentials_names_no_source() -> None:
    async with RacingS3(races=()) as server, opened(store_of(server, {})) as storage:
        with pytest.raises(CredentialsRefusedError, match="there are no credentials: set") as raised:
            await check_by_an_object(storage)
        assert "come from" not in str(raised.value)

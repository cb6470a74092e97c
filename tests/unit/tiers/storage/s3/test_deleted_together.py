"""What one answer to DeleteObjects says about the objects of many segments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.fakes.copies import other_attempt, segment_to_copy
from tiers.errors import CredentialsRefusedError, RemoteStorageError, RetriableRemoteStorageError
from tiers.storage.object_key import indexes_key
from tiers.storage.s3.storage import S3RemoteStorageManager


class Client:
    """Answers the first request about many objects with an error."""

    def __init__(self, error: dict[str, str]) -> None:
        self._errors = [error]

    async def list_multipart_uploads(self, **_: Any) -> dict[str, Any]:
        return {}

    async def delete_objects(self, **_: Any) -> dict[str, Any]:
        errors, self._errors = self._errors, []
        return {"Errors": errors}


@pytest.mark.parametrize(
    ("named", "code", "of_first", "of_second"),
    [
        ("first", "NoSuchKey", None, None),
        ("first", "AccessDenied", CredentialsRefusedError, None),
        ("first", "InternalError", RetriableRemoteStorageError, None),
        ("other", "AccessDenied", CredentialsRefusedError, CredentialsRefusedError),
        (None, "InternalError", RetriableRemoteStorageError, RetriableRemoteStorageError),
    ],
)
async def test_an_error_is_of_the_segment_that_it_names_or_of_all(
    named: str | None,
    code: str,
    of_first: type[RemoteStorageError] | None,
    of_second: type[RemoteStorageError] | None,
    tmp_path: Path,
) -> None:
    first, _ = segment_to_copy(tmp_path, 1000)
    second = other_attempt(first)
    keys = {"first": indexes_key("c", first), "other": "of/another"}
    error = {"Code": code} | ({} if named is None else {"Key": keys[named]})
    storage = S3RemoteStorageManager({"bucket": "b", "cluster.id": "c", "region": "x"})
    await storage.open()
    try:
        storage._up._client = Client(error)
        answers = await storage.delete_log_segments([first, second])
    finally:
        await storage.close()
    assert [None if one is None else type(one) for one in answers] == [of_first, of_second]

"""`tidegate check` names the setting that is wrong when the store does not work, on a real S3 server."""

from __future__ import annotations

import pytest

from proxy.commands.store_check import check_store
from tests.support.servers.ports import free_ports
from tests.support.servers.versitygw import VersityGateway
from tiers.config.settings import StorageConfig

UNKNOWN_HOST = "no-such-host.invalid"


async def problems_of(implementation: str, settings: dict[str, str], **more: object) -> list[str]:
    config = StorageConfig.model_validate({"implementation": implementation, **settings, **more})
    return await check_store(config, "cluster", 30_000)


@pytest.fixture
async def settings(s3: VersityGateway) -> dict[str, str]:
    await s3.create_bucket("checked")
    return s3.settings("checked")


async def test_a_store_that_works_has_no_problem(settings: dict[str, str]) -> None:
    assert await problems_of("s3", settings) == []


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            {"bucket": "missing"},
            "s3: s3://missing: 404 NoSuchBucket: The specified bucket does not exist: create the bucket or change"
            " `bucket`",
        ),
        (
            {"bucket": "No_Bucket"},
            "s3: s3://No_Bucket: 400 InvalidBucketName: The specified bucket is not valid: change `bucket`",
        ),
        (
            {"access.key.id": "another"},
            "s3: s3://checked: 403 InvalidAccessKeyId: The AWS Access Key Id you provided does not exist in our"
            " records: the store rejects the credentials: renew or change them; the credentials come from"
            " `access.key.id` and `secret.access.key`",
        ),
        (
            {"secret.access.key": "another"},
            "s3: s3://checked: 403 SignatureDoesNotMatch: The request signature we calculated does not match the"
            " signature you provided. Check your key and signing method: the store rejects the credentials: renew or"
            " change them; the credentials come from `access.key.id` and `secret.access.key`",
        ),
        (
            {"endpoint.url": f"http://{UNKNOWN_HOST}:9000"},
            f"endpoint.url: the host name {UNKNOWN_HOST} in http://{UNKNOWN_HOST}:9000 is unknown: correct the name, or"
            " check the DNS",
        ),
    ],
)
async def test_a_wrong_setting_is_named(settings: dict[str, str], changed: dict[str, str], said: str) -> None:
    assert await problems_of("s3", settings | changed) == [said]


async def test_missing_credentials_are_named(settings: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_PROFILE", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, "/nowhere/file")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    without = {key: value for key, value in settings.items() if not key.endswith(("key.id", "access.key"))}
    (problem,) = await problems_of("s3", without)
    assert "there are no credentials: set `access.key.id` and `secret.access.key`" in problem


async def test_a_server_that_is_down_is_named() -> None:
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    settings = {"bucket": "b", "endpoint.url": url, "access.key.id": "a", "secret.access.key": "b", "region": "r"}
    said = f"nothing listens at {url}: correct the address, or start the store"
    assert await problems_of("s3", settings) == [f"endpoint.url: {said}"]


async def test_a_location_that_is_down_is_named(settings: dict[str, str]) -> None:
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    problems = await problems_of("s3", settings, locations=[{"name": "other", "endpoint.url": url}])
    assert problems == [
        f"location 'other': endpoint.url: nothing listens at {url}: correct the address, or start the store"
    ]


async def test_a_namenode_that_is_down_is_named() -> None:
    (port,) = free_ports(1)
    url = f"hdfs://127.0.0.1:{port}"
    problems = await problems_of("hdfs", {"url": url, "path": "/tier"})
    assert problems == [f"url: nothing listens at {url}: correct the address, or start the store"]

"""What an answer of a store, or none, means for an object, and for many that are deleted together."""

from __future__ import annotations

import ssl

import aiohttp
import botocore.exceptions
import pytest

from tiers.errors import (
    CredentialsRefusedError,
    RemoteResourceNotFoundError,
    RemoteStorageError,
    RetriableRemoteStorageError,
    StoreOverloadedError,
    ThrottledError,
)
from tiers.storage.s3.errors import (
    ConflictError,
    NoSuchUploadError,
    UnsupportedRequestError,
    error_of_answer,
    error_of_exception,
)
from tiers.storage.s3.range_connection import LostConnectionError, UnexpectedAnswerError


@pytest.mark.parametrize(
    ("status", "code", "expected", "named"),
    [
        (404, "NoSuchKey", RemoteResourceNotFoundError, "404"),
        (404, "", RemoteResourceNotFoundError, "404"),
        (404, "NoSuchBucket", RemoteStorageError, "`bucket`"),
        (404, "XAdminUserNotFound", CredentialsRefusedError, "rejects the credentials"),
        (404, "NoSuchUpload", NoSuchUploadError, "NoSuchUpload"),
        (403, "AccessDenied", CredentialsRefusedError, "rights"),
        (403, "", CredentialsRefusedError, "rights"),
        (403, "SignatureDoesNotMatch", CredentialsRefusedError, "rejects the credentials"),
        (403, "RequestTimeTooSkewed", RemoteStorageError, "clock"),
        (400, "ExpiredToken", CredentialsRefusedError, "rejects the credentials"),
        (400, "AuthorizationHeaderMalformed", RemoteStorageError, "`region`"),
        (301, "PermanentRedirect", RemoteStorageError, "`endpoint.url`"),
        (301, "", RemoteStorageError, "`endpoint.url`"),
        (400, "BadDigest", RetriableRemoteStorageError, "BadDigest"),
        (400, "RequestTimeout", RetriableRemoteStorageError, "400"),
        (409, "OperationAborted", ConflictError, "409"),
        (409, "", ConflictError, "409"),
        (429, "", ThrottledError, "429"),
        (500, "InternalError", RetriableRemoteStorageError, "500"),
        (501, "NotImplemented", UnsupportedRequestError, "lacks"),
        (503, "SlowDown", ThrottledError, "503"),
        (503, "503", ThrottledError, "503"),
        (400, "InvalidArgument", UnsupportedRequestError, "InvalidArgument"),
    ],
)
def test_answers(status: int, code: str, expected: type[RemoteStorageError], named: str) -> None:
    error = error_of_answer("bucket", "key", status, code)
    assert type(error) is expected
    assert named in str(error)


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (botocore.exceptions.EndpointConnectionError(endpoint_url="http://s"), RetriableRemoteStorageError),
        (botocore.exceptions.ConnectionClosedError(endpoint_url="http://s"), RetriableRemoteStorageError),
        (botocore.exceptions.ReadTimeoutError(endpoint_url="http://s"), RetriableRemoteStorageError),
        (botocore.exceptions.ConnectTimeoutError(endpoint_url="http://s"), StoreOverloadedError),
        (botocore.exceptions.NoCredentialsError(), CredentialsRefusedError),
        (botocore.exceptions.SSLError(endpoint_url="http://s", error="bad"), RemoteStorageError),
        (botocore.exceptions.MetadataRetrievalError(error_msg="slow"), RetriableRemoteStorageError),
        (ssl.SSLError("bad certificate"), RemoteStorageError),
        (LostConnectionError("closed"), RetriableRemoteStorageError),
        (UnexpectedAnswerError("another range"), RetriableRemoteStorageError),
        (aiohttp.ServerDisconnectedError(), RetriableRemoteStorageError),
        (aiohttp.ClientPayloadError(), RetriableRemoteStorageError),
        (TimeoutError(), StoreOverloadedError),
        (ConnectionResetError(), RetriableRemoteStorageError),
        (TypeError("whatever"), RemoteStorageError),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
def test_exceptions(raised: Exception, expected: type[RemoteStorageError]) -> None:
    assert type(error_of_exception("bucket", "key", raised)) is expected


def said(status: int, code: str, message: str) -> str:
    answer = {"Error": {"Code": code, "Message": message}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return str(error_of_exception("b", "k", botocore.exceptions.ClientError(answer, "GetObject")))


def test_an_error_has_the_words_of_the_store() -> None:
    assert said(404, "NoSuchKey", 'There is no "k".') == 's3://b/k: 404 NoSuchKey: There is no "k"'
    locked = "s3://b/k: 403 AccessDenied: protected by object lock: check the credentials"
    assert said(403, "AccessDenied", "protected by object lock.").startswith(locked)
    hostile = said(400, "X", "\x1b[2J\n" + "a" * 1_000_000)
    assert (len(hostile) < 250, hostile.isprintable()) == (True, True)

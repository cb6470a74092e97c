"""Maps errors of S3 to storage errors: whether a retry may help, and otherwise which setting the operator must change.

The mapping uses S3's error codes first, because S3-compatible servers differ more in status codes than in these.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping

import aiohttp
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionError,
    ConnectTimeoutError,
    CredentialRetrievalError,
    HTTPClientError,
    IncompleteReadError,
    MetadataRetrievalError,
    NoCredentialsError,
    SSLError,
)

from tiers.errors import (
    CredentialsRefusedError,
    RemoteResourceNotFoundError,
    RemoteStorageError,
    RetriableRemoteStorageError,
    StoreOverloadedError,
    ThrottledError,
)
from tiers.storage.s3.range_connection import UnexpectedAnswerError


class PreconditionFailedError(RemoteStorageError):
    """A create-if-absent request found an existing object. The implementation handles it internally."""


class UnsupportedRequestError(RemoteStorageError):
    """The store refused the form of a request, and did nothing. It may take the same request without an option."""


class ConflictError(RetriableRemoteStorageError):
    """The store refused a request because of a concurrent one for the same key, and did nothing."""


class NoSuchUploadError(RetriableRemoteStorageError):
    """The multipart upload was completed or aborted. The implementation handles it internally where it is expected."""


OVERLOAD_STATUS = {429, 503}
_MAX_MESSAGE = 200
_Kind = tuple[type[RemoteStorageError], str]
"""The class of an error, and what the operator can do."""

_CREDENTIALS: _Kind = CredentialsRefusedError, ": the store rejects the credentials: renew or change them"
_PLACE: _Kind = RemoteStorageError, ": change `region` or `endpoint.url` to the bucket's"
_CONFLICT: _Kind = ConflictError, ""
_OVERLOAD: _Kind = ThrottledError, ""
_HEALS: _Kind = RetriableRemoteStorageError, ""
_RIGHTS: _Kind = (
    CredentialsRefusedError,
    ": check the credentials, their rights in this bucket and its object lock; "
    "without s3:ListBucket, S3 answers the same for a missing object",
)
_BY_CODE: Mapping[str, _Kind] = {
    "NoSuchBucket": (RemoteStorageError, ": create the bucket or change `bucket`"),
    "InvalidBucketName": (RemoteStorageError, ": change `bucket`"),
    "InvalidAccessKeyId": _CREDENTIALS,
    "SignatureDoesNotMatch": _CREDENTIALS,
    "XAdminUserNotFound": _CREDENTIALS,
    "InvalidToken": _CREDENTIALS,
    "ExpiredToken": _CREDENTIALS,
    # STS answers these to the token of a web identity.
    "ExpiredTokenException": _CREDENTIALS,
    "IDPRejectedClaim": _CREDENTIALS,
    "InvalidIdentityToken": _CREDENTIALS,
    "RequestTimeTooSkewed": (RemoteStorageError, ": set this machine's clock"),
    "AuthorizationHeaderMalformed": _PLACE,
    "AuthorizationQueryParametersError": _PLACE,
    "IllegalLocationConstraintException": _PLACE,
    "PermanentRedirect": _PLACE,
    "TemporaryRedirect": _PLACE,
    "NoSuchUpload": (NoSuchUploadError, ""),
    "OperationAborted": _CONFLICT,
    "ConditionalRequestConflict": _CONFLICT,
    "SlowDown": _OVERLOAD,
    "Throttling": _OVERLOAD,
    "BadDigest": _HEALS,
    "RequestTimeout": _HEALS,
}
_BY_STATUS: Mapping[int, _Kind] = {
    301: _PLACE,
    307: _PLACE,
    400: (UnsupportedRequestError, ""),
    401: _RIGHTS,
    403: _RIGHTS,
    404: (RemoteResourceNotFoundError, ""),
    408: _HEALS,
    409: _CONFLICT,
    412: (PreconditionFailedError, ""),
    425: _HEALS,
    429: _OVERLOAD,
    501: (UnsupportedRequestError, ": this server lacks a required feature"),
    503: _OVERLOAD,
}
"""For answers without a code of `_BY_CODE`."""
_HEALING_EXCEPTIONS = (
    aiohttp.ClientError,
    ConnectionError,
    CredentialRetrievalError,
    HTTPClientError,
    IncompleteReadError,
    MetadataRetrievalError,
    OSError,
    UnexpectedAnswerError,
)


def error_of_answer(bucket: str, key: str, status: int, code: str, said: str = "") -> RemoteStorageError:
    """Returns the error for a failed request. `code` may be empty or a bare status: HEAD answers have no body.

    `said` is the store's own message."""
    answer = f"{status} {code}".strip()
    if shown := "".join(each for each in said[:_MAX_MESSAGE] if each.isprintable()).strip().removesuffix("."):
        answer = f"{answer}: {shown}"
    other = _HEALS if status >= 500 else (RemoteStorageError, "")
    kind, advice = _BY_CODE.get(code) or _BY_STATUS.get(status, other)
    return kind(f"s3://{bucket}/{key}: {answer}{advice}")


def error_of_exception(bucket: str, key: str, error: Exception) -> RemoteStorageError:
    """Returns the error for an exception of the client libraries."""
    where = f"s3://{bucket}/{key}"
    match error:
        case RemoteStorageError():
            return error
        case ClientError():
            status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
            found = error.response.get("Error", {})
            return error_of_answer(bucket, key, status, str(found.get("Code", "")), str(found.get("Message", "")))
        case SSLError() | ssl.SSLError():
            return RemoteStorageError(f"{where}: TLS: {error}: change `endpoint.url` or the trusted certificates")
        case TimeoutError() | ConnectTimeoutError():
            return StoreOverloadedError(f"{where}: no answer in time")
        case _ if isinstance(error, _HEALING_EXCEPTIONS):
            return RetriableRemoteStorageError(f"{where}: {type(error).__name__}: {error}")
        case NoCredentialsError():
            return CredentialsRefusedError(
                f"{where}: there are no credentials: set `access.key.id` and `secret.access.key`, or provide them as "
                f"the AWS SDK finds them (environment, profile or role)"
            )
        case BotoCoreError():
            # The client rejects the parameters: a retry does not help.
            return RemoteStorageError(f"{where}: {error}")
        case _:
            return RemoteStorageError(f"{where}: {error!r}")

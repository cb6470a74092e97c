"""Maps errors of S3 to storage errors: whether a retry may help, and otherwise which setting the operator must change.

The mapping uses S3's error codes first, because S3-compatible servers differ more in status codes than in these.
"""

from __future__ import annotations

import html
import re

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
from tiers.storage.s3.answer_head import MalformedAnswerError
from tiers.storage.s3.range_connection import LostConnectionError, UnexpectedAnswerError
from tiers.storage.s3.range_reader import TlsRefusedError

_WRONG_CREDENTIALS = {
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
    "XAdminUserNotFound",
    "InvalidToken",
    "ExpiredToken",
    # STS answers these to the token of a web identity.
    "ExpiredTokenException",
    "IDPRejectedClaim",
    "InvalidIdentityToken",
}
_WRONG_PLACE = {
    "AuthorizationHeaderMalformed",
    "AuthorizationQueryParametersError",
    "IllegalLocationConstraintException",
    "PermanentRedirect",
    "TemporaryRedirect",
    "301",
    "307",
}
_HEALING = {
    "BadDigest",
    "RequestTimeout",
}
_OVERLOAD = {"SlowDown", "Throttling"}
_CONFLICT_CODES = {"OperationAborted", "ConditionalRequestConflict"}
_HEALING_EXCEPTIONS = (
    aiohttp.ClientError,
    ConnectionError,
    CredentialRetrievalError,
    HTTPClientError,
    IncompleteReadError,
    LostConnectionError,
    MalformedAnswerError,
    MetadataRetrievalError,
    OSError,
    UnexpectedAnswerError,
)
_CONFLICT = 409
_HEALING_STATUS = {408, 425}
_OVERLOAD_STATUS = {429, 503}
_PRECONDITION_FAILED = 412

_CODE_ELEMENT = re.compile(rb"<Code>([A-Za-z0-9]{1,64})</Code>")
_MESSAGE_ELEMENT = re.compile(rb"<Message>([^<]*)</Message>")
_MAX_MESSAGE = 200


class PreconditionFailedError(RemoteStorageError):
    """A create-if-absent request found an existing object. The implementation handles it internally."""


class UnsupportedRequestError(RemoteStorageError):
    """The store refused the form of a request, and did nothing. It may take the same request without an option."""


class ConflictError(RetriableRemoteStorageError):
    """The store refused a request because of a concurrent one for the same key, and did nothing."""


class NoSuchUploadError(RetriableRemoteStorageError):
    """The multipart upload was completed or aborted. The implementation handles it internally where it is expected."""


def error_of_document(bucket: str, key: str, status: int, body: bytes | memoryview) -> RemoteStorageError:
    """Returns the error for an answer whose body is an error document, or another page."""
    code, message = _CODE_ELEMENT.search(body), _MESSAGE_ELEMENT.search(body)
    said = html.unescape(message[1].decode(errors="replace")) if message else ""
    return error_of_answer(bucket, key, status, code[1].decode() if code else "", said)


def error_of_answer(bucket: str, key: str, status: int, code: str, said: str = "") -> RemoteStorageError:
    """Returns the error for a failed request. `code` may be empty or a bare status: HEAD answers have no body.

    `said` is the store's own message."""
    where = f"s3://{bucket}/{key}"
    answer = f"{status} {code}".strip()
    if shown := "".join(each for each in said[:_MAX_MESSAGE] if each.isprintable()).strip().removesuffix("."):
        answer = f"{answer}: {shown}"
    if code == "NoSuchBucket":
        return RemoteStorageError(f"{where}: the bucket does not exist: create it or change `bucket`")
    if code == "InvalidBucketName":
        return RemoteStorageError(f"{where}: {answer}: change `bucket`")
    if code in _WRONG_CREDENTIALS:
        return CredentialsRefusedError(f"{where}: the store rejects the credentials ({answer}): renew or change them")
    if code == "RequestTimeTooSkewed":
        return RemoteStorageError(f"{where}: {answer}: set this machine's clock")
    if code in _WRONG_PLACE or status in (301, 307):
        return RemoteStorageError(f"{where}: {answer}: change `region` or `endpoint.url` to the bucket's")
    if code == "NoSuchUpload":
        return NoSuchUploadError(f"{where}: {answer}")
    if code in _CONFLICT_CODES or status == _CONFLICT:
        return ConflictError(f"{where}: {answer}")
    if code in _OVERLOAD or status in _OVERLOAD_STATUS:
        return ThrottledError(f"{where}: {answer}")
    if code in _HEALING or status in _HEALING_STATUS:
        return RetriableRemoteStorageError(f"{where}: {answer}")
    if status == _PRECONDITION_FAILED:
        return PreconditionFailedError(f"{where}: {answer}")
    if status in (401, 403):
        return CredentialsRefusedError(
            f"{where}: {answer}: check the credentials, their rights in this bucket and its object lock; "
            f"without s3:ListBucket, S3 answers the same for a missing object"
        )
    if status == 404:
        return RemoteResourceNotFoundError(f"{where}: {answer}")
    if status == 501:
        return UnsupportedRequestError(f"{where}: {answer}: this server lacks a required feature")
    if status >= 500:
        return RetriableRemoteStorageError(f"{where}: {answer}")
    return (UnsupportedRequestError if status == 400 else RemoteStorageError)(f"{where}: {answer}")


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
        case SSLError() | TlsRefusedError():
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

"""Errors on the wire: the one table of status codes, the body, and the way back to the same error class."""

import re
from collections.abc import Iterator

from inference.contract.messages import Message, validated
from inference.contract.validation import parse_json
from inference.errors import (
    BadRequest,
    Broken,
    CallerError,
    DeadlineExceeded,
    InferenceError,
    InvalidRequest,
    Overloaded,
    QueueFull,
    TileFailure,
    TooLarge,
    Unauthorized,
    UnknownModel,
)

STATUS: dict[type[InferenceError], int] = {
    BadRequest: 400,
    CallerError: 400,
    Unauthorized: 401,
    UnknownModel: 404,
    TooLarge: 413,
    InvalidRequest: 422,
    QueueFull: 429,
    TileFailure: 503,
    Overloaded: 503,
    Broken: 503,
    DeadlineExceeded: 504,
    InferenceError: 500,
}
"""HTTP status of each error; a class that is not named has its base's."""

RETRIED = frozenset({429, 503})
"""Statuses after which a client may ask again, where the body says `retryable`."""

MAX_MESSAGE = 500
"""Characters of a message on the wire."""

_FOREIGN = re.compile(r"(\b[A-Z]\w*(?:Error|Exception|Exit|Interrupt|Warning)): .*", re.DOTALL)
_PATH = re.compile(r"(?<![\w.])(?:[A-Za-z]:\\|~?/|file:)[^\s'\",;:)]*[\\/][^\s'\",;:)]*")
_LONG_WORD = re.compile(r"[A-Za-z0-9+/=_-]{65,}")


class ErrorBody(Message):
    """What a caller is told of a failure.

    Attributes:
        code: stable word for the kind of error.
        retryable: whether the same request may succeed later.
        request_id: the request in the service's log.
    """

    code: str
    message: str
    retryable: bool
    request_id: str


def http_status(error: InferenceError) -> int:
    """The status code under which an error travels."""
    return next(STATUS[base] for base in type(error).__mro__ if base in STATUS)


def error_body(error: InferenceError, request_id: str) -> ErrorBody:
    """The error as a remote caller may see it."""
    return ErrorBody(
        code=error.code, message=public_text(error.message), retryable=error.retryable, request_id=request_id
    )


def public_text(message: str) -> str:
    """A message without what may be private: texts of foreign exceptions, paths, and words as long as a token.

    The service's log has it in full.
    """
    text = _FOREIGN.sub(r"\1", " ".join(message.split()))
    return log_text(_PATH.sub("…", text))


def log_text(message: str) -> str:
    """A message without words that are long enough to be pixels, at most 500 characters of it."""
    return _LONG_WORD.sub("…", " ".join(message.split()))[:MAX_MESSAGE]


def read_error(status: int, text: str | bytes) -> tuple[InferenceError, bool]:
    """What a service answered instead of a result, and whether it says that asking again may help.

    The error has the class that the same failure has in process. An answer that is no error body is blamed on the
    caller below 500, on the service above.
    """
    try:
        body = validated(ErrorBody, parse_json(text))
    except BadRequest:
        message = f"the answer has status {status} and no error body: does the address lead to this service?"
        return _family(status)(message, status=status), False
    return rebuild(body, status), body.retryable


def rebuild(body: ErrorBody, status: int = 503) -> InferenceError:
    """The error that an error body tells of."""
    return _CLASSES.get(body.code, _family(status))(body.message, request_id=body.request_id, status=status)


def _family(status: int) -> type[InferenceError]:
    return Overloaded if status >= 500 else CallerError


def _tree(base: type[InferenceError]) -> Iterator[type[InferenceError]]:
    yield base
    for child in base.__subclasses__():
        yield from _tree(child)


_CLASSES = {cls.code: cls for cls in _tree(InferenceError) if cls.__module__ == InferenceError.__module__}

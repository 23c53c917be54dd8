"""Errors over a wire: one status each, a body that says what to do, and the same class at the other end."""

import pytest

from inference import errors
from inference.contract.faults import RETRIED, STATUS, ErrorBody, error_body, http_status, read_error, rebuild
from inference.errors import (
    ArtifactRefused,
    BadRequest,
    CallerError,
    ConfigError,
    DeadlineExceeded,
    DeviceBroken,
    ForwardError,
    InferenceError,
    InvalidRequest,
    ModelContractError,
    NonFiniteOutput,
    Overloaded,
    QueueFull,
    ServerClosed,
    TileError,
    TooLarge,
    Unauthorized,
    UnknownModel,
)

CLASSES = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, InferenceError)]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (BadRequest, 400), (ConfigError, 400), (Unauthorized, 401), (UnknownModel, 404), (TooLarge, 413),
        (InvalidRequest, 422), (QueueFull, 429), (ForwardError, 503), (TileError, 503), (NonFiniteOutput, 503),
        (DeviceBroken, 503), (ModelContractError, 503), (ArtifactRefused, 503), (ServerClosed, 503), (Overloaded, 503),
        (DeadlineExceeded, 504), (InferenceError, 500),
    ],
)  # fmt: skip
def test_each_error_has_its_status(error: type[InferenceError], status: int) -> None:
    assert http_status(error("x")) == status


def test_the_classes_in_the_table_have_the_statuses_of_the_contract_and_no_others() -> None:
    assert {http_status(cls("x")) for cls in CLASSES} == {400, 401, 404, 413, 422, 429, 500, 503, 504}
    assert set(STATUS) <= set(CLASSES)
    assert {429, 503} == RETRIED


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_an_error_comes_out_as_the_class_it_went_in(cls: type[InferenceError]) -> None:
    body = error_body(cls("what happened; what to do"), "r7")
    assert body == ErrorBody(
        code=cls.code, message="what happened; what to do", retryable=cls.retryable, request_id="r7"
    )
    found, retryable = read_error(http_status(cls("x")), body.model_dump_json())
    assert (type(found), found.message, retryable) == (cls, "what happened; what to do", cls.retryable)
    assert found.fields["request_id"] == "r7"


@pytest.mark.parametrize(
    ("status", "text", "family"),
    [
        (502, "<html>bad gateway</html>", Overloaded), (503, "", Overloaded), (404, "Not Found", CallerError),
        (400, '{"detail": "x"}', CallerError), (500, "[" * 100_000, Overloaded), (401, b"\xff", CallerError),
        (503, '{"code": 1, "message": "m", "retryable": true, "request_id": "r"}', Overloaded),
    ],
)  # fmt: skip
def test_an_answer_that_is_no_error_body_is_never_asked_again(
    status: int, text: str, family: type[InferenceError]
) -> None:
    error, retryable = read_error(status, text)
    assert (type(error), retryable) == (family, False)
    assert f"the answer has status {status} and no error body" in error.message


@pytest.mark.parametrize(("status", "family"), [(503, Overloaded), (409, CallerError)])
def test_a_code_of_a_later_version_is_of_its_statuss_family(status: int, family: type[InferenceError]) -> None:
    body = ErrorBody(code="of_later", message="m", retryable=True, request_id="r")
    assert type(rebuild(body, status)) is family
    assert read_error(status, body.model_dump_json())[1] is True

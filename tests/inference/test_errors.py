"""The error tree: one family per kind of fault, stable codes, and the builtin that callers already catch."""

import pickle
import re

import pytest

from inference import errors
from inference.errors import (
    BadRequest,
    BatchError,
    Broken,
    CallerError,
    DeadlineExceeded,
    ForwardError,
    InferenceError,
    NonFiniteOutput,
    Overloaded,
    SlideError,
    TileFailure,
)


def _below(base: type[InferenceError]) -> list[type[InferenceError]]:
    return [base, *(found for child in base.__subclasses__() for found in _below(child))]


CLASSES = [c for c in _below(InferenceError) if c.__module__ == errors.__name__]


def test_every_class_stands_in_the_tree_drawn_at_the_top_under_its_base() -> None:
    drawn: dict[str, str] = {}
    above: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        if found := re.match(r"^ {4}([│ ]*)(?:[├└]── )?(\w+)(?:\(\w+\))?", line):
            depth = len(found[1]) // 4 + ("── " in line)
            above[depth:] = [found[2]]
            drawn[found[2]] = above[depth - 1] if depth else ""
    for cls in CLASSES:
        if cls.__name__ in {"TileError", "NonFiniteOutput"}:  # named in the line of ForwardError
            continue
        bases = [base.__name__ for base in cls.__bases__ if issubclass(base, InferenceError)]
        assert drawn.get(cls.__name__, "not drawn") == "".join(bases), cls.__name__


def test_every_code_belongs_to_one_class_and_is_a_plain_word() -> None:
    codes = [cls.code for cls in CLASSES]
    assert len(set(codes)) == len(codes)
    assert all(re.fullmatch(r"[a-z][a-z_]+", code) for code in codes)


@pytest.mark.parametrize(
    ("cls", "builtin"), [(CallerError, ValueError), (ForwardError, RuntimeError), (DeadlineExceeded, TimeoutError)]
)
def test_each_family_is_also_the_builtin_that_fits(cls: type[Exception], builtin: type[Exception]) -> None:
    assert issubclass(cls, builtin)


def test_every_class_is_of_exactly_one_family() -> None:
    families = (CallerError, TileFailure, Overloaded, BatchError, Broken)
    for cls in CLASSES[1:]:
        assert sum(issubclass(cls, family) for family in families) == 1, cls


def test_asking_again_helps_when_overloaded_and_never_when_the_request_is_wrong() -> None:
    assert all(cls.retryable for cls in _below(Overloaded))
    assert not any(cls.retryable for cls in _below(CallerError) if not issubclass(cls, SlideError))
    assert ForwardError.retryable
    assert not NonFiniteOutput.retryable


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_an_error_keeps_its_text_and_fields_through_a_process_boundary(cls: type[InferenceError]) -> None:
    error = cls("what happened; what to do", slide="a", count=3)
    found = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes
    assert (type(found), str(found), found.fields) == (cls, "what happened; what to do", {"slide": "a", "count": 3})


def test_a_bad_request_is_caught_as_the_value_error_the_contract_promises() -> None:
    with pytest.raises(ValueError, match="no image"):
        raise BadRequest("no image")

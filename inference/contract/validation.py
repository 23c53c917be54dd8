"""Strict JSON, and what is wrong with a document in one line."""

import json
from typing import NoReturn

from pydantic import ConfigDict, FiniteFloat, TypeAdapter, ValidationError

from inference.errors import BadRequest, InvalidRequest

SHOWN = 3
"""Problems named before the rest is only counted."""

_NUMBERS = TypeAdapter(list[FiniteFloat], config=ConfigDict(strict=True))


def parse_json(text: str | bytes) -> object:
    """The value of a JSON text; bytes are UTF-8.

    Raises:
        BadRequest: not JSON, NaN or infinity, a key twice, nested too deeply, an integer of thousands of digits, or
            text that is not Unicode.
    """
    if not isinstance(text, str | bytes):
        raise BadRequest(f"the body is a {type(text).__name__}: give JSON as text, such as json.dumps makes")
    try:
        if isinstance(text, bytes):
            text = text.decode()  # `json` would take other encodings too
        value: object = json.loads(text, object_pairs_hook=_object, parse_constant=_not_a_number)
    except BadRequest:
        raise
    except RecursionError:
        raise BadRequest("the body is not usable JSON: nested too deeply") from None
    except UnicodeDecodeError:
        raise BadRequest("the body is not JSON: its bytes are not UTF-8") from None
    except ValueError as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
    return value


def parse_numbers(text: str | bytes) -> list[float]:
    """The numbers of a JSON list.

    Raises:
        BadRequest: not JSON.
        InvalidRequest: not a list, or something in it is no finite number.
    """
    found = parse_json(text)
    try:
        return _NUMBERS.validate_python(found)
    except ValidationError as error:
        raise InvalidRequest(f"the body is a list of numbers: {explain(error)}") from None


def explain(error: ValidationError) -> str:
    """Which fields are wrong and why, without their values: those may be long or private."""
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    texts = []
    for problem in problems[:SHOWN]:
        where = ".".join(map(str, problem["loc"]))[:80] or "body"
        texts.append(f"{where}: {problem['msg'].removeprefix('Value error, ')}")
    if len(problems) > SHOWN:
        texts.append(f"and {len(problems) - SHOWN} more")
    return "; ".join(texts)


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise BadRequest(f"the body has the key {twice[:80]!r} twice")
    for pair in pairs:
        for text in pair:
            # JSON can spell half a surrogate pair, which no answer could then be written with.
            if isinstance(text, str) and not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text):
                raise BadRequest(f"the body has a text that is not Unicode: {text[:80]!r}")
    return found


def _not_a_number(token: str) -> NoReturn:
    raise BadRequest(f"the body is not JSON: {token} is no JSON number")

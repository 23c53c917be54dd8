"""Requests and responses as JSON: what is taken, what is refused, and what a refusal says."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from inference.contract import ModelRequest, ModelResponse, parse_request
from inference.errors import BadRequest

FIELDS: dict[str, object] = {
    "image_data": "AAAA", "slide_name": "s", "x": 448, "y": 224, "width": 224, "height": 224, "patch_idx": 3,
    "tissue_ratio": 0.5, "resolution": 0.5,
}  # fmt: skip


def _body(**changes: object) -> str:
    return json.dumps({**FIELDS, **changes})


def test_a_request_keeps_every_field_and_the_optional_ones_may_be_absent() -> None:
    request: ModelRequest = parse_request(_body())
    assert request.model_dump(exclude_none=True) == FIELDS
    short = parse_request(json.dumps({k: v for k, v in FIELDS.items() if k not in {"tissue_ratio", "resolution"}}))
    assert (short.tissue_ratio, short.resolution, short.bulk_rna, short.mode) == (None, None, None, None)


def test_whole_numbers_are_taken_where_fractions_are_expected_but_not_the_reverse() -> None:
    request = parse_request(_body(resolution=8, bulk_rna=[0, 1, 2.5]))
    assert (request.resolution, request.bulk_rna) == (8.0, [0.0, 1.0, 2.5])
    with pytest.raises(BadRequest, match="field x: "):
        parse_request(_body(x=1.0))


@pytest.mark.parametrize(
    ("body", "says"),
    [
        pytest.param("", "not JSON", id="empty"),
        pytest.param("{", "not JSON", id="cut"),
        pytest.param("\ufeff" + _body(), "not JSON", id="byte-order mark"),
        pytest.param("[1]", "field body: ", id="a list"),
        pytest.param("[" * 100_000, "nested too deeply", id="deep"),
        pytest.param(_body(tissue_ratio=math.nan), "NaN is no JSON number", id="NaN"),
        pytest.param(_body(bulk_rna=[math.inf]), "Infinity is no JSON number", id="infinity"),
        pytest.param(_body().replace("0.5", "1e999", 1), "tissue_ratio: .*finite", id="overflow"),
        pytest.param(_body().replace("448", "9" * 5000), "not JSON", id="5000 digits"),
        pytest.param(_body(x=2**63), "field x: ", id="beyond 64 bits"),
        pytest.param(_body(tissue_ratio=10**400), "field tissue_ratio: ", id="beyond a float"),
        pytest.param(_body()[:-1] + ', "x": 1}', "key 'x' twice", id="duplicate key"),
        pytest.param(_body(colour="red"), "field colour: Extra inputs", id="unknown field"),
        pytest.param(_body(x="448"), "field x: ", id="text for a number"),
        pytest.param(_body(x=True), "field x: ", id="true for a number"),
        pytest.param(_body(slide_name="\ud800"), r"not Unicode: '\\ud800'", id="half a surrogate pair"),
        pytest.param(_body(**{"\udfff": 1}), "not Unicode", id="half a surrogate pair as a key"),
        pytest.param(_body(width=0), "field width: ", id="no width"),
        pytest.param(_body(patch_idx=-1), "field patch_idx: ", id="negative index"),
        pytest.param(json.dumps({}), "image_data: Field required; slide_name: .* and 4 more", id="all missing"),
    ],
)
def test_a_body_that_breaks_the_contract_is_refused_by_name(body: str, says: str) -> None:
    with pytest.raises(BadRequest, match=says):
        parse_request(body)
    assert parse_request(_body()).x == 448


def test_a_refusal_does_not_repeat_what_was_sent() -> None:
    with pytest.raises(BadRequest) as caught:
        parse_request(_body(patch_idx="PATIENT-0815"))
    assert "PATIENT" not in str(caught.value)
    with pytest.raises(BadRequest) as caught:
        parse_request(_body(**{"k" * 10_000: 1}))
    assert len(str(caught.value)) < 300


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*FIELDS, "q"]), inner, max_size=4),
    max_leaves=8,
)


@settings(deadline=None)  # a busy machine is no fault
@given(st.dictionaries(st.sampled_from([*FIELDS, "bulk_rna", "mode", "q"]), json_values, max_size=4) | json_values)
def test_whatever_the_body_it_is_a_request_or_a_typed_refusal(value: object) -> None:
    body = json.dumps({**FIELDS, **value} if isinstance(value, dict) else value)
    try:
        request = parse_request(body)
    except BadRequest:
        return
    assert json.loads(request.model_dump_json())["slide_name"] == request.slide_name


def _response(**changes: object) -> ModelResponse:
    fields: dict[str, object] = {
        "output": [0.25, -1.5], "slide_name": "s", "x": 448, "y": 224, "width": 224, "height": 224, "patch_idx": 3,
    }  # fmt: skip
    return ModelResponse.model_validate(fields | changes)


def test_a_response_has_its_echoed_fields_always_and_the_embedding_only_in_the_combined_mode() -> None:
    alone = json.loads(_response().to_json())
    assert list(alone) == [
        "output", "slide_name", "x", "y", "width", "height", "tissue_ratio", "patch_idx", "resolution",
    ]  # fmt: skip
    assert alone["tissue_ratio"] is None
    combined = json.loads(_response(embedding=[1.0]).to_json())
    assert combined == {**alone, "embedding": [1.0]}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_no_response_can_hold_a_number_that_json_has_no_word_for(value: float) -> None:
    with pytest.raises(ValidationError):
        _response(output=[value])
    with pytest.raises(ValidationError):
        _response(embedding=[value])

"""Slide keys: safe folder names that depend on nothing but root label and path."""

import hashlib
import re
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference.errors import ConfigError
from inference.slides.keys import check_key, hidden_key, slide_key

PATTERN = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")
LABELS = st.text(max_size=40).filter(lambda text: "/" not in text)
PATHS = st.text(max_size=300)
ONE, TWO = "one", "two"


@pytest.mark.parametrize(
    ("relpath", "slug"),
    [
        ("a.svs", "a-svs"),
        ("case 1/slide (2).ndpi", "case-1-slide-2-ndpi"),
        ("-rf.svs", "rf-svs"),
        ("_scan_.svs", "scan_-svs"),
        ("a - b.svs", "a---b-svs"),
        ("новый.日本", "slide"),
        ("", "slide"),
        ("line\nbreak.svs", "line-break-svs"),
        ("🔬.svs", "svs"),
        ("x" * 300 + ".svs", "x" * 110),
    ],
)
def test_a_key_is_the_slug_of_the_path_and_eight_digits_of_the_hash_of_label_and_path(relpath: str, slug: str) -> None:
    digest = hashlib.sha256(f"cohort/{relpath}".encode()).hexdigest()[:8]
    assert slide_key("cohort", relpath) == f"{slug}-{digest}"


@given(LABELS, PATHS, st.none() | st.text(min_size=1).filter(lambda text: text.strip() != ""))
def test_every_name_gets_a_key_that_passes_the_check(label: str, relpath: str, secret: str | None) -> None:
    key = slide_key(label, relpath, secret=secret)
    assert PATTERN.fullmatch(key)
    assert check_key(key) == key


@given(st.tuples(LABELS, PATHS), st.tuples(LABELS, PATHS), st.sampled_from([None, "secret"]))
def test_different_names_get_different_keys(
    first: tuple[str, str], second: tuple[str, str], secret: str | None
) -> None:
    same = first == second
    assert (slide_key(*first, secret=secret) == slide_key(*second, secret=secret)) is same


def test_composed_and_decomposed_unicode_names_get_different_keys() -> None:
    names = [unicodedata.normalize(form, "é.svs") for form in ("NFC", "NFD")]
    assert len({slide_key("r", name) for name in names}) == 2


def test_an_undecodable_name_is_hashed_as_its_bytes_on_disk() -> None:
    raw = b"scan\xff.svs"
    expected = hashlib.sha256(b"r/" + raw).hexdigest()[:8]
    assert slide_key("r", raw.decode("utf-8", "surrogateescape")).endswith(expected)


def test_a_root_label_with_a_slash_is_refused_because_two_names_would_share_a_key() -> None:
    with pytest.raises(ConfigError, match="label"):
        slide_key("a/b", "c.svs")


def test_a_secret_key_tells_nothing_of_the_name_and_depends_on_secret_label_and_path() -> None:
    key = slide_key("root", "S21-1234.svs", secret=ONE)
    assert re.fullmatch(r"s-[0-9a-f]{24}", key)
    assert "1234" not in key
    others = {
        slide_key("root", "S21-1234.svs", secret=TWO),
        slide_key("other", "S21-1234.svs", secret=ONE),
        slide_key("root", "S21-1235.svs", secret=ONE),
        hidden_key("S21-1234.svs", ONE),
    }
    assert len(others | {key}) == 5
    assert slide_key("root", "S21-1234.svs", secret=ONE) == key


@pytest.mark.parametrize("secret", ["", "  "])
def test_a_blank_secret_is_refused(secret: str) -> None:
    with pytest.raises(ConfigError, match="SLIDE_KEY_SECRET"):
        slide_key("root", "a.svs", secret=secret)


@pytest.mark.parametrize("key", ["a", "0", "A.b_c-d", "x" * 128, "a.b.c"])
def test_a_key_within_the_rule_is_returned(key: str) -> None:
    assert check_key(key) == key


@pytest.mark.parametrize(
    "key",
    ["", ".", "..", "a..b", ".hidden", "-a", "_a", "a/b", "a b", "é", "x" * 129, "a\n", "a\0", "a.work", "A.WORK"],
)
def test_a_key_outside_the_rule_is_refused(key: str) -> None:
    with pytest.raises(ConfigError):
        check_key(key)


def test_a_refused_key_is_not_repeated_because_it_may_be_a_name() -> None:
    with pytest.raises(ConfigError) as caught:
        check_key("Jane Doe")
    assert "Jane" not in str(caught.value)

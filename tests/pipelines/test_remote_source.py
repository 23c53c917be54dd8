"""The pipeline's source may be a URL: it reaches discovery as it was written."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from inference.errors import ConfigError
from pipelines.demo.__main__ import layout_of
from pipelines.resources import SlideInference
from tests.inference.slides.buckets import Bucket, serve_bucket


@pytest.fixture(scope="module")
def bucket() -> Iterator[Bucket]:
    yield from serve_bucket()


def test_urls_and_folders_in_slide_source_become_one_inventory(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.put("ward/one.svs", b"x")
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab" / "two.svs").write_bytes(b"x")
    monkeypatch.setenv("SLIDE_SOURCE", f"{bucket.url('ward/')}{os.pathsep}{tmp_path / 'lab'}")
    resource = SlideInference(store=str(tmp_path / "store"))
    assert [ref.relpath for ref in resource.discover().slides] == ["one.svs", "two.svs"]
    assert [bool(ref.remote) for ref in resource.slides().values()] == [True, False]


def test_make_demo_takes_a_url_for_slides(bucket: Bucket, tmp_path: Path) -> None:
    bucket.put("ward/one.svs", b"x")
    layout = layout_of(bucket.url("ward/"), "", "", tmp_path)
    assert layout.out == tmp_path / "runs" / "ward"
    assert layout.environment()["SLIDE_SOURCE"] == bucket.url("ward/")
    with pytest.raises(ConfigError, match="does not exist"):
        layout_of(bucket.url("none/"), "", "", tmp_path)

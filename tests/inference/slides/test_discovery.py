"""Discovery: what counts as a slide, where it is found, and what it is called."""

import errno
import os
import re
import socket
import tempfile
import traceback
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from inference.errors import ConfigError, SourceUnavailable
from inference.slides.discovery import SLIDE_SUFFIXES, Inventory, SlideRef, discover
from inference.slides.keys import slide_key

SECRET = "a secret"  # noqa: S105 - a test's own


def _touch(*paths: Path) -> Path:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    return paths[0]


def _paths(result: Inventory) -> list[str]:
    return [slide.relpath for slide in result.slides]


def _codes(result: Inventory) -> dict[str, str]:
    return {item.path.name: item.code for item in result.skipped}


def _cohort(path: Path, *rows: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(rows) + "\n")
    return path


# What a folder yields


def test_a_folder_yields_every_slide_suffix_in_any_case_and_depth_sorted_by_path(tmp_path: Path) -> None:
    names = [f"s{suffix}" for suffix in sorted(SLIDE_SUFFIXES - {".dcm"})] + ["T.SVS", "z/deep/er/t.Tiff", "z.ndpi"]
    _touch(*(tmp_path / name for name in names), tmp_path / "notes.txt", tmp_path / "p.png", tmp_path / "cohort.csv")
    result = discover([tmp_path])
    assert _paths(result) == sorted(names)
    assert result.skipped == ()


def test_a_slide_knows_its_root_label_path_and_key(tmp_path: Path) -> None:
    path = _touch(tmp_path / "cohort A" / "sub" / "a.svs")
    (slide,) = discover([tmp_path / "cohort A"]).slides
    assert slide == SlideRef(
        key=slide_key("cohort A", "sub/a.svs"),
        path=path,
        files=(path,),
        root=tmp_path / "cohort A",
        root_label="cohort A",
        relpath="sub/a.svs",
    )
    assert slide.name == "sub/a.svs"


def test_a_relative_source_gives_absolute_paths_and_the_same_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _touch(tmp_path / "in" / "a.svs")
    (tmp_path / "other").mkdir()
    expected = discover([tmp_path / "in"]).slides
    for folder, source in ((tmp_path, "in"), (tmp_path / "in", "."), (tmp_path / "other", "../in")):
        monkeypatch.chdir(folder)
        assert discover([source]).slides == expected
        assert discover(source).slides == expected


def test_hidden_files_and_folders_are_left_out_but_a_hidden_folder_may_be_the_source(tmp_path: Path) -> None:
    root = tmp_path / ".cache"
    _touch(root / "a.svs", root / "._a.svs", root / ".trash" / "b.svs")
    result = discover([root])
    assert _paths(result) == ["a.svs"]
    assert result.skipped == ()


def test_fifos_and_sockets_are_skipped_with_a_reason_and_never_opened(tmp_path: Path) -> None:
    _touch(tmp_path / "a.svs")
    os.mkfifo(tmp_path / "b.svs")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "c.svs"))
        result = discover([tmp_path])
    assert _paths(result) == ["a.svs"]
    assert _codes(result) == {"b.svs": "not_regular", "c.svs": "not_regular"}


def test_links_are_followed_only_to_files_inside_the_root(tmp_path: Path) -> None:
    root = tmp_path / "root"
    outside = _touch(tmp_path / "outside" / "o.svs")
    hidden = _touch(root / ".objects" / "123")
    (root / "annexed.svs").symlink_to(hidden)
    (root / "out.svs").symlink_to(outside)
    (root / "gone.svs").symlink_to(root / "nowhere")
    (root / "self.svs").symlink_to("self.svs")
    (root / "loop").symlink_to(root)
    result = discover([root])
    assert _paths(result) == ["annexed.svs"]
    assert result.slides[0].path == root / "annexed.svs"
    assert _codes(result) == {
        "out.svs": "outside_root", "gone.svs": "broken_link", "self.svs": "broken_link", "loop": "linked_folder",
    }  # fmt: skip
    assert _paths(discover([root], root=tmp_path)) == ["root/annexed.svs", "root/out.svs"]


def test_adding_a_link_never_changes_what_a_slide_is_called(tmp_path: Path) -> None:
    _touch(tmp_path / "m.svs")
    before = discover([tmp_path]).slides
    (tmp_path / "a.svs").symlink_to("m.svs")
    (tmp_path / "z.svs").symlink_to("m.svs")
    assert discover([tmp_path]).slides == before


def test_hard_links_are_two_slides(tmp_path: Path) -> None:
    os.link(_touch(tmp_path / "a.svs"), tmp_path / "b.svs")
    assert _paths(discover([tmp_path])) == ["a.svs", "b.svs"]


def test_odd_names_are_found_keyed_apart_and_shown_on_one_line(tmp_path: Path) -> None:
    names = [
        "with space.svs", "🔬.svs", "two\nlines.svs", "-rf.svs", "slide (1).svs", "slide [1].svs", "a\\b.svs",
        "CON.svs", "x" * 251 + ".svs", "é.svs", unicodedata.normalize("NFD", "é.svs"),
        "one/same.svs", "two/same.svs", "A.svs", "a.svs", os.fsdecode(b"raw\xff.svs"), "/".join("d" * 60) + "/deep.svs",
    ]  # fmt: skip
    _touch(*(tmp_path / name for name in names))
    result = discover([tmp_path])
    assert _paths(result) == sorted(names)
    keys = [slide.key for slide in result.slides]
    assert len({key.casefold() for key in keys}) == len(names)
    assert all(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", key) for key in keys)
    assert all(slide.name.isprintable() for slide in result.slides)
    shown = {slide.relpath: slide.name for slide in result.slides}
    assert shown["two\nlines.svs"] == "two\\nlines.svs"
    assert shown["🔬.svs"] == "🔬.svs"


def test_a_tree_of_four_hundred_nested_folders_is_walked(tmp_path: Path) -> None:
    _touch(tmp_path / "/".join(["d"] * 400) / "a.svs")
    assert [path.count("/") for path in _paths(discover([tmp_path]))] == [400]


def test_an_empty_folder_is_an_empty_inventory(tmp_path: Path) -> None:
    assert discover([tmp_path]) == Inventory((), ())


# Companions


def test_an_mrxs_slide_is_its_main_file_and_the_parts_in_its_folder(tmp_path: Path) -> None:
    main = _touch(tmp_path / "case.mrxs")
    parts = [tmp_path / "case" / name for name in ("Data0000.dat", "Index.dat", "Slidedat.ini")]
    # A part that begins like DICOM must still not become a slide of its own.
    _touch(*parts, tmp_path / "case" / "notes.xml")
    parts[0].write_bytes(bytes(128) + b"DICM")
    result = discover([tmp_path])
    assert [slide.files for slide in result.slides] == [(main, *parts)]
    assert result.skipped == ()
    assert discover([main]).slides == result.slides


def test_a_slide_in_a_folder_that_shares_its_name_with_an_mrxs_slide_is_not_lost(tmp_path: Path) -> None:
    _touch(tmp_path / "case.mrxs", tmp_path / "case" / "Slidedat.ini", tmp_path / "case" / "other.svs")
    assert _paths(discover([tmp_path])) == ["case.mrxs", "case/other.svs"]


def test_an_mrxs_slide_without_its_folder_stays_a_slide(tmp_path: Path) -> None:
    main = _touch(tmp_path / "case.mrxs")
    assert discover([tmp_path]).slides[0].files == (main,)


def test_an_mrxs_slide_whose_parts_are_linked_from_outside_is_skipped(tmp_path: Path) -> None:
    secret = _touch(tmp_path / "outside" / "x.dat")
    _touch(tmp_path / "in" / "case.mrxs", tmp_path / "in" / "case" / "Slidedat.ini")
    (tmp_path / "in" / "case" / "Data0000.dat").symlink_to(secret)
    result = discover([tmp_path / "in"])
    assert result.slides == ()
    assert _codes(result) == {"case.mrxs": "outside_root", "Data0000.dat": "outside_root"}


def test_a_vms_slide_holds_the_files_its_key_file_names_and_nothing_else(tmp_path: Path) -> None:
    main = tmp_path / "case.vms"
    main.write_text(
        "[Virtual Microscope Specimen]\r\nNoLayers=1\r\nImageFile=case.jpg\r\nImageFile(1,0)=case (1,0).jpg\r\n"
        "MapFile=map.jpg\r\nOptimisationFile=case.opt\r\nMacroImage=macro.jpg\r\n"
        "ImageFile(2,0)=../elsewhere.jpg\r\nImageFile(3,0)=other.svs\r\nImageFile(4,0)=missing.jpg\r\n"
        "AuthCode=unrelated.jpg\r\n[Other]\r\nImageFile=unrelated.jpg\r\n"
    )
    parts = [tmp_path / name for name in ("case (1,0).jpg", "case.jpg", "case.opt", "macro.jpg", "map.jpg")]
    _touch(*parts, tmp_path / "unrelated.jpg", tmp_path / "other.svs", tmp_path.parent / "elsewhere.jpg")
    result = discover([tmp_path])
    assert [slide.files for slide in result.slides] == [(main, *parts), (tmp_path / "other.svs",)]


def test_a_vmu_slide_holds_its_ngr_files(tmp_path: Path) -> None:
    main = tmp_path / "case.vmu"
    main.write_bytes(b"[Uncompressed Virtual Microscope Specimen]\nImageFile=c.ngr\nMapFile=m.ngr\n\xff=\n")
    _touch(tmp_path / "c.ngr", tmp_path / "m.ngr", tmp_path / "z.ngr")
    assert discover([main]).slides[0].files == (main, tmp_path / "c.ngr", tmp_path / "m.ngr")


# Files and globs as sources


def test_a_lone_file_is_relative_to_its_parent(tmp_path: Path) -> None:
    path = _touch(tmp_path / "run 1" / "a.svs")
    (slide,) = discover([path]).slides
    assert (slide.root_label, slide.relpath, slide.key) == ("run 1", "a.svs", slide_key("run 1", "a.svs"))


@pytest.mark.parametrize("name", ["a.png", "a.JPG", "a.jpeg", "a.webp"])
def test_a_plain_image_is_no_slide_and_where_it_is_named_the_way_out_is_told(tmp_path: Path, name: str) -> None:
    path = _touch(tmp_path / name)
    assert discover([tmp_path]) == Inventory((), ())
    with pytest.raises(ConfigError, match="matches no slide; check the pattern"):
        discover([f"{tmp_path}/*"])
    for source in (path, f"{tmp_path}/*{path.suffix}"):
        with pytest.raises(ConfigError, match="is a plain image, which no slide reader opens; save it as a tiled TIFF"):
            discover([source])
    _touch(tmp_path / "b.svs")
    result = discover([_cohort(tmp_path / "cohort.csv", "path", "b.svs", name)])
    assert _paths(result) == ["b.svs"]
    assert [(item.path.name, item.code) for item in result.skipped] == [(name, "plain_image")]
    assert result.skipped[0].reason.endswith("(row 3 of the cohort file)")


def test_a_named_link_is_trusted_wherever_it_leads(tmp_path: Path) -> None:
    target = _touch(tmp_path / "archive" / "o.svs")
    (tmp_path / "in").mkdir()
    link = tmp_path / "in" / "a.svs"
    link.symlink_to(target)
    assert discover([link]).slides[0].path == link
    assert _paths(discover([_cohort(tmp_path / "in" / "c.csv", "path", "a.svs")])) == ["a.svs"]


def test_a_named_file_of_unknown_kind_is_refused_with_the_known_suffixes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\.svs .*DICOM"):
        discover([_touch(tmp_path / "readme.txt")])


def test_a_named_fifo_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.svs")
    with pytest.raises(ConfigError, match="neither a regular file nor a folder"):
        discover([tmp_path / "a.svs"])


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*.svs", ["a.svs"]),
        ("**/*.svs", ["a.svs", "site1/b.svs", "site1/x/c.svs", "site2/d.svs"]),
        ("site*/*.svs", ["site1/b.svs", "site2/d.svs"]),
        ("site?/**/c.*", ["site1/x/c.svs"]),
        ("site[2-9]", ["site2/d.svs", "site2/e.tif"]),
        ("site1/x/*", ["c.svs"]),
        ("**", ["a.svs", "site1/b.svs", "site1/x/c.svs", "site2/d.svs", "site2/e.tif"]),
    ],
)
def test_a_glob_is_relative_to_its_fixed_prefix(tmp_path: Path, pattern: str, expected: list[str]) -> None:
    for name in ("a.svs", "site1/b.svs", "site1/x/c.svs", "site2/d.svs", "site2/e.tif", ".h/f.svs", "site1/n.txt"):
        _touch(tmp_path / name)
    result = discover([f"{tmp_path}/{pattern}"])
    assert _paths(result) == expected
    fixed = "site1/x" if pattern.startswith("site1") else ""
    assert {slide.root for slide in result.slides} == {tmp_path / fixed}


def test_a_file_or_folder_whose_name_holds_wildcards_is_taken_as_it_is(tmp_path: Path) -> None:
    path = _touch(tmp_path / "run[1]" / "slide[2].svs", tmp_path / "run[1]" / "slide2.svs")
    assert _paths(discover([path])) == ["slide[2].svs"]
    assert _paths(discover([f"{tmp_path}/run[1]/*[2].svs"])) == ["slide2.svs"]


def test_a_glob_never_lists_folders_that_cannot_match(tmp_path: Path) -> None:
    _touch(tmp_path / "a.svs", tmp_path / "deep" / "b.svs")
    os.mkfifo(tmp_path / "deep" / "pipe.svs")
    assert discover([f"{tmp_path}/*.svs"]).skipped == ()


@pytest.mark.parametrize("source", ["absent.svs", "absent/", "a.svs/inside.svs", "none*.svs", "absent/*.svs", "no.csv"])
def test_a_missing_source_is_refused_by_name_with_the_remedy(tmp_path: Path, source: str) -> None:
    _touch(tmp_path / "a.svs")
    with pytest.raises(ConfigError, match="check") as caught:
        discover([tmp_path / "a.svs", f"{tmp_path}/{source}"])
    assert source.rstrip("/") in str(caught.value)


@pytest.mark.parametrize("source", ["", "  ", "a\0b"])
def test_an_empty_source_is_not_the_current_folder(source: str) -> None:
    with pytest.raises(ConfigError, match="source 1"):
        discover([source])


# Cohort files


def test_cohort_order_is_kept_and_rows_may_be_globs(tmp_path: Path) -> None:
    _touch(*(tmp_path / name for name in ("z.svs", "a.svs", "sub/c.svs", "sub/b.svs")))
    cohort = _cohort(tmp_path / "cohort.csv", "patient,path,mpp", "Doe,z.svs,", "Roe,sub/*.svs,0.5", "Poe,a.svs,0.25")
    result = discover([cohort])
    assert _paths(result) == ["z.svs", "sub/b.svs", "sub/c.svs", "a.svs"]
    assert [slide.mpp for slide in result.slides] == [None, 0.5, 0.5, 0.25]
    assert {slide.root for slide in result.slides} == {tmp_path}
    assert "Doe" not in repr(result)


def test_a_cohort_file_and_its_folder_give_the_same_keys(tmp_path: Path) -> None:
    _touch(tmp_path / "a.svs", tmp_path / "sub" / "b.svs")
    cohort = _cohort(tmp_path / "cohort.csv", "path", "./a.svs", "sub/../sub//b.svs")
    assert discover([cohort]).slides == discover([tmp_path]).slides
    assert len(discover([tmp_path, cohort]).slides) == 2


def test_a_missing_row_stays_in_the_inventory_so_that_it_fails_visibly(tmp_path: Path) -> None:
    _touch(tmp_path / "a.svs")
    cohort = _cohort(tmp_path / "cohort.csv", "path,mpp", "gone.svs,0.5", "a.svs,", "no/such/folder/x.svs,")
    result = discover([cohort])
    assert _paths(result) == ["gone.svs", "a.svs", "no/such/folder/x.svs"]
    assert result.slides[0].files == (tmp_path / "gone.svs",)
    assert result.slides[0].key == slide_key(tmp_path.name, "gone.svs")


def test_a_row_of_unknown_kind_stays_and_a_fifo_or_an_unmatched_glob_is_skipped(tmp_path: Path) -> None:
    _touch(tmp_path / "notes.txt")
    os.mkfifo(tmp_path / "pipe.svs")
    result = discover([_cohort(tmp_path / "cohort.csv", "path", "notes.txt", "pipe.svs", "none*.svs")])
    assert _paths(result) == ["notes.txt"]
    assert _codes(result) == {"pipe.svs": "not_regular", "none*.svs": "no_match"}
    assert [item.reason for item in result.skipped if item.code == "no_match"] == [
        "row 4 of the cohort file matches no slide; check the path or pattern"
    ]


def test_a_slide_key_column_overrides_the_computed_key(tmp_path: Path) -> None:
    _touch(tmp_path / "a.svs", tmp_path / "b.svs")
    cohort = _cohort(tmp_path / "cohort.csv", "path,slide_key", "a.svs,case.1", "b.svs,")
    assert [slide.key for slide in discover([cohort]).slides] == ["case.1", slide_key(tmp_path.name, "b.svs")]


def test_what_a_cohort_gives_applies_also_where_a_folder_found_the_slide_first(tmp_path: Path) -> None:
    _touch(tmp_path / "a.svs")
    cohort = _cohort(tmp_path / "cohort.csv", "path,mpp,slide_key", "a.svs,0.5,case-1")
    for sources in ([tmp_path, cohort], [cohort, tmp_path]):
        (slide,) = discover(sources).slides
        assert (slide.mpp, slide.key) == (0.5, "case-1")


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        (["a.svs,,one", "b.svs,,one"], "two slides share the key one: 'a.svs' and 'b.svs'"),
        (["a.svs,,One", "b.svs,,one"], "two slides share the key one"),
        (["*.svs,,one"], "row 2: one slide_key for 2 slides"),
        (["a.svs,0.5,", "a.svs,0.25,"], "row 3: the same slide was given another mpp"),
        (["*.svs,0.5,", "b.svs,,x", "b.svs,,y"], "row 4: the same slide was given another slide_key"),
        (["a.svs,,", "../b.svs,,"], "row 3: the path .* lies outside the root .* --root"),
        (["/elsewhere/b.svs,,"], "row 2: the path .* lies outside the root .* --root"),
    ],
)
def test_a_cohort_that_contradicts_itself_or_leaves_its_folder_is_refused(
    tmp_path: Path, rows: list[str], problem: str
) -> None:
    _touch(tmp_path / "a.svs", tmp_path / "b.svs")
    with pytest.raises(ConfigError, match=problem):
        discover([_cohort(tmp_path / "cohort.csv", "path,mpp,slide_key", *rows)])


def test_a_slide_listed_twice_is_one_slide_in_its_first_place(tmp_path: Path) -> None:
    _touch(tmp_path / "a.svs", tmp_path / "b.svs")
    cohort = _cohort(tmp_path / "cohort.csv", "path,mpp", "b.svs,", "a.svs,0.5", "b.svs,0.25", "*.svs,")
    result = discover([cohort])
    assert [(slide.relpath, slide.mpp) for slide in result.slides] == [("b.svs", 0.25), ("a.svs", 0.5)]


# Roots


def test_a_given_root_changes_keys_but_not_where_sources_are_looked_for(tmp_path: Path) -> None:
    path = _touch(tmp_path / "data" / "x" / "a.svs")
    cohort = _cohort(tmp_path / "data" / "x" / "cohort.csv", "path", "a.svs")
    absolute = _cohort(tmp_path / "study" / "cohort.csv", "path", str(path))
    root = tmp_path / "data"
    expected = discover([root]).slides
    for source in (path, path.parent, cohort, absolute, f"{path.parent}/*.svs"):
        assert discover([source], root=root).slides == expected


def test_a_source_outside_the_given_root_or_a_root_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    path = _touch(tmp_path / "data" / "a.svs")
    (tmp_path / "empty").mkdir()
    for source in (path, path.parent):
        with pytest.raises(ConfigError, match="outside the root"):
            discover([source], root=tmp_path / "empty")
    with pytest.raises(ConfigError, match="not a folder"):
        discover([path], root=path)


def test_two_roots_with_one_name_are_refused_unless_a_common_root_is_given(tmp_path: Path) -> None:
    one, two = tmp_path / "site1" / "slides", tmp_path / "site2" / "slides"
    _touch(one / "a.svs", two / "a.svs")
    with pytest.raises(ConfigError, match=r"'slides'.*--root"):
        discover([one, two])
    assert _paths(discover([one, two], root=tmp_path)) == ["site1/slides/a.svs", "site2/slides/a.svs"]


def test_sources_keep_their_order_and_a_slide_in_two_of_them_is_taken_once(tmp_path: Path) -> None:
    _touch(tmp_path / "in" / "z" / "a.svs", tmp_path / "in" / "b.svs")
    result = discover([tmp_path / "in" / "z", tmp_path / "in", tmp_path / "in" / "z" / "a.svs"])
    assert [(slide.root_label, slide.relpath) for slide in result.slides] == [("z", "a.svs"), ("in", "b.svs")]


# Secrets


def test_under_a_secret_neither_keys_nor_shown_names_tell_anything(tmp_path: Path) -> None:
    _touch(tmp_path / "S21-1.svs", tmp_path / "S21-2.svs")
    cohort = _cohort(tmp_path / "cohort.csv", "path,slide_key", "S21-1.svs,S21-1", "S21-2.svs,")
    result = discover([cohort], secret=SECRET)
    for slide in result.slides:
        assert slide.hidden
        assert re.fullmatch(r"s-[0-9a-f]{24}", slide.key)
        assert slide.name == slide.key
    assert "S21" not in repr(result)
    assert len({slide.key for slide in result.slides}) == 2
    assert result == discover([cohort], secret=SECRET)


def test_under_a_secret_a_key_of_a_cohort_file_outlives_a_renamed_slide(tmp_path: Path) -> None:
    _touch(tmp_path / "a.svs", tmp_path / "b.svs")
    keys = {
        discover([_cohort(tmp_path / "cohort.csv", "path,slide_key", f"{name},case-1")], secret=SECRET).slides[0].key
        for name in ("a.svs", "b.svs")
    }
    assert len(keys) == 1


def test_under_a_secret_no_error_names_a_file(tmp_path: Path) -> None:
    names = ("S21-1.svs", "S21-1/S21-1.svs", "S21-1/x/S21-1/S21-1.svs", "S21-1.txt")
    _touch(*(tmp_path / name for name in names))
    os.mkfifo(tmp_path / "S21-1.tif")
    sources: list[list[Path | str]] = [
        [tmp_path / "S21-absent.svs"],
        [tmp_path / "S21-absent*.svs"],
        [tmp_path / "S21-1.txt"],
        [tmp_path / "S21-1.tif"],
        [tmp_path / "S21-1", tmp_path / "S21-1" / "x" / "S21-1"],
        [_cohort(tmp_path / "c1.csv", "path,slide_key", "S21-1.svs,same", "S21-1/S21-1.svs,same")],
        [_cohort(tmp_path / "S21-1" / "c2.csv", "path", "../S21-1.svs")],
        [_cohort(tmp_path / "c3.csv", "path,slide_key", "S21-1.svs,S21 bad")],
    ]
    for source in sources:
        with pytest.raises(ConfigError) as caught:
            discover(source, secret=SECRET)
        assert "S21" not in str(caught.value) + repr(caught.value.fields)


def told(error: BaseException) -> str:
    """All that a log would show of an error: its text, and the causes and contexts that are not suppressed."""
    return "".join(line for line in traceback.format_exception(error) if not line.startswith("  File "))


def test_under_a_secret_no_cause_of_an_error_names_a_file(
    tmp_path: Path, failing_scandir: Callable[[Path, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "S21-1"
    _touch(folder / "S21-1.svs", folder / "S21-1.mrxs", folder / "S21-1" / "S21-1.dat")
    loop = folder / "S21-loop.csv"
    loop.symlink_to(loop)
    os.mkfifo(folder / "S21-pipe.csv")
    bad = _cohort(folder / "S21-bad.csv", "path,mpp", "S21-1.svs,x")
    sources: list[Path] = [loop, folder / "S21-pipe.csv", bad, folder / ("S21" * 100), folder / "S21-1.svs" / "S21"]
    for source in sources:
        with pytest.raises(ConfigError) as refused:
            discover([source], secret=SECRET)
        assert "S21-1" not in told(refused.value)
    for lost in (folder, folder / "S21-1"):
        failing_scandir(lost, errno.EIO)
        with pytest.raises(SourceUnavailable) as caught:
            discover([folder], secret=SECRET)
        assert "S21" not in told(caught.value)
    real = os.path.realpath

    def realpath(path: Path | str, *, strict: bool = False) -> str:
        if strict:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return real(path)

    monkeypatch.setattr("inference.slides._files.os.path.realpath", realpath)
    _touch(folder / "x" / "S21-1.bin", folder / "y" / "S21-1.dcm", folder / "z" / "S21-1.vms", folder / "S21-2.csv")
    for source in (folder / "x", folder / "y", folder / "z", folder / "S21-2.csv"):
        with pytest.raises(SourceUnavailable) as caught:
            discover([source], secret=SECRET)
        assert "S21-1" not in told(caught.value)


# Folders that cannot be read


@pytest.fixture
def failing_scandir(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path, int], None]:
    """Make the operating system refuse to list one folder; root cannot be refused by permissions alone."""
    real = os.scandir
    failures: dict[str, int] = {}

    def scandir(path: Path) -> "os._ScandirIterator[str]":
        number = failures.get(str(path))
        if number is not None:
            raise OSError(number, os.strerror(number), str(path))
        return real(str(path))

    monkeypatch.setattr("inference.slides._files.os.scandir", scandir)
    return lambda path, number: failures.update({str(path): number})


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ESTALE])
def test_a_source_folder_that_cannot_be_listed_is_an_unavailable_source(
    tmp_path: Path, failing_scandir: Callable[[Path, int], None], number: int
) -> None:
    failing_scandir(tmp_path, number)
    with pytest.raises(SourceUnavailable, match=re.escape(f"source '{tmp_path}'")) as caught:
        discover([tmp_path])
    assert caught.value.retryable
    with pytest.raises(SourceUnavailable) as caught:
        discover([tmp_path], secret=SECRET)
    assert str(tmp_path) not in str(caught.value)


def test_a_forbidden_subfolder_is_skipped_but_a_lost_one_stops_discovery(
    tmp_path: Path, failing_scandir: Callable[[Path, int], None]
) -> None:
    _touch(tmp_path / "a.svs", tmp_path / "lost+found" / "b.svs")
    failing_scandir(tmp_path / "lost+found", errno.EACCES)
    result = discover([tmp_path])
    assert (_paths(result), _codes(result)) == (["a.svs"], {"lost+found": "unreadable_folder"})
    failing_scandir(tmp_path / "lost+found", errno.ESTALE)
    with pytest.raises(SourceUnavailable):
        discover([tmp_path])


def test_a_subfolder_that_vanishes_during_the_walk_is_as_if_never_there(
    tmp_path: Path, failing_scandir: Callable[[Path, int], None]
) -> None:
    _touch(tmp_path / "a.svs", tmp_path / "b" / "b.svs")
    failing_scandir(tmp_path / "b", errno.ENOENT)
    result = discover([tmp_path])
    assert (_paths(result), result.skipped) == (["a.svs"], ())


@pytest.fixture
def as_nobody() -> Iterator[None]:
    """Without the right to read everything, as root has it."""
    if os.geteuid():
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder anyone may enter."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


def test_folders_and_links_closed_to_the_user_cost_no_other_slide(
    open_folder: Path, request: pytest.FixtureRequest
) -> None:
    _touch(*(open_folder / name for name in ("a.svs", "closed/b.svs", "c.mrxs", "c/d.dat", "seen/e.svs")))
    (open_folder / "link.svs").symlink_to(open_folder / "closed" / "b.svs")
    for name in ("closed", "c"):
        (open_folder / name).chmod(0)
    (open_folder / "seen").chmod(0o444)  # may be listed, not entered
    request.getfixturevalue("as_nobody")
    result = discover([open_folder])
    assert _paths(result) == ["a.svs", "c.mrxs", "link.svs", "seen/e.svs"]  # what does not open will say so
    assert _codes(result)["closed"] == "unreadable_folder"
    for source in (open_folder / "closed", open_folder / "closed" / "b.svs"):
        with pytest.raises(SourceUnavailable, match="permission"):
            discover([source])


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no /proc")
@pytest.mark.parametrize("source", ["/proc", "/proc/self", "/proc/1", "/proc/1/cwd", "/sys/kernel", "/dev"])
def test_the_systems_own_folders_end_in_an_inventory_or_a_typed_error(source: str) -> None:
    try:
        assert discover([source]).slides == ()
    except (SourceUnavailable, ConfigError) as error:
        assert source in error.message  # noqa: PT017 - either is right


# Real data


@pytest.mark.parametrize(
    ("folder", "count"), [("derived", 8), ("slides", 5), ("broken", 7), ("models", 0), ("images", 0)]
)
def test_the_shared_folders_hold_the_slides_that_their_readme_lists(shared_data: Path, folder: str, count: int) -> None:
    result = discover([shared_data / folder])
    assert len(result.slides) == count
    assert result.skipped == ()
    assert _paths(result) == sorted(_paths(result))


def test_results_that_lie_among_the_slides_are_not_taken_for_slides(tmp_path: Path) -> None:
    (tmp_path / "a.svs").touch()
    result = tmp_path / "out" / "heatmap" / "demo@0123456789ab" / "a-svs-01234567"
    result.mkdir(parents=True)
    for name in ("heatmap.tif", "heatmap.ome.tif", "overlay.png"):
        (result / name).touch()
    assert [ref.relpath for ref in discover([tmp_path]).slides] == ["a.svs"]

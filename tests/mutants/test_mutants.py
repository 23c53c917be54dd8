"""Each known fault, put back, turns its test red; and the runner that says so can itself say no."""

from pathlib import Path

import pytest

from tests.mutants.run import FOLDER, Mutant, MutantError, check_all_green, check_mutant, load_mutant, load_mutants

MUTANTS = {mutant.name: mutant for mutant in load_mutants()}

FIRST_TESTS = {"01", "02", "03", "04", "05", "06", "07", "08", "09", "10", "11", "12", "15"}


def test_each_of_the_first_tests_has_a_mutant() -> None:
    assert {name[:2] for name in MUTANTS} >= FIRST_TESTS


def test_a_patch_that_names_no_test_is_refused(tmp_path: Path) -> None:
    patch = tmp_path / "nameless.patch"
    patch.write_text("Fault: none\n\n--- a/x\n+++ b/x\n")
    with pytest.raises(MutantError, match="must have one line `Test:`"):
        load_mutant(patch)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_named_tests_are_green_without_a_fault() -> None:
    assert check_all_green(list(MUTANTS.values())) >= len({mutant.test for mutant in MUTANTS.values()})


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", MUTANTS)
def test_a_fault_put_back_turns_its_test_red(name: str) -> None:
    check_mutant(MUTANTS[name])


def _changed(tmp_path: Path, old: str, new: str, test: str) -> Mutant:
    """The first mutant with its patch or its test replaced."""
    original = next(iter(MUTANTS.values()))
    patch = tmp_path / original.patch.name
    text = (FOLDER / original.patch.name).read_text()
    assert old in text
    patch.write_text(text.replace(old, new))
    return Mutant(patch, test or original.test, original.fault)


@pytest.mark.slow
def test_a_patch_that_no_longer_applies_fails(tmp_path: Path) -> None:
    with pytest.raises(MutantError, match="no longer applies"):
        check_mutant(_changed(tmp_path, "\n-  ", "\n-  # another line than there is", ""))


@pytest.mark.slow
def test_a_test_that_stays_green_fails(tmp_path: Path) -> None:
    with pytest.raises(MutantError, match="stays green"):
        check_mutant(_changed(tmp_path, "", "", "tests/inference/batching/test_rules.py"))


@pytest.mark.slow
def test_a_test_that_is_not_there_fails(tmp_path: Path) -> None:
    with pytest.raises(MutantError, match="did not run"):
        check_mutant(_changed(tmp_path, "", "", "tests/inference/batching/test_rules.py::test_gone"))

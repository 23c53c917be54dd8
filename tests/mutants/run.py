"""Puts known faults back, one at a time, into a copy of the package; each must turn its named test red.

`python -m tests.mutants.run [NAME ...]`. A mutant is a patch whose head names its test (`Test:`) and its fault
(`Fault:`). The checkout is never touched.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
REPO = FOLDER.parent.parent
COPIED = ("inference", "tests", "pyproject.toml")
TEST_TIMEOUT_S, RUN_TIMEOUT_S = 40, 100
AT_ONCE = 2
PATIENCE_S = 4.0
"""How long the tests of a mutant wait for an answer that its fault withholds."""


class MutantError(Exception):
    """A mutant that proves nothing: it does not apply, its test did not run, or its test stays green."""


@dataclass(frozen=True)
class Mutant:
    """One fault and the test that must notice it."""

    patch: Path
    test: str
    fault: str

    @property
    def name(self) -> str:
        return self.patch.stem


def load_mutant(patch: Path) -> Mutant:
    """Read a patch's head.

    Raises:
        MutantError: it names no test or no fault.
    """
    head = patch.read_text().partition("\n--- ")[0]
    found = dict(re.findall(r"^(Test|Fault): (.+)$", head, re.MULTILINE))
    if found.keys() != {"Test", "Fault"}:
        raise MutantError(f"{patch.name}: its head must have one line `Test:` and one line `Fault:`")
    return Mutant(patch, found["Test"], found["Fault"])


def load_mutants() -> list[Mutant]:
    return [load_mutant(patch) for patch in sorted(FOLDER.glob("*.patch"))]


@contextmanager
def package_copy() -> Iterator[Path]:
    """A temporary copy of the package and its tests."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as place:
        folder = Path(place).resolve()
        for name in COPIED:
            if (REPO / name).is_dir():
                shutil.copytree(REPO / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.patch"))
            else:
                shutil.copy(REPO / name, folder / name)
        yield folder


def check_mutant(mutant: Mutant) -> float:
    """Apply one mutant to a copy and run its test; the seconds that took.

    Raises:
        MutantError: the patch does not apply, its test did not run, or it stays green.
    """
    started_at = time.monotonic()
    with package_copy() as folder:
        apply_patch(mutant.patch, folder)
        passed, failed = run_tests([mutant.test], folder, patience_s=PATIENCE_S)
    if not failed:
        raise MutantError(f"{mutant.name}: {mutant.test} stays green ({passed} passed) though {mutant.fault}")
    return time.monotonic() - started_at


def apply_patch(patch: Path, folder: Path) -> None:
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.parent)}
    command = ["git", "apply", "-p1", str(patch)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=RUN_TIMEOUT_S)
    if done.returncode:
        raise MutantError(f"{patch.name} no longer applies, make it anew: {done.stderr.strip()}")


def run_tests(tests: Sequence[str], folder: Path, *, patience_s: float = 10.0) -> tuple[int, int]:
    """How many of the named tests passed and how many failed, in a copy.

    Raises:
        MutantError: they did not run at all.
    """
    report = folder / "report.xml"
    # Without other plugins, and without importing Dagster for the name of a warning: that takes longer than a test.
    options = ["-q", "-p", "pytest_timeout", "-o", "filterwarnings=error"]
    options += [f"--timeout={TEST_TIMEOUT_S}", f"--junitxml={report}"]
    try:
        done = _python(folder, "-m", "pytest", *options, *tests, TEST_PATIENCE_S=str(patience_s))
    except subprocess.TimeoutExpired:
        raise MutantError(f"{', '.join(tests)}: did not end within {RUN_TIMEOUT_S} s") from None
    if done.returncode not in (0, 1) or not report.is_file():
        raise MutantError(f"{', '.join(tests)}: did not run: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    cases = list(ET.parse(report).iter("testcase"))  # noqa: S314 - pytest wrote it a moment ago
    failed = sum(case.find("failure") is not None for case in cases)
    passed = sum(all(case.find(kind) is None for kind in ("failure", "error", "skipped")) for case in cases)
    if not cases:
        raise MutantError(f"{', '.join(tests)}: no such test")
    return passed, failed


def check_all_green(mutants: Sequence[Mutant]) -> int:
    """Run the named tests on an unchanged copy: what is red without a fault proves nothing.

    Raises:
        MutantError: one of them is not green.
    """
    tests = sorted({mutant.test for mutant in mutants})
    with package_copy() as folder:
        imported = _python(folder, "-c", "import inference; print(inference.__file__)").stdout.strip()
        if not Path(imported).is_relative_to(folder):
            raise MutantError(f"the copy would not be tested, but {imported}")
        passed, failed = run_tests(tests, folder)
    if failed or passed < len(tests):
        raise MutantError(f"of {len(tests)} named tests {passed} pass and {failed} fail without any fault")
    return passed


def main(names: Sequence[str]) -> int:
    """Check the named mutants, or all; the exit code."""
    wrong = 0
    mutants = [mutant for mutant in load_mutants() if not names or mutant.name in names]
    if not mutants:
        raise SystemExit(f"no mutant named {', '.join(names)}; there are {', '.join(m.name for m in load_mutants())}")
    _say(f"{check_all_green(mutants)} tests are green without a fault")
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for mutant, outcome in zip(mutants, pool.map(_outcome, mutants), strict=True):
            if isinstance(outcome, MutantError):
                wrong += 1
                _say(f"SURVIVED {outcome}")
            else:
                _say(f"killed in {outcome:4.1f} s  {mutant.name}: {mutant.fault}")
    return 1 if wrong else 0


def _outcome(mutant: Mutant) -> float | MutantError:
    try:
        return check_mutant(mutant)
    except MutantError as error:
        return error


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _python(folder: Path, *arguments: str, **settings: str) -> "subprocess.CompletedProcess[str]":
    environment = (
        os.environ
        | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        | settings
    )
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
    )


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

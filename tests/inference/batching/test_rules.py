"""Every rule of the scheduler has a test that names it."""

import re
from pathlib import Path

RULES = 28


def test_each_rule_is_named_by_a_test() -> None:
    named: set[int] = set()
    for path in Path(__file__).parent.glob("test_*.py"):
        for name in re.findall(r"^(?:async )?def test_((?:s\d+_)+)", path.read_text(), re.MULTILINE):
            named |= {int(number) for number in re.findall(r"\d+", name)}
    assert named == set(range(1, RULES + 1))

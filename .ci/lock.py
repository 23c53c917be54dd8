"""Resolve every extra together and write constraints.txt; `make lock`."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent

PINNED = {
    # A .pt2 is tied to its torch; torchvision to both. The Dagster packages pin each other exactly.
    "torch": "2.14.1",
    "torchvision": "0.29.1",
    "dagster": "1.13.27",
    "dagster-dg-cli": "1.13.27",
    "dagster-graphql": "1.13.27",
    "dagster-postgres": "0.29.27",
    "dagster-webserver": "1.13.27",
}

HEAD = """\
# Every version of every extra, resolved together (Python 3.11, Linux x86-64).
# `make setup` installs with `pip install -c constraints.txt`; `make lock` writes it anew.
"""


def main() -> None:
    """Ask pip what it would install, and write that down."""
    with tempfile.TemporaryDirectory() as scratch:
        pins, report = Path(scratch) / "pins.txt", Path(scratch) / "report.json"
        pins.write_text("".join(f"{name}=={version}\n" for name, version in PINNED.items()))
        pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
        subprocess.run([*pip, "--report", str(report), "-c", str(pins), f"{REPO}[all]"], check=True)  # noqa: S603
        found = [item["metadata"] for item in json.loads(report.read_text())["install"]]
    names = {m["name"].lower().replace("_", "-"): m["version"] for m in found}
    rows = [f"{name}=={version}\n" for name, version in sorted(names.items()) if name != "slide-inference"]
    (REPO / "constraints.txt").write_text(HEAD + "".join(rows))


if __name__ == "__main__":
    main()

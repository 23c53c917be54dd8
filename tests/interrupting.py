"""Commands as subprocesses that are asked to stop while they work."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.conftest import REPO

OWN_SCRATCH = ("slide-inference-", "aotinductor_", "tmp", ".writing-")
"""Beginnings of temporary folders that a run makes; torch's cache of its compiler is none of them."""


@dataclass(frozen=True)
class Ended:
    code: int
    lines: list[str]
    scratch: list[str] = field(default_factory=list)


def run_until(
    arguments: list[str],
    scratch: Path,
    environment: dict[str, str],
    *signals: signal.Signals,
    at: Callable[[str], bool] = lambda _line: False,
) -> Ended:
    """Run a module; the signals are sent as soon as one of its lines, of either stream, is the awaited one."""
    scratch.mkdir(exist_ok=True)
    clean = {name: value for name, value in os.environ.items() if name not in ("SLIDE_KEY_SECRET", "SLIDE_MODELS")}
    lines, waiting = [], bool(signals)
    with subprocess.Popen(
        [sys.executable, "-m", *arguments],
        cwd=REPO,
        env=clean | {"TMPDIR": str(scratch), "PYTHONUNBUFFERED": "1"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # A shell without job control starts what runs in the background deaf to SIGINT.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                lines.append(line.rstrip("\n"))
                if waiting and at(line):
                    waiting = False
                    for number in signals:
                        process.send_signal(number)
            code = process.wait(100)
        finally:
            process.kill()
    assert not waiting, lines
    assert "Traceback" not in "\n".join(lines), lines
    return Ended(code, lines, [p.name for p in scratch.iterdir() if p.name.startswith(OWN_SCRATCH)])


def left_over(store: Path) -> list[Path]:
    """Unfinished work, scratch files and held locks in a store."""
    odd = [p for p in store.rglob("*") if p.name.endswith((".work", ".old", ".tmp")) or p.name.startswith(".probe")]
    return [*odd, *(store / ".locks").iterdir()]

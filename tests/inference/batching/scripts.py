"""Short programs in an interpreter of their own."""

import subprocess
import sys
import textwrap

from tests.inference.batching.patience import PATIENCE_S


def run_script(script: str) -> str:
    """What it printed; fails if it fails or does not end in time."""
    command = [sys.executable, "-c", textwrap.dedent(script)]
    return subprocess.run(command, check=True, timeout=2 * PATIENCE_S, capture_output=True, text=True).stdout

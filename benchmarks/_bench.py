"""What every benchmark shares: what it ran on, repetition, a table and a JSON file."""

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

OUT = Path(__file__).resolve().parent.parent / "out" / "bench"


def machine(*packages: str) -> dict[str, object]:
    """Processor, cores this process may use, load average over a minute, and versions of what was measured."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load_1min": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **{name: _version(name) for name in packages},
    }


def median_of(repeats: int, measure: Callable[[], float]) -> float:
    """The median of several measurements, after one that does not count."""
    measure()
    return statistics.median(measure() for _ in range(repeats))


def seconds(work: Callable[[], object]) -> float:
    started_at = time.perf_counter()
    work()
    return time.perf_counter() - started_at


def print_table(title: str, rows: Iterable[tuple[str, object, str]], about: Mapping[str, object]) -> None:
    """Prints rows of name, value and what it should be, under what they were measured on."""
    print(title)
    print("on " + ", ".join(f"{name} {value}" for name, value in about.items()))
    for name, value, target in rows:
        shown = f"{value:.{3 if abs(value) < 10 else 1}f}" if isinstance(value, float) else str(value)
        print(f"  {name:<44} {shown:>12}  {target}".rstrip())


def write_json(name: str, numbers: Mapping[str, object]) -> Path:
    """Writes `out/bench/<name>.json`."""
    OUT.mkdir(parents=True, exist_ok=True)
    path = OUT / f"{name}.json"
    path.write_text(json.dumps(numbers, indent=2) + "\n")
    return path


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"

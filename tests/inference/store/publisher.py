"""A process that publishes one small result, or holds its lock, and may die on the way.

python -m tests.inference.store.publisher publish ROOT TEXT [CRASH_POINT]
python -m tests.inference.store.publisher hold ROOT
"""

import hashlib
import os
import pathlib
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from inference.store import files as files_module
from inference.store import store as store_module
from inference.store.manifest import Manifest, read_manifest
from inference.store.store import Address, Store

ADDRESS = Address("info", "qc", {"stage": "info", "version": 1}, "slide-1")
NAMES = ("a.bin", "b.bin", "c.bin")


def publish(root: Path, text: str) -> Manifest:
    """Commit three files that hold `text` many times over."""
    store = Store(root)
    with store.lock(ADDRESS), store.work(ADDRESS) as work:
        for name in NAMES:
            (work / name).write_text(text * 1000)
        return store.publish(ADDRESS, work, manifest(text))


def manifest(text: str) -> Manifest:
    return Manifest(
        stage=ADDRESS.stage,
        name=ADDRESS.name,
        slide_key=ADDRESS.key,
        recipe=ADDRESS.recipe,
        recipe_digest=ADDRESS.digest,
        identity={"files": []},
        inputs={},
        status="ok",
        summary={"text": text},
    )


def published(root: Path) -> str | None:
    """The text of the result under its final name, None where there is none; fails if it is not whole."""
    folder = root / ADDRESS.folder
    found = read_manifest(folder)
    if found is None:
        assert not folder.exists(), "a result folder without a manifest"
        return None
    text = str(found.summary["text"])
    assert {record.name for record in found.files} == set(NAMES)
    for record in found.files:
        data = (folder / record.name).read_bytes()
        assert data == (text * 1000).encode(), "files of two results mixed"
        assert (len(data), hashlib.sha256(data).hexdigest()) == (record.size, record.sha256)
    return text


def leftovers(root: Path) -> list[str]:
    """Names under the store that belong to no finished result."""
    found = [path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()]
    return sorted(name for name in found if not name.startswith(f"{ADDRESS.folder}/"))


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _dying(module: object, name: str, call: int, *, after: bool = False) -> None:
    """Make the n-th call of a function the last thing this process does."""
    original: Callable[..., object] = getattr(module, name)
    calls = 0

    def wrapper(*args: object, **kwargs: object) -> object:
        nonlocal calls
        calls += 1
        if calls == call and not after:
            _die()
        result = original(*args, **kwargs)
        if calls == call:
            _die()
        return result

    setattr(module, name, wrapper)


def _cannot_exchange() -> None:
    setattr(files_module, "_exchange", lambda _work, _final: False)  # noqa: B010 - mypy minds the argument names


def _between_the_renames() -> None:
    _cannot_exchange()
    _dying(pathlib.Path, "rename", 2, after=True)  # the first is the store's probe


def _before_the_retired_one_is_deleted() -> None:
    _cannot_exchange()
    _dying(pathlib.Path, "rename", 3, after=True)


CRASH_POINTS: dict[str, Callable[[], None]] = {
    "files written, nothing recorded": lambda: _dying(store_module, "record_files", 1),
    "recorded, no manifest": lambda: _dying(store_module, "write_atomic", 1),
    "manifest written, not renamed": lambda: _dying(pathlib.Path, "replace", 1),
    "work complete, not published": lambda: _dying(store_module, "publish_folder", 1),
}
"""Where a first or second result can be cut short."""

REPLACING_POINTS: dict[str, Callable[[], None]] = {
    "before the exchange": lambda: _dying(files_module, "_exchange", 1),
    "after the exchange": lambda: _dying(files_module, "_exchange", 1, after=True),
    "without exchange, between the renames": _between_the_renames,
    "without exchange, before the old one is deleted": _before_the_retired_one_is_deleted,
}
"""Where only a result that replaces another can be cut short."""


def main() -> None:
    command, root, *rest = sys.argv[1:]
    if command == "publish":
        text, *crash = rest
        if crash:
            (CRASH_POINTS | REPLACING_POINTS)[crash[0]]()
        publish(Path(root), text)
    else:
        with Store(root).lock(ADDRESS):
            sys.stdout.write("held\n")
            sys.stdout.flush()
            sys.stdin.read()


if __name__ == "__main__":
    main()

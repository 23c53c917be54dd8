"""One writer per result: the second one is told who the first is, and a dead one holds nothing."""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from inference.errors import PartitionBusy
from inference.store.store import Address, Store
from tests.inference.store.publisher import ADDRESS

REPO = Path(__file__).resolve().parents[3]
PATIENCE_S = 30.0  # far above what any step takes


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


@contextmanager
def held_elsewhere(store: Store) -> Iterator["subprocess.Popen[str]"]:
    """Another process that holds the lock until its standard input ends."""
    command = [sys.executable, "-m", "tests.inference.store.publisher", "hold", str(store.root)]
    with subprocess.Popen(command, cwd=REPO, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


def test_the_second_process_is_told_who_holds_the_result(store: Store) -> None:
    with held_elsewhere(store) as owner:
        text = rf"slide-1: info/qc is being written by process {owner.pid} on \S+; try again later"
        with pytest.raises(PartitionBusy, match=text), store.lock(ADDRESS):
            pass
        other = Address(ADDRESS.stage, ADDRESS.name, ADDRESS.recipe, "slide-2")
        with store.lock(other):
            pass


def test_the_lock_of_a_killed_process_is_free_at_once(store: Store) -> None:
    with held_elsewhere(store) as owner:
        owner.send_signal(signal.SIGKILL)
        owner.wait(PATIENCE_S)
        with store.lock(ADDRESS):
            pass
    assert list((store.root / ".locks").iterdir()) == []


def test_a_waiting_process_gets_the_lock_as_soon_as_it_is_let_go(store: Store) -> None:
    with held_elsewhere(store) as owner, ThreadPoolExecutor(1) as pool:
        assert owner.stdin is not None

        def wait_for_it() -> str:
            with store.lock(ADDRESS, wait_s=PATIENCE_S):
                return next((store.root / ".locks").iterdir()).read_text()

        waiting = pool.submit(wait_for_it)
        owner.stdin.close()
        assert re.search(rf'"pid": {os.getpid()}\b', waiting.result(PATIENCE_S))
        assert owner.wait(PATIENCE_S) == 0


def test_two_threads_of_one_process_exclude_each_other_too(store: Store) -> None:
    with store.lock(ADDRESS), ThreadPoolExecutor(1) as pool:

        def second() -> None:
            with store.lock(ADDRESS):
                pass

        with pytest.raises(PartitionBusy, match=f"process {os.getpid()} "):
            pool.submit(second).result(PATIENCE_S)


def test_an_error_inside_lets_the_lock_go_and_leaves_no_file(store: Store) -> None:
    with pytest.raises(RuntimeError), store.lock(ADDRESS):
        raise RuntimeError
    with store.lock(ADDRESS):
        pass
    assert list((store.root / ".locks").iterdir()) == []


def test_under_contention_no_two_are_ever_inside_although_the_lock_file_comes_and_goes(store: Store) -> None:
    threads, rounds = 4, 25
    inside: list[int] = []
    overlaps = 0
    start = threading.Barrier(threads)

    def work(me: int) -> None:
        nonlocal overlaps
        start.wait(PATIENCE_S)
        for _ in range(rounds):
            with store.lock(ADDRESS, wait_s=PATIENCE_S):
                inside.append(me)
                overlaps += len(inside) != 1
                inside.remove(me)

    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(work, me) for me in range(threads)]:
            done.result(PATIENCE_S)
    assert overlaps == 0
    assert list((store.root / ".locks").iterdir()) == []

"""Many callers of every kind at once, and what a signal does to one that waits."""

import asyncio
import contextlib
import gc
import random
import signal
import subprocess
import sys
import textwrap
import threading
import weakref
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from inference.batching import BatchScheduler
from inference.errors import QueueFull, ServerClosed
from tests.inference.batching.patience import PATIENCE_S

if TYPE_CHECKING:
    from tests.inference.batching.conftest import FakeModel, StartScheduler

CALLS, THREADS, LOOPS, CANCELLED = 10_000, 64, 4, 0.3


class Herd:
    """Callers that submit their own numbers in order, cancel some at random and check every answer."""

    def __init__(self, scheduler: BatchScheduler[int, str]) -> None:
        self.scheduler = scheduler
        self.together = threading.Barrier(THREADS + LOOPS)
        self.futures: weakref.WeakSet[Future[str]] = weakref.WeakSet()
        self.kept = self.cancelled = 0
        self._lock = threading.Lock()

    def run(self) -> None:
        callers = THREADS + LOOPS
        share = [CALLS // callers + (n < CALLS % callers) for n in range(callers)]
        with ThreadPoolExecutor(callers) as pool:
            list(pool.map(self._call, range(callers), share))

    def _call(self, caller: int, calls: int) -> None:
        self.together.wait(PATIENCE_S)
        (self._from_thread if caller < THREADS else self._from_loop)(caller, calls)

    def _submit(self, number: int, dice: random.Random) -> Future[str]:
        future = self.scheduler.submit(number)
        with self._lock:
            self.futures.add(future)
        if dice.random() < CANCELLED:
            future.cancel()
        return future

    def _from_thread(self, caller: int, calls: int) -> None:
        dice = random.Random(caller)  # noqa: S311 - not a secret
        numbers = range(caller * CALLS, caller * CALLS + calls)
        futures = [self._submit(number, dice) for number in numbers]
        for number, future in zip(numbers, futures, strict=True):
            try:
                assert future.result(PATIENCE_S) == f"r{number}"
            except CancelledError:
                self._count(kept=False)
            else:
                self._count(kept=True)

    def _from_loop(self, caller: int, calls: int) -> None:
        async def ask() -> None:
            dice = random.Random(caller)  # noqa: S311 - not a secret
            numbers = range(caller * CALLS, caller * CALLS + calls)
            waiting = [asyncio.wrap_future(self._submit(number, dice)) for number in numbers]
            answers = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), PATIENCE_S)
            for number, answer in zip(numbers, answers, strict=True):
                assert isinstance(answer, asyncio.CancelledError) or answer == f"r{number}"
                self._count(kept=not isinstance(answer, asyncio.CancelledError))

        asyncio.run(ask())

    def _count(self, *, kept: bool) -> None:
        with self._lock:
            self.kept += kept
            self.cancelled += not kept


@pytest.mark.parametrize("queued", [500, 20_000])
def test_s4_s28_a_herd_of_ten_thousand_is_answered_in_order_and_leaves_nothing_behind(
    start: "StartScheduler", model: "FakeModel", queued: int
) -> None:
    before = set(threading.enumerate())
    scheduler = start(max_batch_size=64, max_wait_s=0.001, max_queued_items=queued)
    herd = Herd(scheduler)
    herd.run()
    books = scheduler.statistics()
    assert (books.accepted, books.completed, books.cancelled) == (CALLS, herd.kept, herd.cancelled)
    assert herd.cancelled > CALLS * CANCELLED / 3
    assert (books.queued, books.queued_bytes, books.running, books.waiting, books.lanes) == (0, 0, 0, 0, 0)
    assert len(model.seen) == len(set(model.seen)) == herd.kept
    for caller in range(THREADS + LOOPS):
        mine = [number for number in model.seen if number // CALLS == caller]
        assert mine == sorted(mine)
    assert scheduler.submit(7).result(PATIENCE_S) == "r7"
    scheduler.close()
    assert set(threading.enumerate()) <= before
    gc.collect()
    assert len(herd.futures) == 0


def test_s28_chaos_of_cancels_deadlines_and_failures_ends_with_one_good_request(
    start: "StartScheduler", model: "FakeModel"
) -> None:
    scheduler = start(max_batch_size=8, max_wait_s=0.0005, max_queued_items=64, lane=lambda sample, _: sample % 3)

    def react(samples: list[int]) -> list[str]:
        if any(sample % 50 == 0 for sample in samples):
            raise ValueError
        if len(samples) > 6 and samples[0] % 3 == 1:
            raise MemoryError
        return [f"r{sample}" for sample in samples]

    model.react = react

    def call(seed: int) -> None:
        dice = random.Random(seed)  # noqa: S311 - not a secret
        futures = []
        for n in range(1, 200):
            start_s, answer_s = dice.choice([None, 0.0, 0.01]), dice.choice([None, 0.02])
            with contextlib.suppress(QueueFull):  # the deadline bounds the wait for room too
                futures.append(scheduler.submit(seed * 1000 + n, deadline_s=start_s, call_deadline_s=answer_s))
            if futures and dice.random() < CANCELLED:
                dice.choice(futures).cancel()
        for future in futures:
            with contextlib.suppress(CancelledError):
                future.exception(PATIENCE_S)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(call, range(8)))
    assert scheduler.submit(7).result(PATIENCE_S) == "r7"
    books = scheduler.statistics()
    assert books.accepted + books.refused == 8 * 199 + 1
    assert books.accepted == books.completed + books.cancelled + books.expired + sum(books.failed.values())
    assert (books.queued, books.running, books.waiting) == (0, 0, 0)
    assert books.expired > 0


def test_s19_loops_that_close_with_futures_pending_harm_nobody(start: "StartScheduler", model: "FakeModel") -> None:
    scheduler = start(max_batch_size=4)
    model.occupy(scheduler)
    for n in range(20):
        loop = asyncio.new_event_loop()
        asyncio.wrap_future(scheduler.submit(n), loop=loop)
        loop.close()
    beside = [scheduler.submit(100 + n) for n in range(20)]
    model.release()
    assert [future.result(PATIENCE_S) for future in beside] == [f"r{100 + n}" for n in range(20)]
    assert scheduler.statistics().completed == 41


def test_s18_a_thousand_races_of_submit_and_close_all_end_cleanly() -> None:
    with ThreadPoolExecutor(3) as pool:
        for _ in range(1000):
            scheduler = BatchScheduler[int, int](lambda samples, _: list(samples), max_wait_s=0.0001)

            def submit(scheduler: BatchScheduler[int, int] = scheduler) -> bool:
                try:
                    return scheduler.submit(1).result(PATIENCE_S) == 1
                except ServerClosed:
                    return True

            answered = pool.submit(submit)
            closing = [pool.submit(scheduler.close) for _ in range(2)]
            assert answered.result(PATIENCE_S)
            for future in closing:
                future.result(PATIENCE_S)
            books = scheduler.statistics()
            assert books.accepted == books.completed + sum(books.failed.values())
            assert not scheduler._batch_thread.is_alive()
            assert not scheduler._watch_thread.is_alive()


@pytest.mark.parametrize(
    ("sent", "code"),
    [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, 128 + signal.SIGTERM)],
    ids=["SIGINT", "SIGTERM"],
)
def test_s18_a_signal_interrupts_a_waiting_caller_drains_and_sets_the_exit_code(
    sent: signal.Signals, code: int
) -> None:
    script = """
        import signal, sys, threading
        from inference.batching import BatchScheduler

        def forward(samples, modes):
            print("running", flush=True)
            gate.wait(0.5)
            return samples

        gate = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        with BatchScheduler(forward, max_wait_s=0, max_batch_size=1) as scheduler:
            futures = [scheduler.submit(n) for n in range(3)]
            try:
                while True:
                    never.result() if (never := scheduler.submit(9, deadline_s=1000)) else None
            finally:
                scheduler.close()
                print("drained", [future.result(0) for future in futures], flush=True)
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "running\n"
        process.send_signal(sent)
        printed = process.stdout.read()
        assert process.wait(PATIENCE_S) == code
    assert printed.splitlines()[-1] == "drained [0, 1, 2]"

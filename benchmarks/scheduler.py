"""What the batch scheduler itself costs: `python -m benchmarks.scheduler`.

The model is free, so all time is the scheduler's, the caller's future and Python's switching of threads.
"""

import asyncio
import gc
import random
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from benchmarks._bench import machine, print_table, write_json
from inference.batching import BatchScheduler

IN_FLIGHT = 256
HERD, HERD_THREADS, HERD_LOOPS, CANCELLED = 10_000, 64, 4, 0.3
REPEATS = 5


def measure() -> dict[str, object]:
    """Microseconds per item for three kinds of callers, and what a herd of 10,000 takes and leaves behind.

    Each kind is measured by the clock and by the processor time of this process, which other load does not add to.
    """
    numbers: dict[str, object] = {}
    for name, items, run in (
        ("one_submitter", 20_000, _one_submitter),
        ("threads", 40 * IN_FLIGHT, _threads),
        ("coroutines", 40 * IN_FLIGHT, _coroutines),
    ):
        found = [_per_item_us(items, run) for _ in range(1 + REPEATS)][1:]
        numbers[f"{name}_us"], numbers[f"{name}_cpu_us"] = map(statistics.median, zip(*found, strict=True))
    return numbers | _herd()


def main() -> None:
    about = machine("numpy")
    numbers = measure()
    targets = {"one_submitter_us": "below 60", "threads_us": "below 150", "coroutines_us": "below 150"}
    targets |= {"herd_threads_left": "0", "herd_futures_left": "0"}
    rows = [(name, value, targets.get(name, "")) for name, value in numbers.items()]
    print_table(f"scheduler, {IN_FLIGHT} in flight, median of {REPEATS}", rows, about)
    print("written to", write_json("scheduler", {"machine": about, **numbers}))


def _echo(samples: Sequence[int], _modes: Sequence[str]) -> list[int]:
    return list(samples)


def _per_item_us(items: int, run: Callable[[BatchScheduler[int, int], int], None]) -> tuple[float, float]:
    """Elapsed and processor time."""
    with BatchScheduler[int, int](_echo, max_batch_size=64, max_wait_s=0.01) as scheduler:
        scheduler.submit(0).result()
        started_at, used = time.perf_counter(), time.process_time()
        run(scheduler, items)
        elapsed, used = time.perf_counter() - started_at, time.process_time() - used
        return elapsed / items * 1e6, used / items * 1e6


def _one_submitter(scheduler: BatchScheduler[int, int], items: int) -> None:
    flying: deque[Future[int]] = deque()
    for n in range(items):
        if len(flying) == IN_FLIGHT:
            flying.popleft().result()
        flying.append(scheduler.submit(n))
    scheduler.flush()
    for future in flying:
        future.result()


def _threads(scheduler: BatchScheduler[int, int], items: int) -> None:
    def call(_: int) -> None:
        for n in range(items // IN_FLIGHT):
            scheduler.submit(n).result()

    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        list(pool.map(call, range(IN_FLIGHT)))


def _coroutines(scheduler: BatchScheduler[int, int], items: int) -> None:
    async def call() -> None:
        for n in range(items // IN_FLIGHT):
            await asyncio.wrap_future(scheduler.submit(n))

    async def everyone() -> None:
        await asyncio.gather(*(call() for _ in range(IN_FLIGHT)))

    asyncio.run(everyone())


def _herd() -> dict[str, object]:
    """10,000 callers at once from 64 threads and 4 event loops; three in ten change their mind."""
    before = set(threading.enumerate())
    scheduler = BatchScheduler[int, int](_echo, max_batch_size=64, max_wait_s=0.001, max_queued_items=1000)
    each = HERD // (HERD_THREADS + HERD_LOOPS)
    extra = HERD - each * (HERD_THREADS + HERD_LOOPS)
    together = threading.Barrier(HERD_THREADS + HERD_LOOPS)

    def from_thread(seed: int) -> None:
        dice = random.Random(seed)  # noqa: S311 - not a secret
        together.wait()
        kept = []
        for n in range(each + (extra if seed == 0 else 0)):
            future = scheduler.submit(n)
            if dice.random() >= CANCELLED or not future.cancel():
                kept.append(future)
        for future in kept:
            future.result()

    async def from_loop(seed: int) -> None:
        dice = random.Random(seed)  # noqa: S311 - not a secret
        futures = []
        for n in range(each):
            futures.append(asyncio.wrap_future(scheduler.submit(n)))
            if dice.random() < CANCELLED:
                futures[-1].cancel()
        await asyncio.gather(*futures, return_exceptions=True)

    def loop(seed: int) -> None:
        together.wait()
        asyncio.run(from_loop(seed))

    started_at = time.perf_counter()
    with ThreadPoolExecutor(HERD_THREADS + HERD_LOOPS) as pool:
        callers = [pool.submit(from_thread, n) for n in range(HERD_THREADS)]
        callers += [pool.submit(loop, HERD_THREADS + n) for n in range(HERD_LOOPS)]
        for caller in callers:
            caller.result()
    took = time.perf_counter() - started_at
    del callers, caller
    scheduler.close()
    books = scheduler.statistics()
    gc.collect()
    return {
        "herd_s": took,
        "herd_completed": books.completed,
        "herd_cancelled": books.cancelled,
        "herd_threads_left": len(set(threading.enumerate()) - before),
        "herd_futures_left": sum(type(found).__name__ == "ItemFuture" for found in gc.get_objects()),
    }


if __name__ == "__main__":
    main()

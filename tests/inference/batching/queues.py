"""Short forms for tests of the pure core."""

import math
from collections.abc import Hashable
from concurrent.futures import Future

from inference.batching import SchedulerState, SchedulerStatistics
from inference.batching._queue import Batch, BatchQueue, Item

Queue = BatchQueue[int, str]


def make_queue(
    *,
    max_batch_size: int = 4,
    max_wait_s: float = 10.0,
    max_items: int = 1000,
    max_bytes: int = 1000,
    lane_share: float = 1.0,
) -> Queue:
    return BatchQueue(
        max_batch_size=max_batch_size,
        max_wait_s=max_wait_s,
        max_items=max_items,
        max_bytes=max_bytes,
        lane_share=lane_share,
    )


def push(
    queue: Queue,
    sample: int,
    now: float,
    *,
    lane: Hashable = "A",
    nbytes: int = 1,
    deadline_at: float = math.inf,
    answer_by: float = math.inf,
) -> Item[int, str]:
    times = {"now": now, "start_by": deadline_at, "answer_by": answer_by}
    return queue.push(sample, "embedding", Future(), lane=lane, nbytes=nbytes, **times)


def cut(queue: Queue, now: float) -> list[int]:
    batch = queue.cut(now)
    assert isinstance(batch, Batch)
    return [item.sample for item in batch.items]


def books(queue: Queue, now: float = 0.0) -> SchedulerStatistics:
    return queue.statistics(now, state=SchedulerState.OPEN, waiting=0, forward_calls=0, forward_s=0.0)

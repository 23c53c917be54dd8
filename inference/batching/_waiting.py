"""Waiting: threads that sleep until a moment, and submitters that wait for room. The scheduler's lock is held."""

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

from inference.batching._queue import BatchQueue


class Alarm:
    """Lets one thread sleep until a moment, which others may bring forward.

    Waking a thread costs more than an item does, so it is woken only when it would sleep too long.
    """

    def __init__(self, lock: threading.Lock, clock: Callable[[], float]) -> None:
        self._moved = threading.Condition(lock)
        self._clock = clock
        self._sleeps_until = -math.inf

    def sleep_until(self, at: float) -> None:
        """Returns at `at`, when brought forward, or early for no reason."""
        wait_s = at - self._clock()
        if wait_s > 0:
            self._sleeps_until = at
            self._moved.wait(min(wait_s, threading.TIMEOUT_MAX))
            self._sleeps_until = -math.inf

    def bring_forward(self, at: float = -math.inf) -> None:
        """Wakes the sleeper if it would sleep beyond `at`."""
        if at < self._sleeps_until:
            self._sleeps_until = -math.inf
            self._moved.notify()


class _Turn:
    """One submitter who waits."""

    def __init__(self, lock: threading.Lock, lane: Hashable, nbytes: int, number: int) -> None:
        self.called = threading.Condition(lock)
        self.lane = lane
        self.nbytes = nbytes
        self.number = number


class Line:
    """Submitters who wait for room: first come first served within a lane.

    Of the lanes that may take more, the one with the fewest queued items comes next, so a flood of submitters for
    one lane does not hold back another lane; and whoever comes next is not overtaken by smaller samples.
    """

    def __init__(self, lock: threading.Lock, queue: "BatchQueue[Any, Any]") -> None:
        self._lock = lock
        self._queue = queue
        self._lanes: dict[Hashable, OrderedDict[int, _Turn]] = {}
        self._came = 0
        self._waiting = 0

    def __len__(self) -> int:
        return self._waiting

    def may_pass(self, lane: Hashable, nbytes: int) -> bool:
        """Whether a newcomer finds room and nobody who comes before them."""
        if not self._queue.has_room(lane, nbytes):
            return False
        return not self._waiting or (lane not in self._lanes and self._next() is None)

    def wait(self, lane: Hashable, nbytes: int, wait_s: float, give_up: Callable[[], bool]) -> bool:
        """Waits for a turn with room; True also when `give_up` says so, False when the time is over."""
        turn = _Turn(self._lock, lane, nbytes, self._came)
        self._came += 1
        self._waiting += 1
        mine = self._lanes.setdefault(lane, OrderedDict())
        mine[turn.number] = turn
        try:
            return turn.called.wait_for(
                lambda: give_up() or (self._next() is turn and self._queue.has_room(lane, nbytes)), wait_s
            )
        finally:
            self._waiting -= 1
            del mine[turn.number]
            if not mine:
                del self._lanes[lane]

    def call_next(self) -> None:
        """Wakes whoever comes next, if there is room now."""
        if self._waiting and (turn := self._next()) is not None and self._queue.has_room(turn.lane, turn.nbytes):
            turn.called.notify()

    def send_away(self) -> None:
        """Wakes everybody."""
        for lane in self._lanes.values():
            for turn in lane.values():
                turn.called.notify()

    def _next(self) -> _Turn | None:
        """Nobody, where every lane that has someone waiting holds its share already."""
        first = [next(iter(turns.values())) for turns in self._lanes.values()]
        able = [turn for turn in first if self._queue.lane_has_room(turn.lane, turn.nbytes)]
        return min(able, key=lambda turn: (self._queue.lane_length(turn.lane), turn.number), default=None)

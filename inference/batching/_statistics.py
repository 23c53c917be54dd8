"""What a scheduler says about itself."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from enum import Enum


class SchedulerState(Enum):
    """Whether new work is taken, and why not."""

    OPEN = "open"
    CLOSED = "closed"
    BROKEN = "broken"


@dataclass(frozen=True)
class SchedulerStatistics:
    """A scheduler's counters and gauges at one moment.

    `accepted = completed + sum(failed) + cancelled + expired + queued + running`, always.

    Attributes:
        state: `OPEN`, or why nothing is accepted any more.
        waiting: submitters blocked for want of room.
        refused: submissions that raised; never part of `accepted`.
        failed: items answered with an error, by its code.
        expired: items whose queue or call deadline passed before their answer.
        expired_running: those of them that had left the queue already.
        wasted: results computed that no caller received.
        oldest_age_s: how long the oldest queued item has waited.
        batches: batches cut, with at least one item; `batch_sizes` counts them by size.
        forward_calls: calls of the model, repetitions after a failure included.
        forward_s: seconds spent inside those calls.
        batch_limits: lower limits learnt from running out of memory, by lane; one doubles after 64 batches that fit.
    """

    state: SchedulerState
    waiting: int
    accepted: int
    refused: int
    completed: int
    failed: Mapping[str, int]
    cancelled: int
    expired: int
    expired_running: int
    wasted: int
    queued: int
    queued_bytes: int
    running: int
    lanes: int
    oldest_age_s: float
    batches: int
    batch_sizes: Mapping[int, int]
    forward_calls: int
    forward_s: float
    batch_limits: Mapping[Hashable, int]

    @property
    def accepting(self) -> bool:
        """False once closed or broken."""
        return self.state is SchedulerState.OPEN

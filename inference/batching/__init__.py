"""Batching: samples of many callers in, one forward pass at a time."""

from inference.batching._failure import FailureKind, classify_failure
from inference.batching._queue import too_late
from inference.batching._statistics import SchedulerState, SchedulerStatistics
from inference.batching.scheduler import BatchScheduler

__all__ = ["BatchScheduler", "FailureKind", "SchedulerState", "SchedulerStatistics", "classify_failure", "too_late"]

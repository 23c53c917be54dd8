"""Batching: samples of many callers in, one forward pass at a time."""

from inference.batching._forward import FailureKind, classify_failure
from inference.batching._queue import SchedulerStatistics
from inference.batching.scheduler import BatchScheduler

__all__ = ["BatchScheduler", "FailureKind", "SchedulerStatistics", "classify_failure"]

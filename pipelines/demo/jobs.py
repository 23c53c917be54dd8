"""Dagster jobs run in this process, and what to tell of one that failed."""

from dataclasses import dataclass, field

import dagster as dg
from dagster_shared.error import SerializableErrorInfo

from inference.interrupts import StopRequest
from pipelines.batching import FAILED_SLIDES
from pipelines.definitions import build_definitions
from pipelines.demo.console import plain_console


@dataclass(frozen=True)
class Ended:
    """How a job went.

    Attributes:
        reason: why it failed, in one line; None where it did not.
        slides: code by slide that has no full result.
    """

    reason: str | None = None
    slides: dict[str, str] = field(default_factory=dict)


class Jobs:
    """The pipeline's jobs on one instance, each of which can be interrupted."""

    def __init__(self, instance: dg.DagsterInstance, stop: StopRequest) -> None:
        self._instance, self._stop = instance, stop
        # Dagster puts its own signal handlers around each step: a second signal would cut its cleaning up short.
        self._definitions = build_definitions(loggers={"plain": plain_console}, around=stop.handled)

    def execute(self, job: str, tags: dict[str, str] | None = None) -> Ended:
        """Run one job to its end.

        Raises:
            Interrupted: meanwhile the process was asked to stop.
        """
        result = self._definitions.resolve_job_def(job).execute_in_process(
            instance=self._instance, tags=tags, run_config={"loggers": {"plain": {}}}, raise_on_error=False
        )
        self._stop.check()
        if result.success:
            return Ended()
        failed = next((event for event in result.all_events if event.is_step_failure), None)
        return _why(failed) if failed is not None else Ended(_run_failure(result))


def _why(failed: dg.DagsterEvent) -> Ended:
    told = failed.step_failure_data.user_failure_data
    if told is None or told.description is None:
        return Ended(_bottom(failed.step_failure_data.error))
    table = told.metadata.get(FAILED_SLIDES)
    records = table.records if isinstance(table, dg.TableMetadataValue) else []
    return Ended(told.description, {str(r.data["slide"]): str(r.data["code"]) for r in records})


def _run_failure(result: dg.ExecuteInProcessResult) -> str:
    """Why a run failed before its step began."""
    failed = next((event for event in result.all_events if event.is_job_failure), None)
    return _bottom(failed.job_failure_data.error if failed is not None else None)


def _bottom(error: SerializableErrorInfo | None) -> str:
    """What is at the bottom of Dagster's wrapping, in one line."""
    while error is not None and error.cause is not None:
        error = error.cause
    return " ".join(error.message.split()) if error is not None else "the run failed; look at it in the Dagster UI"

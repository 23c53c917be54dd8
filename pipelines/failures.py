"""What Dagster is told of an error: what happened and what to do, never the exceptions beneath it.

Dagster writes the text of an exception, of its causes and of its context into the event log, and the text of an
operating system's error holds a path. A slide's path may be secret, so nothing but our own messages gets through.
"""

import logging
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import dagster as dg

from inference.errors import InferenceError
from inference.slides.keys import key_secret

log = logging.getLogger(__name__)

Around = Callable[[], AbstractContextManager[object]]
"""What a caller puts around every step."""


@contextmanager
def told_plainly() -> Iterator[None]:
    """Around a step: an error of ours becomes its message alone; under a secret any other one tells only its kind.

    Raises:
        dagster.Failure: retried only if a retry can help.
    """
    try:
        yield
    except InferenceError as error:
        raise dg.Failure(error.message, allow_retries=error.retryable) from None
    except dg.Failure:
        raise
    except Exception as error:
        if key_secret() is None:
            raise
        raise dg.Failure(unforeseen(error), allow_retries=False) from None


def unforeseen(error: Exception) -> str:
    """A line on an error that nobody foresaw, which is logged with where it happened; its text may name files."""
    kind = type(error).__name__
    log.error("unexpected %s\n%s", kind, "".join(traceback.format_tb(error.__traceback__)))
    return f"unexpected {kind}; please report it with the log"

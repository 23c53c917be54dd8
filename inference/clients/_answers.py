"""What the clients share: the answers of an explicit batch."""

from collections.abc import Sequence

from inference.errors import BatchError, Broken, InferenceError


def all_or_error(answers: Sequence[str | InferenceError]) -> list[str]:
    """Every answer of a batch.

    Raises:
        BatchError: some failed; it holds the answers there are and the errors of the others, in order.
        Broken: there is not one answer, for the model is broken.
    """
    errors = [answer for answer in answers if isinstance(answer, InferenceError)]
    if errors and len(errors) == len(answers) and all(isinstance(error, Broken) for error in errors):
        raise errors[0]
    if errors:
        first = f"the first: {errors[0].code}: {errors[0].message}"
        raise BatchError(f"{len(errors)} of {len(answers)} items failed; {first}", results=list(answers))
    return [answer for answer in answers if isinstance(answer, str)]

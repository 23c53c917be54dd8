"""The future a caller holds for one sample."""

from collections.abc import Callable
from concurrent.futures import Future

from inference.batching._queue import R


class ItemFuture(Future[R]):
    """A future whose cancellation reaches the queue, and which is not waited for where nobody would answer it."""

    def __init__(self, withdraw: Callable[[int], None], check_may_wait: Callable[[], None]) -> None:
        super().__init__()
        self.order = -1  # no reference to the item: a future that is kept must not keep the sample
        self._withdraw = withdraw
        self._check_may_wait = check_may_wait

    def cancel(self) -> bool:
        cancelled = super().cancel()
        self._withdraw(self.order)
        return cancelled

    def result(self, timeout: float | None = None) -> R:
        if not self.done():
            self._check_may_wait()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        if not self.done():
            self._check_may_wait()
        return super().exception(timeout)

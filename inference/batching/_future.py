"""The future a caller holds for one sample."""

from collections.abc import Callable
from concurrent.futures import Future

from inference.batching._queue import R
from inference.errors import CallerError


class ItemFuture(Future[R]):
    """A future whose cancellation reaches the queue, and which the batch thread cannot wait for."""

    def __init__(self, withdraw: Callable[[int], None], on_batch_thread: Callable[[], bool]) -> None:
        super().__init__()
        self.order = -1  # no reference to the item: a future that is kept must not keep the sample
        self._withdraw = withdraw
        self._on_batch_thread = on_batch_thread

    def cancel(self) -> bool:
        cancelled = super().cancel()
        self._withdraw(self.order)
        return cancelled

    def result(self, timeout: float | None = None) -> R:
        if not self.done() and self._on_batch_thread():
            raise CallerError("the batch thread would wait for itself: use a callback, or wait on another thread")
        return super().result(timeout)

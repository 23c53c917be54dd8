"""Checks of a scheduler's settings."""

import threading
import warnings

from inference.errors import ConfigError


def check_whole_number(name: str, value: object, least: int = 1) -> None:
    """Raises `ConfigError` unless the value is an int of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name} is {value!r}: give a whole number, {least} or more", **{name: value})


def check_seconds(name: str, value: float, *, above_zero: bool = False) -> None:
    """Raises `ConfigError` unless the value is a time a thread can wait."""
    usable = isinstance(value, int | float) and 0 <= value <= threading.TIMEOUT_MAX and not (above_zero and value == 0)
    if not usable:
        raise ConfigError(
            f"{name} is {value}: give seconds, {'above 0' if above_zero else '0 or more'}", **{name: value}
        )


def check_share(name: str, value: float) -> None:
    """Raises `ConfigError` unless the value is above 0 and at most 1."""
    if not isinstance(value, int | float) or not 0 < value <= 1:
        raise ConfigError(f"{name} is {value}: give a share above 0, at most 1", **{name: value})


def warn_if_no_batch_can_fill(max_batch_size: int, lane_items: int, *, stacklevel: int) -> None:
    """Warns of a queue in which no lane can hold a batch: every batch would wait out `max_wait_s`."""
    if lane_items < max_batch_size:
        text = f"a lane holds {lane_items} items, max_batch_size={max_batch_size}: no batch can fill"
        warnings.warn(text, RuntimeWarning, stacklevel=stacklevel + 1)

"""Clients: interchangeable ways to ask a model. A remote one needs no torch, so each is imported when it is used."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from inference.clients.http import HttpClient
    from inference.clients.in_process import InProcessClient

__all__ = ["HttpClient", "InProcessClient"]

_HOMES = {"HttpClient": "inference.clients.http", "InProcessClient": "inference.clients.in_process"}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_HOMES[name]), name)

"""The HTTP service: models behind FastAPI. Its packages are loaded when a name of it is first used."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from inference.serving.app import create_app
    from inference.serving.settings import ServiceSettings, read_tokens

__all__ = ["ServiceSettings", "create_app", "read_tokens"]

_HOMES = {
    "ServiceSettings": "inference.serving.settings",
    "create_app": "inference.serving.app",
    "read_tokens": "inference.serving.settings",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_HOMES[name]), name)

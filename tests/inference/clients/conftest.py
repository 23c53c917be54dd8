"""The doubles of the clients' tests."""

from tests.inference.clients.doubles import body, loaded, runtime, serve, server, start

__all__ = ["body", "loaded", "runtime", "serve", "server", "start"]

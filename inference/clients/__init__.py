"""Clients: interchangeable ways to ask a model."""

from inference.clients.in_process import InProcessClient

__all__ = ["InProcessClient"]

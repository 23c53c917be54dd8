"""What crosses a process boundary: requests, responses, metadata, and the client that speaks them."""

from inference.contract.client import Client
from inference.contract.messages import (
    Lineage,
    ModelMetadata,
    ModelRequest,
    ModelResponse,
    OutputSpec,
    model_name_of,
    parse_request,
)
from inference.contract.validation import explain

__all__ = [
    "Client",
    "Lineage",
    "ModelMetadata",
    "ModelRequest",
    "ModelResponse",
    "OutputSpec",
    "explain",
    "model_name_of",
    "parse_request",
]

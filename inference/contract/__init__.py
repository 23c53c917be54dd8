"""What crosses a process boundary: requests, responses, metadata, and the client that speaks them."""

from inference.contract.client import Client
from inference.contract.messages import ModelMetadata, ModelRequest, ModelResponse, OutputSpec, parse_request
from inference.contract.validation import explain

__all__ = ["Client", "ModelMetadata", "ModelRequest", "ModelResponse", "OutputSpec", "explain", "parse_request"]

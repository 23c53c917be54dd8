"""The package's own names: all of them there, and torch only when something runs."""

import subprocess
import sys

import pytest

import inference
from inference import errors
from inference.errors import InferenceError

WITHOUT_TORCH = """
import sys, inference
assert "torch" not in sys.modules, "import inference"
for name in ("Checkpoint", "Client", "ModelRequest", "ModelSpec", "Settings", "SlideOutcome", "Store", "run_slide"):
    getattr(inference, name)
inference.load_model_spec("demo")
assert "torch" not in sys.modules, name
assert "dagster" not in sys.modules
inference.BaseServerModel
assert "torch" in sys.modules
"""


def test_the_names_are_sorted_and_each_is_found_once() -> None:
    assert inference.__all__ == sorted(set(inference.__all__))


@pytest.mark.parametrize("name", inference.__all__)
def test_a_public_name_leads_to_what_bears_it(name: str) -> None:
    found = getattr(inference, name)
    assert found.__name__ == name
    assert found.__module__.startswith("inference.")


def test_every_error_class_is_a_public_name() -> None:
    classes = {c.__name__ for c in vars(errors).values() if isinstance(c, type) and issubclass(c, InferenceError)}
    assert classes <= set(inference.__all__)
    from inference import _ForwardError

    assert _ForwardError is inference.ForwardError, "the name in the original contract"


def test_an_unknown_name_is_an_attribute_error_that_says_so() -> None:
    with pytest.raises(AttributeError, match="'inference' has no attribute 'run_slides'"):
        inference.run_slides  # type: ignore[attr-defined] # noqa: B018


def test_importing_the_package_and_reading_a_spec_loads_no_torch() -> None:
    found = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stderr


def test_the_listing_of_the_package_holds_its_public_names() -> None:
    assert set(inference.__all__) <= set(dir(inference))

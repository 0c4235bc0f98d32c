"""The contract of every store, unchanged, on a real API server."""

import inspect

import pytest

from tests.store import contract

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(180)]

for _name, _sentences in inspect.getmembers(contract, inspect.isclass):
    if _sentences.__module__ == contract.__name__:
        globals()[f"Test{_name}"] = type(f"Test{_name}", (_sentences,), {})

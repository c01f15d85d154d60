from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Compiled code is cached by function: without this, tests would use up each other's recompilations."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()

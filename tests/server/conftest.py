"""A rig a test, and factories for the tests that want limits or managers of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from server_rig import Rig


@pytest.fixture(autouse=True)
def forget_tracebacks(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Captured log records hold exceptions, those hold frames, and those the arena: not a leak of ours."""
    yield
    caplog.get_records("call").clear()


@pytest.fixture
def rig() -> Iterator[Rig]:
    with Rig() as rig:
        yield rig

"""What tests of the hooks share."""

import pytest


@pytest.fixture
def queue(monkeypatch):
    from memory_queue import MemoryQueue  # most of these tests need no TransferQueue

    return MemoryQueue(monkeypatch)

"""What tests of the hooks share."""

import asyncio

import pytest


@pytest.fixture
def event_loop():
    """For a reward manager, which takes the loop of its thread."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    yield loop
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
    asyncio.set_event_loop(None)


@pytest.fixture
def queue(monkeypatch):
    from memory_queue import MemoryQueue  # most of these tests need no TransferQueue

    return MemoryQueue(monkeypatch)

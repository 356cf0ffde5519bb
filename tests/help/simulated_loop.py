"""An event loop whose clock stands still while something can be done, and else jumps ahead."""

import asyncio
import selectors

TICK = 1e-6  # seconds, so that a timer is due in spite of rounding


class _Selector(selectors.DefaultSelector):
    now = 1000.0
    turns = 0

    def select(self, timeout=None):
        self.turns += 1
        events = super().select(0)
        if not events and timeout is None:
            raise AssertionError("nothing can go on: all wait for each other")
        if not events and timeout > 0:
            self.now += timeout + TICK
        return events


class SimulatedLoop(asyncio.SelectorEventLoop):
    def __init__(self):
        self.selector = _Selector()
        super().__init__(self.selector)

    def time(self):
        return self.selector.now


def simulate(coroutine):
    """Return the coroutine's result, and how often its event loop turned."""
    loop = SimulatedLoop()
    try:
        return loop.run_until_complete(coroutine), loop.selector.turns
    finally:
        loop.close()

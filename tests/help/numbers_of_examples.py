"""How many examples Hypothesis draws for a test.

A change of the code is tried on the same few each time, so that a test that fails was broken by
the change. `pytest --hypothesis-profile=weekly` draws many others each time it is run.
"""

from hypothesis import settings

settings.register_profile("usual", max_examples=30, deadline=None, derandomize=True, database=None)
settings.register_profile("weekly", max_examples=1000, deadline=None, database=None)
settings.load_profile("usual")


def draw(times):
    """A decorator: the test draws so many times as many examples as others."""
    return settings(max_examples=times * settings.default.max_examples)

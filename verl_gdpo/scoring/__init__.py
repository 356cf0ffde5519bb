"""From a response to named rewards: one function, a list of them, judges, limits and lengths.

Nothing here knows tensors, verl or a trainer.
"""

"""Instructions with constraints that a program can check: a reward for each kind of them."""

DATA_SOURCES = ("verl_gdpo/constraints",)

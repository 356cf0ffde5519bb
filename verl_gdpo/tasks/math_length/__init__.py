"""Mathematics with a limit of length."""

DATA_SOURCES = ("verl_gdpo/math_length",)

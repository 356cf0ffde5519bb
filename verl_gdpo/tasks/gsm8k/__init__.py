"""School mathematics: format, integer, correctness."""

DATA_SOURCES = ("verl_gdpo/gsm8k",)

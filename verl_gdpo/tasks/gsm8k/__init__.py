"""School mathematics: format, integer, correctness."""

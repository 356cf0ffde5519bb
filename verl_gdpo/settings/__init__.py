"""Reads and checks the settings under `algorithm.gdpo`, without verl."""

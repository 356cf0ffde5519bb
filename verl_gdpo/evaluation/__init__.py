"""Evaluates a trained policy: `verl-gdpo evaluate`. A benchmark is a file here with a `BENCHMARK`."""

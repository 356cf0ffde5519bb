"""Evaluates a trained policy: `verl-gdpo evaluate`. A file with a `BENCHMARK` is a benchmark."""

"""`python -m benchmarks`: verl-gdpo against named peers, as ratios measured in one run."""

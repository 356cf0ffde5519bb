"""`python -m benchmarks` compares verl-gdpo with named peers, and gives ratios from one run."""

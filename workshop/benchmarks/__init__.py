"""`python -m workshop.benchmarks` compares verl-gdpo with named peers; ratios are of one run."""

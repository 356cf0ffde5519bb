"""What measures and compares verl-gdpo: benchmarks, experiments, and a kit for GPUs."""

"""What its makers use: benchmarks, experiments, a kit for GPUs, and the policies of small runs."""

"""GDPO and its rivals in verl's trainer, on a CPU: `python -m workshop.experiments.trainer`."""

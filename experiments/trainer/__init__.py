"""GDPO and its rivals in verl's own trainer, without a GPU: `python -m experiments.trainer`."""

"""A map of when GDPO trains better than GRPO: `python -m workshop.experiments.map`."""

"""GDPO and its rivals in verl's trainer, on a CPU: what they earned, and its pictures."""

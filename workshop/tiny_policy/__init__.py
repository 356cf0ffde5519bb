"""Makes tiny policies for runs without a GPU: `python -m workshop.tiny_policy --help`."""

"""What GDPO would change for the rewards of a batch or a run; docs/advice.md describes it."""

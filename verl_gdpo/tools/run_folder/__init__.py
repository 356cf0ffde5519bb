"""Reads the folder that a run leaves: metrics, dumps, logs of trackers, and what they show."""

"""Starts a run, watches its processes, and reads the files that it leaves."""

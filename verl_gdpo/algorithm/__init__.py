"""From what scorers returned to advantages and metrics; no verl, no task, no file."""

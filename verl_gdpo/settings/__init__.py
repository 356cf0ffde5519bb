"""`algorithm.gdpo.*`: what a user may set, read and checked; no tensors, no verl."""

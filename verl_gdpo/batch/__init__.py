"""The samples of one step, without verl: rows, reward matrix, advantages and metrics."""

"""One step's samples, without verl: rows, the matrix of rewards, the advantage of each, metrics."""

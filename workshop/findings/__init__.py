"""How often the findings about a run are right: made metrics with labels, and rates on them."""

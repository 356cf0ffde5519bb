"""Programs: public tests decide."""

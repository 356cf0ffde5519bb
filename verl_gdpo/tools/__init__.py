"""The subcommands of `verl-gdpo`: data, recipes, check, summary, replay and report."""

"""What makers of this package use: it is in a checkout, and no part of what is installed."""

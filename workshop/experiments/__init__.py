"""Experiments that anyone can rerun with one command each; they are no part of the package."""

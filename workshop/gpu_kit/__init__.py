"""Takes verl-gdpo to a machine with a GPU and without a network, and measures it there.

pack.py -> pieces.py -> install.py -> run.py, whose stages are in stages.py; see README.md.
"""

"""Prints which names of verl our parts rely on, and which of them the installed verl lacks."""

import verl
from verl_gdpo.hooks.relied_on import RELIED_ON, missing

print(f"verl {verl.__version__}, {verl.__file__}")
for ours, symbols in RELIED_ON.items():
    lacking = missing(symbols)
    print(f"verl_hooks/{ours}.py: {len(symbols) - len(lacking)} of {len(symbols)} remain")
    for symbol in symbols:
        print("   missing" if symbol in lacking else "          ", symbol)

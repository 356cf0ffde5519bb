"""Prints which names of verl we extend or call, and which of them the installed verl lacks."""

import verl

from verl_gdpo.plugin import CALLED_BY_TOOLS, EXTENSIONS

print(f"verl {verl.__version__}, {verl.__file__}")
for extension in (*EXTENSIONS, *CALLED_BY_TOOLS):
    print("missing" if extension.is_missing() else "       ", extension.symbol)

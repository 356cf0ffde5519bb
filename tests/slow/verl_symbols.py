"""Prints whether this verl was tested, and which names of verl we extend or call it lacks.

Of each function, it prints the parameters that no tested verl has.
"""

import verl

from verl_gdpo import TESTED_VERL
from verl_gdpo.hooks.refusal import is_tested
from verl_gdpo.plugin import CALLED_BY_TOOLS, EXTENSIONS
from verl_gdpo.tools.run import plugin as run_plugin

verdict = "in" if is_tested() else "NOT in"
print(f"verl {verl.__version__}, {verl.__file__}: {verdict} TESTED_VERL, {', '.join(TESTED_VERL)}")
for extension in (*EXTENSIONS, *run_plugin.EXTENSIONS, *CALLED_BY_TOOLS):
    unknown = ", ".join(extension.unknown_parameters())
    more = f", which also needs {unknown}" if unknown else ""
    print("missing" if extension.is_missing() else "       ", extension.symbol + more)

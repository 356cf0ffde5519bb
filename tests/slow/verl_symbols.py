"""Prints whether this verl is too new, and which names of verl we extend or call it lacks."""

import verl
from packaging.specifiers import SpecifierSet

from verl_gdpo import SUPPORTED_VERL
from verl_gdpo.plugin import CALLED_BY_TOOLS, EXTENSIONS
from verl_gdpo.tools.run import plugin as run_plugin

supported = SpecifierSet(SUPPORTED_VERL).contains(verl.__version__, prereleases=True)
verdict = "in" if supported else "NEWER than what is in"  # an older one loads no table
print(f"verl {verl.__version__}, {verl.__file__}: {verdict} SUPPORTED_VERL, {SUPPORTED_VERL}")
for extension in (*EXTENSIONS, *run_plugin.EXTENSIONS, *CALLED_BY_TOOLS):
    print("missing" if extension.is_missing() else "       ", extension.symbol)

"""The modules that touch verl.

Importing one of them may change verl, so this file imports none. It refuses other versions of verl
for all of them.
"""

import verl
from packaging.specifiers import SpecifierSet

from verl_gdpo import SUPPORTED_VERL

if not SpecifierSet(SUPPORTED_VERL).contains(verl.__version__, prereleases=True):
    raise ImportError(f"verl {verl.__version__} is not supported; supported: verl{SUPPORTED_VERL}")

"""The modules that touch verl.

Importing one of them may change verl, so this file imports none. It refuses older versions of verl
for all of them.
"""

import verl
from packaging.specifiers import SpecifierSet

from verl_gdpo import REQUIRED_VERL, SUPPORTED_VERL

if not SpecifierSet(REQUIRED_VERL).contains(verl.__version__, prereleases=True):
    raise ImportError(f"verl {verl.__version__} is not supported; supported: verl{SUPPORTED_VERL}")

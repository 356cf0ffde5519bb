"""Asks verl's own code whether a run can work: what can be run without a model, a GPU or Ray.

Each module here asks about one part of a run. A question that verl answers with an error becomes a
problem that names the key. Where nothing of verl can be run, a rule stands in its place, and its
comment names the file and the symbol of verl 0.9.1 that it follows.
"""

from verl_gdpo.tools.check.asked.answers import Answers
from verl_gdpo.tools.check.asked.everything import ask_verl
from verl_gdpo.tools.check.asked.files import known_loops
from verl_gdpo.tools.check.asked.sampling import what_filters_lack

__all__ = ["Answers", "ask_verl", "known_loops", "what_filters_lack"]

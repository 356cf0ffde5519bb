"""GDPO (arXiv 2601.05242) for verl: several rewards, each normalised by itself.

Importing this package loads neither torch nor verl. verl loads `verl_gdpo.plugin`.
"""

from typing import TYPE_CHECKING

__version__ = "0.1.0"
REQUIRED_VERL = ">=0.9.dev0"  # older ones are refused; as in pyproject.toml
TESTED_VERL = ("0.9.0", "0.9.1")  # of all others, a run with gdpo looks for each name that it uses
__all__ = ["REQUIRED_VERL", "TESTED_VERL", "compute_gdpo_advantage"]

if TYPE_CHECKING:
    from verl_gdpo.algorithm.advantage import compute_gdpo_advantage


def __getattr__(name: str) -> object:
    if name == "compute_gdpo_advantage":
        try:
            from verl_gdpo.algorithm.advantage import compute_gdpo_advantage
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            raise ImportError(
                "verl_gdpo.compute_gdpo_advantage needs torch, which is not installed: "
                "pip install torch"
            ) from None
        return compute_gdpo_advantage
    raise AttributeError(f"module 'verl_gdpo' has no attribute {name!r}")

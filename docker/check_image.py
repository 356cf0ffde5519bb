"""Ends the build of docker/Dockerfile with 1 if the image is not what the recipes are made for.

It compares the versions with requirements/, looks at what `pip check` says of packages that a run
uses, and imports what a run imports.
"""

import importlib
import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# what the image brings, and has to be what this package was tried with
GIVEN = ("torch", "vllm", "flash-attn")
IMPORTED = (
    *("torch", "vllm", "flash_attn", "transformers", "ray", "transfer_queue", "scipy", "wrapt"),
    *("math_verify", "verl.trainer.main_ppo", "verl.trainer.ppo.v1", "verl_gdpo.plugin"),
)
# "a 1 has requirement b==1, but you have b 2.", or "a 1 requires b, which is not installed."
COMPLAINT = re.compile(r"^(\S+) \S+ (?:has requirement|requires) ([\w.-]+)")


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins() -> dict[str, set[str]]:
    """{package: its versions} of requirements/gpu.txt, and of flash-attn, which has no hash."""
    text = (ROOT / "requirements" / "gpu.txt").read_text()
    found: dict[str, set[str]] = {}
    for name, version in re.findall(r"^([\w.-]+)==([\w.]+)", text, re.M):
        found.setdefault(normal(name), set()).add(version)
    flash_attn = re.findall(r"flash-attn==([\d.]+)", (ROOT / "setup_env.sh").read_text())
    return {**found, "flash-attn": {*flash_attn}}


def unexpected(said: str, used: set[str]) -> Iterator[str]:
    """The complaints of `pip check` of these packages that docker/pip_check.txt does not list."""
    lines = (ROOT / "docker" / "pip_check.txt").read_text().splitlines()
    known = {tuple(line.split()[:2]) for line in lines if not line.startswith("#")}
    for line in said.splitlines():
        match = COMPLAINT.match(line)
        names = match and (normal(match[1]), normal(match[2]))
        if names and names[0] in used and names not in known:
            yield f"pip check: {line} If a run does without, list it in docker/pip_check.txt"


def main() -> int:
    """Print a line for each problem; return the exit code."""
    wanted, problems = pins(), []
    for name in GIVEN:
        version = importlib.metadata.version(name).partition("+")[0]
        if version not in wanted[name]:
            problems.append(f"{name} {version}: expected {wanted[name]}; choose another IMAGE")
    check = [sys.executable, "-m", "pip", "check"]
    said = subprocess.run(check, capture_output=True, text=True).stdout
    problems += unexpected(said, {*wanted, "verl-gdpo"})
    for name in IMPORTED:
        try:
            importlib.import_module(name)
        except Exception as error:  # of a library that was built for another one, in many classes
            problems.append(f"import {name}: {type(error).__name__}: {error}")
    problems += getattr(sys.modules.get("verl_gdpo.plugin"), "refusals", [])
    for problem in problems:
        print(f"check_image: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

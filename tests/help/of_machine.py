"""What tests need of the machine. Without it they are skipped, and CI counts that as a failure."""

import functools
import os
import shutil
import subprocess
from dataclasses import replace

import pytest

from verl_gdpo.tasks.sandbox import machine

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def confinement_of(name):
    """The sandbox of this name. "landlock 3" is the kind "landlock", with version 3 of Landlock."""
    name, _, version = name.partition(" ")
    kinds = machine.confinements(allow_weak=True)
    kind = next((kind for kind in kinds if kind.name == name), None)
    if kind is None or not _works(kind):
        not_here(f"{name} does not work on this machine. {machine.advice()}")
    return replace(kind, landlock=int(version)) if version else kind


@functools.cache
def _works(kind):
    """Bubblewrap may be there and have no rights, as in many a container."""
    if kind.name != "bubblewrap":
        return True
    bare = subprocess.run([kind.command[0], "--unshare-all", "--ro-bind", "/", "/", "true"])
    return bare.returncode == 0


def browser():
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    return found or not_here("no browser: apt-get install chromium, or put google-chrome on PATH")


def not_here(text):
    """End this test. CI=true is what GitHub sets, and others."""
    if os.environ.get("CI") == "true":
        pytest.fail(text)
    pytest.skip(text)

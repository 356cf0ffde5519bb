"""The image on top of verl's, which was never built: its pins, and the last step of a build."""

import importlib.metadata
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
from packaging.markers import Marker
from repository import REPO

sys.path.append(str(REPO / "docker"))
import check_image

DOCKERFILE = (REPO / "docker" / "Dockerfile").read_text()
PYTHON = {"python_version": "3.12", "python_full_version": "3.12.3"}  # of Ubuntu 24.04


def test_its_versions_are_those_of_the_environment_for_gpus():
    text = (REPO / "requirements" / "gpu.txt").read_text()
    pins = {
        name: version
        for name, version, marker in re.findall(r"^(\S+)==(\S+)(?: ; (.*?))? \\$", text, re.M)
        if not marker or Marker(marker).evaluate(PYTHON)
    }
    install = DOCKERFILE.split("RUN pip install --no-deps \\\n")[1].split("\nCOPY")[0]
    installed = dict(re.findall(r"^    (\S+)==(\S+)", install, re.M))
    assert len(installed) == len(install.splitlines())
    assert installed == {name: pins[name] for name in installed}
    # what is missing there, and what it has in another version
    assert {"verl", "transformers", "transferqueue", "numpy", "scipy", "wrapt"} <= {*installed}
    said = dict(re.findall(r"(torch|vLLM|flash-attn) ([\d.]+\d)", DOCKERFILE))
    assert {said["torch"]} == check_image.pins()["torch"]
    assert {said["vLLM"]} == check_image.pins()["vllm"]
    assert {said["flash-attn"]} == check_image.pins()["flash-attn"]


SAID = """\
torch 2.11.0 has requirement nvidia-nccl-cu13==2.28.9, but you have nvidia-nccl-cu13 2.30.4.
megatron-bridge 0.5.0 requires mlflow, which is not installed.
vllm 0.24.0 has requirement transformers>=5.5.3, but you have transformers 5.3.0.
TransferQueue 0.1.11 requires pyzmq, which is not installed.
"""


@pytest.fixture
def image(monkeypatch):
    """An image in which nothing is wrong; a test changes it."""
    found = SimpleNamespace(versions={"vllm": "0.24.0", "flash-attn": "2.8.3"}, said="")
    found.versions["torch"] = "2.11.0+cu130"
    monkeypatch.setattr(importlib.metadata, "version", lambda name: found.versions[name])
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=found.said))
    monkeypatch.setattr(check_image, "IMPORTED", ("wrapt",))
    return found


def test_an_image_as_it_should_be(image, capsys):
    """Megatron is not used, and verl replaces NCCL on purpose."""
    image.said = "\n".join(SAID.splitlines()[:2])
    assert check_image.main() == 0
    assert capsys.readouterr().err == ""


def test_another_image_is_named(image, monkeypatch, capsys):
    image.said, image.versions["torch"] = SAID, "2.12.0"
    monkeypatch.setattr(check_image, "IMPORTED", ("no_such_module",))
    assert check_image.main() == 1
    version, vllm, queue, imported = capsys.readouterr().err.splitlines()
    assert version == "check_image: torch 2.12.0: expected {'2.11.0'}; choose another IMAGE"
    assert "vllm 0.24.0 has requirement transformers>=5.5.3" in vllm and "pip_check.txt" in vllm
    assert "TransferQueue 0.1.11 requires pyzmq" in queue
    assert imported.startswith("check_image: import no_such_module: ModuleNotFoundError: ")


@pytest.mark.slow
def test_what_is_imported_can_be_without_a_gpu():
    """A build sees none; vllm and flash-attn are not in this environment."""
    names = [name for name in check_image.IMPORTED if name not in ("vllm", "flash_attn")]
    code = f"import importlib; [importlib.import_module(name) for name in {names}]"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)

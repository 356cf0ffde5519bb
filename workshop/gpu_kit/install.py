"""Makes an environment from the pieces, on the machine with the GPU: no network, no compiler.

    python3 workshop/gpu_kit/install.py PIECES FOLDER

The Python that runs it needs pip and torch. FOLDER gets `venv`, which sees that Python's packages
behind its own, and `data`: rows and a tiny policy. The last line printed is the new Python.
"""

import argparse
import json
import site
import subprocess
import sys
import venv
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from workshop.gpu_kit.pieces import join

# what the stages import first, and what is told of them
PROBE = """
import json, torch, verl, verl_gdpo, transformers, ray, tensordict, transfer_queue, datasets
from importlib.metadata import version
names = ("torch", "verl", "verl-gdpo", "transformers", "ray", "tensordict", "numpy", "pyarrow")
print(json.dumps({name: version(name) for name in names} | {"cuda": torch.cuda.is_available()}))
"""


def install(pieces: Path, folder: Path, levels: list[str]) -> dict[str, object]:
    """Join, unpack and install; returns the versions that the new environment sees.

    Raises:
        ValueError: a piece is missing or damaged, or this Python is not the one packed for.
        subprocess.CalledProcessError: pip, or the first import in the new environment, failed.
    """
    for level in levels:
        join(pieces, level, folder)
    check_python((folder / "python").read_text())
    python = make_venv(folder / "venv")
    for level in levels:
        options = ("--quiet", "--no-index", "--no-deps", "--no-compile")
        found = ("--find-links", str(folder / "wheels"), "-r", str(folder / f"{level}.txt"))
        run(sys.executable, "-m", "pip", "--python", str(python), "install", *options, *found)
    # all processes of verl would compile the same files at the same time
    packages = python.parents[1] / "lib"
    subprocess.run([str(python), "-m", "compileall", "-q", "-j", "0", str(packages)], check=False)
    return dict(json.loads(run(str(python), "-W", "ignore", "-c", PROBE).splitlines()[-1]))


def check_python(packed: str) -> None:
    here = f"{sys.version_info[0]}.{sys.version_info[1]}"
    if here != packed.strip():
        raise ValueError(
            f"this is Python {here}; the pieces were packed for {packed.strip()}. Start this with "
            f"python{packed.strip()}, or pack again with --python {here}"
        )


def make_venv(folder: Path) -> Path:
    """A new environment that sees the packages of this Python; returns its Python.

    `--system-site-packages` would not do: where this Python is itself one of an environment, that
    shows the packages of the Python below it, which has no torch.
    """
    venv.create(folder, clear=True, with_pip=False, symlinks=True)
    (packages,) = (folder / "lib").glob("python*/site-packages")
    lines = [f"import site; site.addsitedir({path!r})\n" for path in site.getsitepackages()]
    (packages / "behind.pth").write_text("".join(lines))
    return folder / "bin" / "python"


def run(*command: str) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pieces", type=Path)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    levels = ["core", *["vllm"] * (options.pieces / "vllm.sha256").is_file()]
    folder = options.folder.resolve()
    print(json.dumps(install(options.pieces, folder, levels)), file=sys.stderr)
    print(folder / "venv" / "bin" / "python")


if __name__ == "__main__":
    main()

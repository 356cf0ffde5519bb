"""Collects what a machine without a network needs, in pieces that fit into small transfers.

    python -m workshop.gpu_kit.pack OUT [--level core|vllm] [--python 3.12] [--present FILE]
        [--pins FILE]

`core` has verl with its trainer, this package, rows and a tiny policy; `vllm` has what vLLM needs
besides. torch, and the CUDA libraries that torch brings, are those of the machine. Needs uv.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from workshop.gpu_kit.pieces import split

REPO = Path(__file__).resolve().parents[2]
GLIBC = 34  # 2.34: RHEL 9, Debian 12, Ubuntu 22.04 and newer
LEVELS = {"core": ("--extra", "verl"), "vllm": ("--extra", "gpu")}
TESTS = "pytest>=8,<10\nhypothesis>=6.100,<7\n"  # of stage a
# PyPI has no wheels of these; they are Python alone, so that one is made here
SOURCES = ("antlr4-python3-runtime", "pylatexenc")
# of what torch needs, so that a machine with torch has these
FROM_MACHINE = re.compile(r"(torch|triton|nvidia-.+|cuda-.+|sympy|mpmath|networkx)==")
DATA = ("tool_rl_tiny", "tool_rl_policy")  # as the recipe for no GPU names them in its data_dir
# required by verl or vLLM, and imported by nothing that the stages run: for other GPUs, pictures,
# sound, servers and trackers. With these, `vllm` would have four times the size
NOT_NEEDED = {
    "core": "wandb tensorboard tensorboard-data-server virtualenv",
    "vllm": """
        flashinfer-cubin flashinfer-python fastsafetensors humming-kernels quack-kernels tilelang
        tokenspeed-mla tokenspeed-triton torch-c-dlpack-ext z3-solver ml-dtypes cuda-core
        cuda-python cuda-tile nvidia-cuda-cccl nvidia-cuda-crt nvidia-cuda-nvcc nvidia-cuda-tileiras
        nvidia-cudnn-frontend nvidia-cutlass-dsl nvidia-cutlass-dsl-libs-base
        nvidia-cutlass-dsl-libs-cu13 nvidia-nvvm nvtx llvmlite numba
        av opencv-python-headless qwen-vl-utils torchaudio torchcodec torchvision
        anthropic fastapi-cloud-cli fastar mcp mcp-types rignore sentry-sdk supervisor
        contourpy cycler fonttools kiwisolver matplotlib pyparsing
        mathruler mbridge pyelftools scipy pytest-asyncio pytest-rerunfailures tabulate
    """,
}


def resolve(level: str, python: str, pins: Path) -> list[str]:
    """`name==version` of everything that `level` takes, without what an earlier level has."""
    torchs = set(filter(FROM_MACHINE.match, compile_pins(["-"], "torch", python, pins)))
    earlier = set() if level == "core" else {*resolve("core", python, pins)}
    wanted = compile_pins(["pyproject.toml", "-", *LEVELS[level]], TESTS, python, pins)
    left_out = {name for names in NOT_NEEDED.values() for name in names.split()}
    kept = {pin for pin in wanted if pin.partition("==")[0] not in left_out}
    return sorted(kept - torchs - earlier)


def compile_pins(sources: Iterable[str], given: str, python: str, pins: Path) -> list[str]:
    """What uv resolves for Linux on x86-64, whatever this machine is."""
    done = subprocess.run(
        [
            *("uv", "pip", "compile", "--quiet", "--no-header", "--no-annotate"),
            *("--python-version", python, "--python-platform", f"x86_64-manylinux_2_{GLIBC}"),
            *("--constraint", str(pins), *sources),
        ],
        input=given,
        cwd=REPO,
        text=True,
        stdout=subprocess.PIPE,
        check=True,
    )
    return done.stdout.split()


def without_present(pins: Iterable[str], present: str) -> list[str]:
    """The pins that a machine lacks, given its `pip freeze`; a bare name is any version."""
    there = {re.sub(r"[-_.]+", "-", line.strip().lower()) for line in present.splitlines()}
    as_listed = {pin: re.sub(r"[-_.]+", "-", pin.lower()) for pin in pins}
    return [p for p, text in as_listed.items() if not {text, text.partition("==")[0]} & there]


def download(pins: list[str], python: str, wheels: Path) -> None:
    """The wheels for Linux on x86-64; what has only a source is built, if it is Python alone.

    Raises:
        ValueError: such a source makes a wheel for this machine alone.
    """
    tags = [*(f"manylinux_2_{minor}" for minor in range(5, GLIBC + 1)), "manylinux1"]
    tags += ["manylinux2010", "manylinux2014", "linux"]
    platforms = [part for tag in tags for part in ("--platform", f"{tag}_x86_64")]
    pip = (sys.executable, "-m", "pip")
    sources = [pin for pin in pins if pin.partition("==")[0] in SOURCES]
    ready = [pin for pin in pins if pin not in sources]
    target = ("--python-version", python, "--implementation", "cp", "--only-binary", ":all:")
    run(*pip, "download", "--quiet", "--no-deps", *target, *platforms, "-d", str(wheels), *ready)
    if sources:
        run(*pip, "wheel", "--quiet", "--no-deps", "-w", str(wheels), *sources)
    for pin in sources:
        name = pin.partition("==")[0].replace("-", "_")
        (wheel,) = wheels.glob(f"{name}-*.whl")
        if not wheel.name.endswith("-none-any.whl"):
            raise ValueError(f"{wheel.name} is for this machine alone; expected Python code alone")


def add_ours(folder: Path) -> str:
    """Our wheel, rows and a tiny policy; returns the pin of the wheel."""
    run("uv", "build", "--quiet", "--wheel", "--out-dir", str(folder / "wheels"), str(REPO))
    (wheel,) = (folder / "wheels").glob("verl_gdpo-*.whl")
    rows, policy = (str(folder / "data" / name) for name in DATA)
    options = ("--synthetic", "--out", rows)
    run(sys.executable, "-m", "verl_gdpo", "data", "tool_rl", *options)
    shutil.copytree(REPO / "verl_gdpo" / "cpu" / "tool_rl_policy", policy)
    return f"verl-gdpo=={wheel.name.split('-')[1]}"


def pack(level: str, out: Path, python: str, pins: Path, present: str) -> list[Path]:
    """Write the pieces of one level."""
    with tempfile.TemporaryDirectory(prefix="kit-", dir=out) as made:
        folder = Path(made)
        (folder / "wheels").mkdir()
        chosen = without_present(resolve(level, python, pins), present)
        download(chosen, python, folder / "wheels")
        if level == "core":
            chosen.append(add_ours(folder))
        (folder / "python").write_text(python)
        (folder / f"{level}.txt").write_text("\n".join(chosen) + "\n")
        return split(folder, level, out)


def run(*command: str) -> None:
    subprocess.run(command, check=True, stdout=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="workshop.gpu_kit.pack", description=__doc__.splitlines()[0]
    )
    parser.add_argument("out", type=Path, help="the folder for the pieces")
    parser.add_argument("--level", choices=LEVELS, default="core")
    parser.add_argument("--python", default="3.12", help="of the machine; default: %(default)s")
    parser.add_argument("--pins", type=Path, default=REPO / "requirements" / "gpu.txt")
    parser.add_argument("--present", type=Path, help="what it has: its `pip freeze`, or bare names")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    present = options.present.read_text() if options.present else ""
    pieces = pack(options.level, options.out, options.python, options.pins, present)
    sizes = {piece.name: piece.stat().st_size for piece in pieces}
    print(json.dumps({"bytes": sum(sizes.values()), "pieces": sizes}, indent=1))


if __name__ == "__main__":
    main()

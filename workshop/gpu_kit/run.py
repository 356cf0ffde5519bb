"""Runs the stages on the machine with the GPU, one after the other, and writes down what they gave.

    python -m workshop.gpu_kit.run OUT --data FOLDER [--device cuda|cpu] [--stages b d]
        [--seconds 570]

OUT gets results.json, rewritten every few seconds; summary.txt; and logs.tar.gz after each stage.
Another call with the same OUT goes on with its results. `--stages d` is all whose name begins so.
`--device cpu` tries every stage without a GPU, in tiny.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from verl_gdpo.atomic import replace_together
from verl_gdpo.tools.run.gpus import find_gpus, overrides_for
from verl_gdpo.tools.run_folder.folder import MetricsReader
from workshop.benchmarks.step_model import FLOPS_SHARES, GPUS, TOOL_RL, seconds
from workshop.gpu_kit.results import Results, kept, problem_of_training, table, tail
from workshop.gpu_kit.stages import PROMPTS_OF_D, REPO, Place, Stage, stages

POLL_SECONDS = 0.5
SAVE_SECONDS = 5.0
LEAST_SECONDS = 20.0  # with less, a stage is not started
STATUS = {0: "ok", 124: "time limit"}
ENVIRONMENT = {
    "PYTHONPATH": str(REPO),
    "PYTHONUNBUFFERED": "1",
    "HF_HUB_OFFLINE": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # vLLM takes it on Hopper, and pack leaves flashinfer out
}


def machine(device: str) -> dict[str, Any]:
    """What the figures depend on, and what a training may lack here."""
    import torch

    found = find_gpus(os.environ) if device == "cuda" else []
    compilers = map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    return {
        "date": _now(),
        "gpus": [gpu.name for gpu in found],
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.cuda.is_available(),
        "compiles": any(compilers) and header.is_file(),
    }


def environment(device: str, compiles: bool) -> dict[str, str]:
    """What the stages find in their environment."""
    env = dict(ENVIRONMENT)
    if device == "cpu":
        return env | {"VERL_PLATFORM": "cpu", "OMP_NUM_THREADS": "1"}
    if not compiles:
        env["TORCHDYNAMO_DISABLE"] = "1"  # what cannot be compiled runs as it is
    cores = os.cpu_count() or 1
    return env | {"OMP_NUM_THREADS": str(max(1, cores // 4))}


def run_stage(
    stage: Stage, place: Place, results: Results, env: Mapping[str, str], limit_s: float
) -> str:
    """Run one stage to its end or its limit; returns its status, which is in the results too."""
    folder = place.work / stage.name
    shutil.rmtree(folder, ignore_errors=True)
    record = results.stage(stage.name)
    record.clear()
    record |= {"what": stage.what, "status": "running", "started": _now(), "limit_s": limit_s}
    record |= {"command": list(stage.command), "steps": {}, "log": []}
    results.save()
    start = time.monotonic()
    launcher = (place.python, "-m", "verl_gdpo", "run", "--run-dir", str(folder))
    limits = ("--time-limit", str(limit_s), "--end-with-parent", "--")
    process = subprocess.Popen(
        [*launcher, *limits, *stage.command],
        cwd=REPO,
        env={**os.environ, **env, **stage.env},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    reader, saved = MetricsReader(folder), start
    ended = False
    while not ended:
        time.sleep(POLL_SECONDS)
        ended = process.poll() is not None  # before reading, so that the last step is read too
        for number, metrics in reader.new():
            record["steps"][str(number)] = kept(metrics)
        if ended or time.monotonic() > saved + SAVE_SECONDS:
            saved = time.monotonic()
            record |= {"seconds": saved - start, "log": tail(folder / "train.log")}
            results.save()
    record |= {"exit_code": process.returncode}
    record["status"] = STATUS.get(process.returncode, "failed")
    if record["status"] == "ok" and stage.steps:
        problem = problem_of_training(record["steps"], stage.steps, stage.rollout_is_the_actor)
        record |= {"status": "failed", "problem": problem} if problem else {}
    record["computed_s"] = computed_s(stage, record, results.all["machine"]["gpus"])
    if (rows := folder / "rows.jsonl").exists():
        record["rows"] = [json.loads(line) for line in rows.read_text().splitlines()]
    results.save()
    return str(record["status"])


def computed_s(
    stage: Stage, record: Mapping[str, Any], gpus: Sequence[str]
) -> dict[str, list[float]]:
    """What `workshop.benchmarks.step_model` says of stage d, at best and at worst.

    Empty for other stages and GPUs.
    """
    known = [gpu for gpu in GPUS for name in gpus if gpu.name.split()[0] in name]
    if not (stage.after == "d_model" and known and record["steps"]):
        return {}
    step = record["steps"][max(record["steps"], key=int)]
    lengths = {f"{part}_tokens": step[f"{part}_length/mean"] for part in ("prompt", "response")}
    what = replace(TOOL_RL, prompts=PROMPTS_OF_D, **lengths)
    spans = [seconds(what, known[0], 1, share) for share in FLOPS_SHARES]
    return {part: [found[part] for found in spans] for part in spans[0] if part != "rollout"}


def reason_to_leave_out(stage: Stage, place: Place, results: Results, left_s: float) -> str:
    if stage.needs_gpu and place.device == "cpu":
        return "left out: it needs a GPU"
    if stage.needs and find_spec(stage.needs) is None:
        return f"left out: {stage.needs} is not installed"
    if stage.after and results.all["stages"].get(stage.after, {}).get("status") != "ok":
        return f"left out: {stage.after} is not done"
    return "" if left_s >= LEAST_SECONDS else "left out: no time"


def run_all(
    chosen: Sequence[Stage], place: Place, out: Path, env: Mapping[str, str], until: float
) -> bool:
    """Run the stages; returns whether all that ran are fine."""
    results = Results(out / "results.json")
    results.all["machine"] = machine(place.device)
    fine = True
    for stage in chosen:
        left_s = until - time.monotonic()
        if reason := reason_to_leave_out(stage, place, results, left_s):
            results.all["stages"].setdefault(stage.name, {"what": stage.what, "status": reason})
            status = reason
        else:
            print(f"{stage.name}: {stage.what} ...", flush=True)
            status = run_stage(stage, place, results, env, min(stage.limit_s, left_s))
            fine &= status == "ok"
            keep_logs(place.work, out / "logs.tar.gz")
        print(f"{stage.name}: {status}", flush=True)
        results.save()
        (out / "summary.txt").write_text(table(results.all["stages"]) + "\n")
    print(f"\n{table(results.all['stages'])}")
    return fine


def keep_logs(work: Path, archive: Path) -> None:
    """All logs and configurations so far, in one file."""
    paths = sorted([*work.glob("*/train.log"), *work.glob("*/hydra/**/.hydra/*.yaml")])
    with replace_together(archive) as [new], tarfile.open(new, "w:gz") as tar:
        for path in paths:
            tar.add(path, path.relative_to(work).as_posix())


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="workshop.gpu_kit.run", description=__doc__.splitlines()[0]
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--data", type=Path, required=True, help="rows and policy, as installed")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--stages", nargs="+", metavar="NAME", help="default: all, in their order")
    parser.add_argument("--seconds", type=float, default=1e9, help="for all stages together")
    parser.add_argument("--work", type=Path, default=Path("/tmp/gpu_kit"), help="for what is large")
    options = parser.parse_args()
    until = time.monotonic() + options.seconds
    options.out.mkdir(parents=True, exist_ok=True)
    here = machine(options.device)
    if options.device == "cuda" and not (here["cuda"] and here["gpus"]):
        parser.error(f"no GPU is found here: {here}. --device cpu tries the stages without one")
    # one GPU, whatever is there
    fitting = overrides_for("tool_rl", find_gpus(os.environ), 1) if options.device == "cuda" else []
    place = Place(
        options.device, sys.executable, options.data.resolve(), options.work.resolve(), fitting
    )
    every = stages(place)
    wanted = tuple(options.stages or [""])
    unknown = [name for name in wanted if not any(s.name.startswith(name) for s in every)]
    if unknown:
        parser.error(f"unknown: {unknown}; expected some of {[stage.name for stage in every]}")
    env = environment(options.device, here["compiles"])
    chosen = [stage for stage in every if stage.name.startswith(wanted)]
    return int(not run_all(chosen, place, options.out, env, until))


if __name__ == "__main__":
    sys.exit(main())

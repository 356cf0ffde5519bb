"""Makes the inputs, trains all arms with run.sh, and prints what came of it."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from examples.demonstration.inputs import PROMPTS, make_inputs, make_prompts
from examples.demonstration.results import answers, rewards_table
from examples.demonstration.settings import SETTINGS, Setting
from verl_gdpo.terminal import printing
from verl_gdpo.tools import report
from verl_gdpo.tools.run.resume import quoted

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
POLL_SECONDS, LOG_LINES = 0.2, 25


def main() -> int:
    setting, arms, seed, out, others = _read(sys.argv[1:])
    if setting.is_toy:
        os.environ["HF_HUB_OFFLINE"] = "1"
    of_inputs = _toy_keys if setting.is_toy else _model_keys
    keys = [setting.task, "hardware=cpu", *of_inputs(out / "inputs", seed), f"seed={seed}", *others]
    commands = {
        arm: [str(ROOT / "run.sh"), *keys, *setting.arms[arm], f"run_dir={out / arm}"]
        for arm in arms
    }
    how = "side by side" if setting.is_toy else "one after the other"  # for the memory's sake
    _say(f"training {' and '.join(arms)} {how}; what they print is in {out}/ARM.log")
    together = [commands] if setting.is_toy else [{arm: commands[arm]} for arm in arms]
    runs: dict[str, Path] = {}
    failed = 0
    for group in together:
        if failed := train(group, out):
            break
        runs |= {arm: out / arm for arm in group}
    if not runs:
        return failed
    print(f"\n{rewards_table(runs)}\n\n{answers(runs)}\n\n{setting.facts}\n", flush=True)
    named = [option for arm, run in runs.items() for option in ("--arm", f"{arm}={run}")]
    print("The curves of all rewards, and more: ", end="", flush=True)
    return report.main([*named, "--out", str(out / "report")]) or failed


def _read(arguments: Sequence[str]) -> tuple[Setting, list[str], int, Path, list[str]]:
    """Return setting, arms, seed, the folder for everything, and the arguments for run.sh."""
    mine = {"setting": "judge", "arms": "", "seed": "1", "run_dir": ""}
    others = []
    for argument in arguments:
        key, sign, value = argument.partition("=")
        if sign and key in mine:
            mine[key] = value
        elif key == "--model":
            mine["setting"] = "model"
        else:
            others.append(argument)
    odd = [each for each in arguments if each.startswith(("--model=", "setting="))]
    if odd and "--model" in {each.partition("=")[0] for each in arguments}:
        raise SystemExit(
            f"run_demo.sh: {odd[0]}: --model has no value and no other setting; a folder is given "
            "with actor_rollout_ref.model.path=FOLDER"
        )
    if mine["setting"] not in SETTINGS:
        names = ",".join(SETTINGS)
        raise SystemExit(f"run_demo.sh: setting={mine['setting']}: expected one of {names}")
    setting = SETTINGS[mine["setting"]]
    arms = mine["arms"].split(",") if mine["arms"] else [*setting.first]
    if not {*arms} <= setting.arms.keys():
        names = ",".join(setting.arms)
        raise SystemExit(f"run_demo.sh: arms={mine['arms']}: expected some of {names}")
    if not mine["seed"].isdecimal():
        raise SystemExit(f"run_demo.sh: seed={mine['seed']}: expected a number from 0")
    name = time.strftime("demonstration-%Y-%m-%d_%H-%M-%S")
    out = Path(mine["run_dir"] or ROOT / "runs" / name).absolute()
    if out.exists():
        raise SystemExit(f"run_demo.sh: {out} exists; choose another run_dir=FOLDER")
    return setting, arms, int(mine["seed"]), out, others


def _toy_keys(inputs: Path, seed: int) -> list[str]:
    """Make the toy's inputs, and return what run.sh is given to train on them."""
    _say(f"seed {seed}: rows, and a tiny policy that is shown answers that are half right")
    rows, policy = make_inputs(inputs, seed)
    return [
        f"hydra.searchpath=[{quoted(f'file://{HERE}/recipes')}]",
        f"demonstration={quoted(str(HERE))}",
        *_rows_keys(rows),
        f"actor_rollout_ref.model.path={quoted(str(policy))}",
    ]


def _model_keys(inputs: Path, seed: int) -> list[str]:
    """Make a real model's prompts, and return what run.sh is given to train on them."""
    _say(f"seed {seed}: {PROMPTS} prompts with three constraints each, for a model of the hub")
    return [
        *_rows_keys(make_prompts(inputs, seed)),
        f"reward.custom_reward_function.path={quoted(str(HERE / 'rewards.py'))}",
        "reward.custom_reward_function.name=with_dear_words",
        *("trainer.test_freq=-1", "trainer.save_freq=-1"),
        "trainer.total_epochs=${trainer.total_training_steps}",  # the steps end it
    ]


def _rows_keys(rows: Path) -> list[str]:
    files = [f"data.{which}_files={quoted(str(rows))}" for which in ("train", "val")]
    return [*files, "trainer.val_before_train=false"]  # all of the rows are trained on


def train(commands: Mapping[str, Sequence[str]], out: Path) -> int:
    """Run the command of each arm, all at once, and show their steps; return the exit code.

    All of them end with this process, however it ends: run.sh passes on what it is sent.
    """
    started: dict[str, tuple[subprocess.Popen[str], threading.Thread]] = {}
    with _signals_exit(), contextlib.ExitStack() as ending:
        for arm, command in commands.items():
            process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "TERM", *command],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            ending.enter_context(process)
            shown = threading.Thread(target=_show, args=(arm, process, out / f"{arm}.log"))
            shown.start()
            ending.callback(shown.join)
            ending.callback(process.terminate)
            started[arm] = process, shown
        while True:
            codes = {arm: process.poll() for arm, (process, _) in started.items()}
            if failed := [arm for arm, code in codes.items() if code]:
                break
            if None not in codes.values():
                return 0
            time.sleep(POLL_SECONDS)
        log = out / f"{failed[0]}.log"
        started[failed[0]][1].join()
        print("\n".join(log.read_text().splitlines()[-LOG_LINES:]), file=sys.stderr)
        print(f"run_demo.sh: {failed[0]} failed; all of its output: {log}", file=sys.stderr)
        return codes[failed[0]] or 1


@contextlib.contextmanager
def _signals_exit() -> Iterator[None]:
    """Let SIGINT, SIGTERM and SIGHUP raise SystemExit in the block."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {n: signal.signal(n, lambda number, _: sys.exit(128 + number)) for n in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _show(arm: str, process: "subprocess.Popen[str]", log: Path) -> None:
    """Keep all lines of an arm, and print those with the time: its steps and findings."""
    with log.open("w") as file:
        for line in process.stdout or ():
            file.write(line)
            file.flush()
            if line.startswith("["):
                print(f"{arm:>12}  {line}", end="", flush=True)


def _say(line: str) -> None:
    print(f"== {line}", flush=True)


if __name__ == "__main__":
    sys.exit(printing(main))

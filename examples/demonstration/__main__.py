"""Makes the inputs, trains all arms with run.sh, and prints what came of it."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from examples.demonstration.inputs import PROMPTS, make_inputs, make_prompts
from examples.demonstration.results import answers, place_among_ours, rewards_table
from examples.demonstration.settings import SETTINGS, Setting
from verl_gdpo.terminal import printing
from verl_gdpo.tools import report
from verl_gdpo.tools.run.resume import quoted

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
POLL_SECONDS, LOG_LINES = 0.2, 25
MODEL_KEY = "actor_rollout_ref.model.path"
HUB_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"  # run.sh downloads it
# Keys with which a run still is like ours. Any other may change what is learned.
KEYS_AS_OURS = (MODEL_KEY, "ray_kwargs.")


def main() -> int:
    wanted = _read(sys.argv[1:])
    setting, arms, out = wanted.setting, wanted.arms, wanted.out
    if setting.is_toy:
        os.environ["HF_HUB_OFFLINE"] = "1"
        of_inputs = _toy_keys(out / "inputs", wanted.seed)
    else:
        of_inputs = _model_keys(out / "inputs", wanted.prompts)
        if not any(key.startswith(f"{MODEL_KEY}=") for key in wanted.for_run):
            of_inputs.append(f"{MODEL_KEY}={HUB_MODEL}")
    keys = [setting.task, "hardware=cpu", *of_inputs, f"seed={wanted.seed}", *wanted.for_run]
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
    parts = [rewards_table(runs)]
    if wanted.is_as_ours():
        parts.append(place_among_ours(runs, wanted.name))
    parts += [answers(runs, setting.small), setting.facts]
    print("\n" + "\n\n".join(part for part in parts if part) + "\n", flush=True)
    named = [option for arm, run in runs.items() for option in ("--arm", f"{arm}={run}")]
    print("The curves of all rewards, and more: ", end="", flush=True)
    return report.main([*named, "--out", str(out / "report")]) or failed


@dataclass(frozen=True)
class Wanted:
    """What the command line asks for.

    Attributes:
        name: of the setting.
        arms: names of the setting's arms.
        seed: of sampling, and of a toy's rows and policy.
        prompts: a number by which a real model's prompts are drawn.
        out: a new folder for everything.
        for_run: the arguments for run.sh.
    """

    name: str
    setting: Setting
    arms: list[str]
    seed: int
    prompts: int
    out: Path
    for_run: list[str]

    def is_as_ours(self) -> bool:
        """Whether the run has the settings of our own runs, with which it can be compared."""
        keys = [argument for argument in self.for_run if "=" in argument]
        return self.prompts == 0 and all(key.startswith(KEYS_AS_OURS) for key in keys)


def _read(arguments: Sequence[str]) -> Wanted:
    """Return what is asked for; SystemExit with a sentence for what cannot be understood."""
    mine = {"setting": "judge", "arms": "", "seed": "1", "prompts": "", "run_dir": ""}
    others = []
    for argument in arguments:
        key, sign, value = argument.partition("=")
        if sign and key in mine:
            mine[key] = value
        elif key == "--model":
            mine["setting"] = "sentences"
        else:
            others.append(argument)
    odd = [each for each in arguments if each.startswith(("--model=", "setting="))]
    if odd and "--model" in {each.partition("=")[0] for each in arguments}:
        raise SystemExit(
            f"run_demo.sh: {odd[0]}: --model has no value and no other setting; a folder is given "
            f"with {MODEL_KEY}=FOLDER"
        )
    if mine["setting"] not in SETTINGS:
        names = ",".join(SETTINGS)
        raise SystemExit(f"run_demo.sh: setting={mine['setting']}: expected one of {names}")
    setting = SETTINGS[mine["setting"]]
    arms = mine["arms"].split(",") if mine["arms"] else [*setting.first]
    if not {*arms} <= setting.arms.keys():
        names = ",".join(setting.arms)
        raise SystemExit(f"run_demo.sh: arms={mine['arms']}: expected some of {names}")
    if setting.is_toy and mine["prompts"]:
        raise SystemExit(
            f"run_demo.sh: prompts={mine['prompts']}: only --model has them; the rows of a toy are "
            "drawn by seed=N"
        )
    mine["prompts"] = mine["prompts"] or "0"
    for name in ("seed", "prompts"):
        if not mine[name].isdecimal():
            raise SystemExit(f"run_demo.sh: {name}={mine[name]}: expected a number from 0")
    name = time.strftime("demonstration-%Y-%m-%d_%H-%M-%S")
    out = Path(mine["run_dir"] or ROOT / "runs" / name).absolute()
    if out.exists():
        raise SystemExit(f"run_demo.sh: {out} exists; choose another run_dir=FOLDER")
    seed, prompts = int(mine["seed"]), int(mine["prompts"])
    return Wanted(mine["setting"], setting, arms, seed, prompts, out, others)


def _toy_keys(inputs: Path, seed: int) -> list[str]:
    """Make the toy's inputs, and return what run.sh is given to train on them."""
    _say(f"seed {seed}: rows, and a tiny policy that is shown answers that are half right")
    rows, policy = make_inputs(inputs, seed)
    return [*_recipe_keys(rows), f"{MODEL_KEY}={quoted(str(policy))}"]


def _model_keys(inputs: Path, prompts: int) -> list[str]:
    """Make a real model's prompts, and return what run.sh is given to train on them."""
    _say(f"prompts {prompts}: {PROMPTS} prompts that ask for a sentence")
    return _recipe_keys(make_prompts(inputs, prompts))


def _recipe_keys(rows: Path) -> list[str]:
    return [
        f"hydra.searchpath=[{quoted(f'file://{HERE}/recipes')}]",
        f"demonstration={quoted(str(HERE))}",
        *(f"data.{which}_files={quoted(str(rows))}" for which in ("train", "val")),
        "trainer.val_before_train=false",  # all of the rows are trained on
    ]


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

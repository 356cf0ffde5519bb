"""What the launcher prints: a line for each step, a sign of life between them, and why a run ended.

Relies on verl 0.9 for one thing: its V1 trainer logs "Total training steps: N". Without this line,
no time left is shown.
"""

import contextlib
import os
import re
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from verl_gdpo.run import folder
from verl_gdpo.run.checkpoints import newest_checkpoint
from verl_gdpo.run.findings import FindingTracker, findings
from verl_gdpo.terminal import let_go_of_stdout, printable

ALIVE_SECONDS = 20.0
# {metric of verl: what a line says of it}
MORE = {
    "actor/kl_loss": "KL {:.4f}",
    "actor/reward_kl_penalty": "KL {:.4f}",
    "response_length/mean": "{:.0f} tokens",
    "timing_s/step": "{:.1f} s",
}
STEPS_LINE = re.compile(rb"Total training steps: (\d+)")
ASKED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PROBE_BYTES = 1 << 20
LOG_BYTES = 1 << 20  # a failure's reason is searched in this much of the log's end
# Ray 2 in a driver, which it then ends without an exception; and what it says at the begin
GCS_IS_GONE = re.compile(r"Failed to connect to GCS within \d+ seconds")
OWN_RAY = b"Started a local Ray instance"
OWN_IS_GONE = "Ray's gcs_server of this run does not answer any more (out of memory? see dmesg)"
OTHER_IS_GONE = "the head node of the Ray cluster does not answer any more; start it again"


class Progress:
    """Prints new steps at each call of `show`. Its own errors never stop the run."""

    def __init__(self, run: Path, quiet: bool) -> None:
        self.is_on = not quiet
        self.start = self.last_line = time.monotonic()
        self.run = run
        self.reader = folder.MetricsReader(run)
        self.shown: dict[int, float] = {}  # {step that has been printed: when}
        self.log = run / "train.log"
        self.log_start = self.log.stat().st_size if self.log.exists() else 0
        self.last_step: int | None = None
        self.tracker = FindingTracker()
        self.shown_topics: set[str] = set()  # of findings that any start of the run has printed
        # steps of earlier starts, until this start logs its first one
        self.earlier: folder.Metrics = {}
        self.problems_shown = 0
        with contextlib.suppress(Exception):  # `show` gets the same error and prints it
            self.earlier = folder.merged(self.reader.new())
            self.shown_topics = {finding.topic for finding in findings(self.earlier)}

    def show(self) -> None:
        """Print the steps that verl has logged since the last call."""
        try:
            for text in self._new():
                self.say(text)
        except Exception as error:  # an error in the display must not stop the run
            self.say(f"no progress is shown from here on: {error!r}; the run goes on")
            self.is_on = False

    def say(self, text: str) -> None:
        """Print one line with the time since the start."""
        if not self.is_on:
            return
        self.last_line = time.monotonic()
        try:
            print(f"[{self.last_line - self.start:5.0f} s] {printable(text)}", flush=True)
        except OSError:  # the reader of our output has gone, as in `... | head`
            let_go_of_stdout()
            self.is_on = False

    def _new(self) -> Iterator[str]:
        for step, metrics in self.reader.new() if self.is_on else ():
            new_findings = [*self._findings(step, metrics)]
            if step not in self.shown:
                self.shown[step] = time.monotonic()
                rewards = _last_values(folder.training_rewards({step: metrics}))
                validation = _last_values(folder.validation_rewards({step: metrics}))
                if rewards or not validation:
                    yield f"step {step:4d}  {rewards}{_more(metrics)}{self._left(step)}"
                if validation:
                    yield f"step {step:4d}  validation  {validation}"
            yield from new_findings
        for problem in self.reader.problems[self.problems_shown :]:
            self.problems_shown += 1
            yield f"WARNING: {problem}"
        if time.monotonic() - self.last_line > ALIVE_SECONDS:
            yield f"{'running' if self.shown else 'starting Ray, the policy and its servers'} ..."

    def _findings(self, step: int, metrics: Mapping[str, float]) -> Iterator[str]:
        """Yield what the run shows up to now, each topic once in a run.

        A resumed run repeats the steps after its checkpoint: the earlier start's are left out.
        """
        for earlier, values in self.earlier.items():
            if earlier < step:
                self.tracker.add(earlier, values)
        self.tracker.add(step, {**self.earlier.get(step, {}), **metrics})
        self.earlier = {}
        for finding in self.tracker.findings():
            if finding.topic not in self.shown_topics:
                self.shown_topics.add(finding.topic)
                yield f"FINDING: {finding}"

    def _left(self, step: int) -> str:
        """Return how long the steps after this one take, if they are like those before it."""
        if self.last_step is None:
            self.last_step = self._read_last_step()
        first = min(self.shown)
        if step == first or step >= self.last_step:
            return ""
        seconds = (self.shown[step] - self.shown[first]) / (step - first)
        return f"  {duration(seconds * (self.last_step - step))} left of {self.last_step} steps"

    def _read_last_step(self) -> int:
        """Return the number of steps that verl has logged at this start; 0 if it has not."""
        if not self.log.exists():
            return 0
        with self.log.open("rb") as file:
            file.seek(self.log_start)
            match = STEPS_LINE.search(file.read())
        return int(match[1]) if match else 0


def _last_values(curves: Mapping[str, Mapping[int, float]]) -> str:
    return "  ".join(
        f"{name} {value:.3f}" for name, curve in curves.items() for value in curve.values()
    )


def _more(metrics: Mapping[str, float]) -> str:
    """Return what else a step's line says, of what this run logs."""
    logged = ((text, metrics[key]) for key, text in MORE.items() if key in metrics)
    return "".join(f"  {text.format(value)}" for text, value in logged)


def duration(seconds: float) -> str:
    """Return a time such as `45 s`, `12 min` or `3 h 20 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def stop_report(run: Path, reason: str, go_on: str | None = None) -> str:
    """Return one line about a run that somebody stopped, or that reached its time limit.

    Args:
        reason: "stopped", or another word, which is printed too.
        go_on: the command that goes on with it.
    """
    step = max(folder.read_metrics(run), default=0)
    place = f"stopped at step {step}" if step else "stopped before the first step"
    if reason != "stopped":
        place = f"{reason}: {place}"
    if (saved := newest_checkpoint(run / "checkpoints")) is None:
        return f"{place}; there is no checkpoint yet, so start anew with the same command"
    command = go_on or "the same command and trainer.resume_mode=auto"
    of_step = saved.name.removeprefix("global_step_")  # whatever the tracker says
    return f"{place}; the last checkpoint is of step {of_step}; go on with: {command}"


def failure_report(run: Path, since: int = 0, lines: int = 25, exit_code: int = 1) -> str:
    """Return why a run failed: faults from outside, and the log's last exception or last lines.

    Args:
        since: position in the log, in bytes, at which this start begins.
        lines: number of the last lines to return if the log has no exception.
    """
    with (run / "train.log").open("rb") as file:
        file.seek(since)
        is_own = OWN_RAY in file.read(LOG_BYTES)
        file.seek(max(since, file.seek(0, os.SEEK_END) - LOG_BYTES))
        log = file.read().decode(errors="replace").splitlines()
    raised = [line for line in log if re.match(r"[\w.]*(Error|Exception)(\(\w+\))?: ", line)]
    reasons = [printable(line) for line in raised[-1:] or log[-lines:]]
    if any(GCS_IS_GONE.search(line) for line in log[-lines:]):  # Ray has ended the driver
        reasons = [OWN_IS_GONE if is_own else OTHER_IS_GONE]
    faults = faults_from_outside(run, exit_code)
    return "\n".join([*faults, *reasons, f"(whole log: {run / 'train.log'})"])


def faults_from_outside(run: Path, exit_code: int) -> list[str]:
    """Return a line if an unexpected signal ended the run, and one if its folder is not writable.

    Args:
        run: the run's folder.
        exit_code: after a signal, either 128 + signal (shell) or -signal (`subprocess`).
    """
    lines = []
    number = -exit_code if exit_code < 0 else exit_code - 128
    if number in {*signal.Signals} - {*ASKED}:
        lines.append(
            f"the training process was ended by {signal.Signals(number).name}, which nothing in a "
            "run sends to it: the memory may have run out (see dmesg), or somebody sent the signal"
        )
    try:
        with tempfile.TemporaryFile(dir=run) as file:
            file.write(bytes(PROBE_BYTES))
    except OSError as error:
        lines.append(f"{run} cannot be written: {error}. What the run wrote last may be missing")
    return lines

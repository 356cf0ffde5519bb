"""What the launcher prints: a line for each step, a sign of life, findings, and why a run ended.

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
from verl_gdpo.run.end_conditions import RunEnd
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
LOG_BYTES, LOG_LINES = 1 << 20, 25  # of the log's end, in which a failure's reason is searched


class Progress:
    """Prints new steps at each call of `show`. Its own errors never stop the run."""

    def __init__(self, run: Path, quiet: bool) -> None:
        self.is_on = not quiet
        self.start = self.last_line = time.monotonic()
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
        if self.last_step is None and self.log.exists():  # it is logged before the first step
            match = STEPS_LINE.search(self.log.read_bytes(), self.log_start)
            self.last_step = int(match[1]) if match else 0
        first, last = min(self.shown), self.last_step or 0
        if step == first or step >= last:
            return ""
        seconds = (self.shown[step] - self.shown[first]) / (step - first)
        return f"  {duration(seconds * (last - step))} left of {last} steps"


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


def end_report(run: Path, end: RunEnd, since: int = 0, go_on: str | None = None) -> str:
    """Return why a run ended before its last step, and how it goes on if somebody stopped it.

    Args:
        since: position in the log, in bytes, at which this start begins.
        go_on: the command that goes on with it.
    """
    log = run / "train.log"
    if end.is_wanted:
        step = max(folder.read_metrics(run), default=0)
        if (saved := newest_checkpoint(run / "checkpoints")) is None:
            return f"{end.reason} at step {step}; there is no checkpoint yet, so start anew"
        command = go_on or "the same command and trainer.resume_mode=auto"
        return f"{end.reason} at step {step}; go on after {saved.name} with: {command}"
    reasons = [end.message] if end.message else [*_faults(run, end.exit_code), *_last(log, since)]
    return "\n".join([*reasons, f"(whole log: {log})"])


def _last(log: Path, since: int) -> list[str]:
    """Return the last exception in the log, or its last lines."""
    with log.open("rb") as file:
        file.seek(max(since, file.seek(0, os.SEEK_END) - LOG_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    raised = [line for line in lines if re.match(r"[\w.]*(Error|Exception)(\(\w+\))?: ", line)]
    return [printable(line) for line in raised[-1:] or lines[-LOG_LINES:]]


def _faults(run: Path, exit_code: int) -> Iterator[str]:
    """Yield a line if a signal ended the run, and one if its folder is not writable."""
    with contextlib.suppress(ValueError):
        name = signal.Signals(exit_code - 128).name
        yield f"the training process was ended by {name}: the memory may have run out (see dmesg)"
    try:
        with tempfile.TemporaryFile(dir=run) as file:
            file.write(bytes(PROBE_BYTES))
    except OSError as error:
        yield f"{run} cannot be written: {error}. What the run wrote last may be missing"

"""What the launcher prints while a run goes on: a line a step, a sign of life, and findings.

Relies on verl 0.9 for one thing: its V1 trainer logs "Total training steps: N". Without this line,
no time left is shown.
"""

import contextlib
import re
import time
from collections.abc import Iterator, Mapping

from verl_gdpo.terminal import let_go_of_stdout, printable, short_number
from verl_gdpo.tools.run.held_folder import HeldFolder
from verl_gdpo.tools.run_folder import folder
from verl_gdpo.tools.run_folder.console_log import ConsoleReader
from verl_gdpo.tools.run_folder.findings import FindingTracker, findings

ALIVE_SECONDS = 20.0
STARTS_UP = "starting Ray, the policy and its servers"  # what verl does until its first step
# {metric of verl: what a line says of it}
MORE = {
    "actor/kl_loss": "KL {:.4f}",
    "actor/reward_kl_penalty": "KL {:.4f}",
    "response_length/mean": "{:.0f} tokens",
    "timing_s/step": "{:.1f} s",
}
STEPS_LINE = re.compile(rb"Total training steps: (\d+)")


class Progress:
    """Prints new steps at each call of `show`. Its own errors never stop the run."""

    def __init__(self, held: HeldFolder, quiet: bool, before: str = STARTS_UP) -> None:
        """Begin to read the metrics of the start that begins now.

        Args:
            held: the folder of the run.
            quiet: whether nothing is printed.
            before: what the command does until it logs its first step.
        """
        self.is_on = not quiet
        self.before = before
        self.start = time.monotonic()
        self.last_line = self.start
        self.held = held
        self.loss = ""  # what has become of the folder, as it was last said
        self.reader = folder.MetricsReader(held.path)
        self.shown: dict[int, float] = {}  # {step that has been printed: when}
        self.in_file = 0  # the last step of training that the file logger has written
        log = held.path / "train.log"
        self.log_start = 0
        if log.exists():
            self.log_start = log.stat().st_size
        # It is read until the file logger, which writes the same, has written a step.
        self.console: ConsoleReader | None = ConsoleReader(log, self.log_start)
        self.waiting: list[tuple[int, dict[str, float]]] = []  # what it has read last
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
        if not self.is_on:
            return
        yield from self._look_at_folder()
        for step, metrics in self._new_metrics():
            if self._begins_anew(step, metrics):
                self.shown.clear()
                self.last_step = 0  # the log says it of the first training
            new_findings = list(self._findings(step, metrics))
            if step not in self.shown:
                self.shown[step] = time.monotonic()
                yield from self._of_step(step, metrics)
            yield from new_findings
        for problem in self.reader.problems[self.problems_shown :]:
            self.problems_shown += 1
            yield f"WARNING: {problem}"
        if time.monotonic() - self.last_line > ALIVE_SECONDS:
            doing = "running" if self.shown else self.before
            yield f"{doing} ..."

    def _begins_anew(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Return whether another training of the same command has begun: its steps go back."""
        is_of_file = self.console is None
        if not is_of_file or folder.is_validation(metrics):
            return False
        goes_back = step < self.in_file
        self.in_file = step
        return goes_back

    def _of_step(self, step: int, metrics: Mapping[str, float]) -> Iterator[str]:
        rewards = _values(folder.training_rewards({step: metrics}))
        validation = _values(folder.validation_rewards({step: metrics}))
        # A validation before the first step has no rewards of training.
        if rewards or not validation:
            yield f"step {step:4d}  {rewards}{_more(metrics)}{self._left(step)}"
        if validation:
            yield f"step {step:4d}  validation  {validation}"

    def _look_at_folder(self) -> Iterator[str]:
        """Say once that the folder is gone, and where it is, or that it is back."""
        loss = self.held.loss()
        if loss and loss != self.loss:
            yield f"WARNING: {loss}"
        if self.loss and not loss:
            yield f"the run folder {self.held.path} is back"
        self.loss = loss

    def _new_metrics(self) -> Iterator[tuple[int, Mapping[str, float]]]:
        place = self.held.place()
        if place is None:  # what is under its name now is not of this run
            return
        self.reader.run = place
        with contextlib.suppress(FileNotFoundError):  # it was renamed just now: see the next look
            for row in self.reader.new():
                self.console = None
                yield row
            if self.console is not None:
                self.console.path = place / "train.log"
                # The file logger, which writes the same, may be a moment behind the console.
                rows = self.waiting
                self.waiting = list(self.console.new())
                yield from rows

    def _findings(self, step: int, metrics: Mapping[str, float]) -> Iterator[str]:
        """Yield what the run shows up to now, each topic once in a run.

        A resumed run repeats the steps after its checkpoint: the earlier start's are left out.
        """
        for earlier_step, earlier_metrics in self.earlier.items():
            if earlier_step < step:
                self.tracker.add(earlier_step, earlier_metrics)
        all_of_step = dict(self.earlier.get(step, {}))
        all_of_step.update(metrics)
        self.tracker.add(step, all_of_step)
        self.earlier = {}
        for finding in self.tracker.findings():
            if finding.topic not in self.shown_topics:
                self.shown_topics.add(finding.topic)
                yield f"FINDING: {finding}"

    def _left(self, step: int) -> str:
        """Return how long the steps after this one take, if they are like those before it."""
        log = self.reader.run / "train.log"
        if self.last_step is None and log.exists():  # it is logged before the first step
            match = STEPS_LINE.search(log.read_bytes(), self.log_start)
            if match is None:
                self.last_step = 0
            else:
                self.last_step = int(match[1])
        first = min(self.shown)
        last = self.last_step or 0
        if step == first or step >= last:
            return ""
        seconds = (self.shown[step] - self.shown[first]) / (step - first)
        return f"  {duration(seconds * (last - step))} left of {last} steps"


def _values(curves: Mapping[str, Mapping[int, float]]) -> str:
    """Return the values of {name: {step: value}} for a line."""
    texts = []
    for name, curve in curves.items():
        for value in curve.values():
            texts.append(f"{name} {short_number(value)}")
    return "  ".join(texts)


def _more(metrics: Mapping[str, float]) -> str:
    """Return what else a step's line says, of what this run logs."""
    more = ""
    for key, text in MORE.items():
        if key in metrics:
            more += f"  {text.format(metrics[key])}"
    return more


def duration(seconds: float) -> str:
    """Return a time such as `45 s`, `12 min` or `3 h 20 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    if hours == 0:
        return f"{minutes} min"
    return f"{hours} h {minutes} min"

"""Prints a line for each step of a run, and a sign of life between the steps."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from verl_gdpo.run.folder import MetricsReader, training_rewards
from verl_gdpo.terminal import let_go_of_stdout, printable

HEARTBEAT_SECONDS = 20.0


class Progress:
    """Prints new steps at each call of `show`. Its own errors never stop the run."""

    def __init__(self, run: Path, quiet: bool) -> None:
        self.is_on = not quiet
        self.start = self.last_line = time.monotonic()
        self.reader = MetricsReader(run)
        self.shown: set[int] = set()  # steps that have been printed
        self.problems_shown = 0
        with contextlib.suppress(OSError):  # `show` gets the same error and prints it
            list(self.reader.new())  # skips the steps of earlier starts

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
            if step not in self.shown:
                self.shown.add(step)
                rewards = "  ".join(
                    f"{name} {curve[step]:.3f}"
                    for name, curve in training_rewards({step: metrics}).items()
                )
                yield f"step {step:4d}  {rewards or 'validation'}"
        for problem in self.reader.problems[self.problems_shown :]:
            self.problems_shown += 1
            yield f"WARNING: {problem}"
        if time.monotonic() - self.last_line > HEARTBEAT_SECONDS:
            yield f"{'running' if self.shown else 'starting Ray, the policy and its servers'} ..."

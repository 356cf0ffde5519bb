"""Reads the metrics in what a training prints: the lines of verl's `console` logger.

Relies on verl 0.9 `verl.utils.logger.aggregate_logger.concat_dict_to_str`, which writes a step as
`step:7 - name:0.5 - name:np.float64(1.0)`. Ray puts the name of a process before it, in colour.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from verl_gdpo.tools.run_folder.folder import Metrics, finite_or_nan, merged

STEP = re.compile(rb"(?:^|[\s\]m])step:(?P<step>\d+) - (?P<values>.+)")
# The last colon stands before the value: names may have colons of their own.
VALUE = re.compile(r"(?P<name>.+):(?:np\.\w+\()?(?P<number>[-+.\w]+)\)?")


class ConsoleReader:
    """Reads a log while it is written; each call of `new` continues the last one.

    path: the log. It may get another name between two calls.
    """

    def __init__(self, path: Path, begin: int = 0) -> None:
        self.path = path
        self._read = begin  # bytes

    def new(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Yield (step, {name: value}) for each new line that has a step.

        A last line without its end is read when its end is there.
        """
        with self.path.open("rb") as file:
            file.seek(self._read)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._read += len(line)
                match = STEP.search(line)
                if match:
                    yield int(match["step"]), _values(match["values"].decode(errors="replace"))


def _values(text: str) -> dict[str, float]:
    """Return {name: number} of a line; what is no number is left out, and NaN stays one."""
    values = {}
    for part in text.split(" - "):
        match = VALUE.fullmatch(part.strip())
        if match is None:
            continue
        try:
            values[match["name"]] = finite_or_nan(float(match["number"]))
        except ValueError:
            continue
    return values


def read_console_log(path: Path) -> Metrics:
    """Return {step: {name: value}} of a log of one or more starts, as `merged` does; {} without."""
    return merged(ConsoleReader(path).new())

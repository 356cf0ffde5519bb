"""The program of one process of `math_length_pool.py`: a JSON line in, a JSON line out.

It ends with its parent, at the end of its input. While it compares, the kernel ends it at the
limits, which are its arguments: seconds of CPU time, seconds, bytes of address space.
"""

import json
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any


def main(cpu_s: float, wall_s: float, max_bytes: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
    replies = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)  # what a library prints is no reply

    def reply(message: dict[str, Any]) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    try:
        compare = _load_math_verify()
    except BaseException as error:
        reply({"failed": f"{type(error).__name__}: {error}"})
        raise SystemExit(1) from error
    reply({"ready": True})
    for line in sys.stdin:
        # their default action ends the process, even inside one long multiplication
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        signal.setitimer(signal.ITIMER_REAL, wall_s)
        message = compare(**json.loads(line), report=reply)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        reply(message)


def _load_math_verify() -> Callable[..., dict[str, Any]]:
    from math_verify import LatexExtractionConfig, parse, verify

    logging.disable(logging.CRITICAL)  # it logs a traceback for each text that it cannot read

    def read(text: str) -> list[Any]:
        # None: its own limit is by SIGALRM, which stays ours
        return list(parse(f"\\boxed{{{text}}}", [LatexExtractionConfig()], parsing_timeout=None))

    read_gold = lru_cache(64)(read)  # the samples of a prompt share it

    def compare(gold: str, answer: str, report: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        try:
            golds = read_gold(gold)
        except Exception:
            golds = []
        if not golds:
            return {"gold_is_read": False}
        report({"gold_is_read": True})
        try:
            equal = verify(golds, read(answer), timeout_seconds=None)
        except Exception:  # whatever a model writes, sympy has an exception for it
            equal = False
        return {"gold_is_read": True, "equal": bool(equal)}

    return compare


if __name__ == "__main__":
    del sys.path[0]  # this folder, whose files are no top-level modules
    main(float(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))

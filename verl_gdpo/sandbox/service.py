"""Runs programs in a SandboxFusion service, which verl's `reward.sandbox_fusion` names.

As in `__init__.py`, a program and its inputs go out, and what comes back is text, to be compared
here. One request runs one test: `POST URL` with {code, language, stdin, compile_timeout,
run_timeout, memory_limit_MB}, as https://github.com/bytedance/SandboxFusion and verl 0.9.1
(`verl.utils.reward_score.sandbox_fusion`) have it. The service confines the program.
"""

import http.client
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verl_gdpo import sandbox
from verl_gdpo.sandbox import OUTPUT_BYTES, ExecutionNotes, SandboxError, TestResult, inside

TRIES, RETRY_SECONDS = 3, 1.0  # the n-th wait is n times as long
ANSWER_SECONDS = 10.0  # of the service itself, beside the two limits of the program; as in verl
REPLY_BYTES = 8 * OUTPUT_BYTES  # escaped as JSON, a byte of output may take six
TIME_LIMIT = "TimeLimitExceeded"
STOPPED = ("Error", TIME_LIMIT)  # how a program ends that the service stops
PROBE_TEST = {"input": "hello\n"}


class SandboxFusion:
    """The service of a run; threads may share it.

    Args:
        url: where programs are posted, such as http://127.0.0.1:8080/run_code.
        max_concurrent: programs at a time, of one reward worker.
        memory_limit_mb: of a program; the service sees to it.

    Raises:
        ValueError: a value that cannot be meant.
    """

    def __init__(self, url: str, max_concurrent: int = 64, memory_limit_mb: int = 1024) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"reward.sandbox_fusion.url: got {url!r}; expected http://... or null")
        limits = {"max_concurrent": max_concurrent, "memory_limit_mb": memory_limit_mb}
        for name, value in limits.items():
            if not value >= 1:
                raise ValueError(f"reward.sandbox_fusion.{name}: got {value}; expected at least 1")
        self.url, self.memory_limit_mb = url, memory_limit_mb
        self.max_concurrent = max_concurrent
        self._places = threading.BoundedSemaphore(max_concurrent)

    @classmethod
    def of(cls, sandbox_fusion: Mapping[str, Any] | None) -> "SandboxFusion | None":
        """The service that verl's block `reward.sandbox_fusion` names; None if it names none."""
        block = sandbox_fusion or {}
        if not block.get("url"):
            return None
        keys = ("url", "max_concurrent", "memory_limit_mb")
        return cls(**{key: block[key] for key in keys if block.get(key) is not None})

    def run(
        self,
        program: str,
        tests: Sequence[Mapping[str, Any]],
        *,
        function: str | None = None,
        wall_seconds: float = 10.0,
        notes: ExecutionNotes | None = None,
    ) -> list[TestResult]:
        """Run a Python program once for each test, as `sandbox.run` does.

        Args:
            wall_seconds: of each test; the service counts no CPU time.
            notes: filled in.

        Raises:
            SandboxError: the service cannot be reached, or runs no program at all. If it only
                fails with this one, the program has failed.
        """
        notes = notes or ExecutionNotes()
        results: list[TestResult] = []
        with self._places:
            notes.begin()
            for test in tests:
                try:
                    result = self._run_one(program, function, wall_seconds, test)
                except SandboxError:
                    self._probe(wall_seconds)
                    result = None  # a program may bring down the service that runs it
                if result is None:
                    notes.stopped = True
                    break
                results.append(result)
        return results + [sandbox.NOT_FINISHED] * (len(tests) - len(results))

    def missing(self, **_: Any) -> Sequence[str]:
        """Nothing that is known of; raises SandboxError if the service does not run a program."""
        self._probe(10.0)
        return ()

    def _probe(self, seconds: float) -> None:
        """Raise SandboxError if the service does not run a program of ours."""
        result = self._run_one(sandbox.PROBE, None, seconds, PROBE_TEST)
        sandbox.check_probe(result, f"reward.sandbox_fusion.url={self.url}: ")

    def _run_one(
        self, program: str, function: str | None, wall_seconds: float, test: Mapping[str, Any]
    ) -> TestResult | None:
        program = program.encode("utf-8", "replace").decode()
        request = json.dumps({"program": program, "function": function, "test": test})
        source = Path(inside.__file__).read_text()
        body = {
            "code": f"{source}\nserve({json.dumps(request)})\n",
            "language": "python",
            "stdin": test.get("input", ""),
            "compile_timeout": wall_seconds,
            "run_timeout": wall_seconds,
            "memory_limit_MB": self.memory_limit_mb,
            "files": {},
            "fetch_files": [],
        }
        seconds = 2 * wall_seconds + ANSWER_SECONDS
        for number in range(1, TRIES + 1):
            try:
                reply = _post(self.url, json.dumps(body).encode(), seconds)
                return _result(reply, bool(function))
            except (OSError, ValueError, http.client.HTTPException) as error:
                last = error
            if number < TRIES:
                time.sleep(RETRY_SECONDS * number)
        raise SandboxError(
            f"reward.sandbox_fusion.url={self.url}: {TRIES} requests without a result of the "
            f"program, the last with {last!r}. See that the service runs, and that "
            "reward.sandbox_fusion.max_concurrent is not more than it can do"
        ) from last


def _result(reply: Any, is_function: bool) -> TestResult | None:
    """How a test ended, None at a limit; raises ValueError if the reply does not say so."""
    if reply is None:
        return None
    if isinstance(reply, dict):
        parts = [reply.get(key) or {} for key in ("compile_result", "run_result")]
        ran = parts[-1]
        if reply.get("status") == "Success" and ran.get("status") == "Finished":
            output = str(ran.get("stdout") or "")
            is_short = len(output.encode("utf-8", "replace")) <= OUTPUT_BYTES
            has_result = bool(output) or not is_function
            return TestResult(True, output) if is_short and has_result else sandbox.NOT_FINISHED
        ended = any(part.get("status") in STOPPED or part.get("return_code") for part in parts)
        if reply.get("status") == "Failed" and ended:
            return None if ran.get("status") == TIME_LIMIT else sandbox.NOT_FINISHED
    raise ValueError(f"the answer {json.dumps(reply)[:300]}")


def _post(url: str, body: bytes, seconds: float) -> Any:
    """The JSON of the answer, None if it is longer than `REPLY_BYTES`; ends after the seconds."""
    give_up = time.monotonic() + seconds
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    try:
        answer = urllib.request.urlopen(request, timeout=seconds)
    except urllib.error.HTTPError as error:
        with error:  # it holds the connection
            raise
    with answer:
        text = b""
        while part := answer.read1(1 << 16):
            text += part
            if len(text) > REPLY_BYTES:
                return None
            if time.monotonic() > give_up:
                raise TimeoutError(f"the answer takes longer than {seconds:g} s")
        return json.loads(text)

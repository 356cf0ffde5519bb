"""Coding by verl's `reward.sandbox_fusion`: a stub on loopback runs the programs of these tests."""

import contextlib
import functools
import itertools
import json
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf
from verl.utils.reward_score import default_compute_score

from verl_gdpo import sandbox
from verl_gdpo.sandbox import SandboxError
from verl_gdpo.sandbox import service as sandbox_service
from verl_gdpo.sandbox.service import SandboxFusion
from verl_gdpo.tasks.coding import score as coding
from verl_gdpo.tasks.coding.score import score
from verl_gdpo.tasks.coding.test_cases import problem_of
from verl_gdpo.tools.check.machine import what_scorers_miss


def run_here(request):
    """What SandboxFusion answers for a program, which is one of this file."""
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-c", request["code"]],
            input=request["stdin"],
            capture_output=True,
            text=True,
            timeout=request["run_timeout"],
        )
    except subprocess.TimeoutExpired:
        ran = {"status": "TimeLimitExceeded", "return_code": None, "stdout": "", "stderr": ""}
        return {"status": "Failed", "compile_result": None, "run_result": ran}
    ran = {"status": "Finished", "return_code": done.returncode}
    ran |= {"stdout": done.stdout, "stderr": done.stderr}
    status = "Failed" if done.returncode else "Success"
    return {"status": status, "compile_result": None, "run_result": ran}


@pytest.fixture
def stub(monkeypatch):
    """A service; `answer(request)` returns its reply, as JSON, or (HTTP status, its parts)."""
    monkeypatch.setattr(sandbox_service, "RETRY_SECONDS", 0.0)
    monkeypatch.setenv("no_proxy", "*")
    service = SimpleNamespace(answer=run_here, requests=[], now=0, most=0)
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                service.requests.append(request)
                service.now += 1
                service.most = max(service.most, service.now)
            reply = service.answer(request)
            with lock:
                service.now -= 1
            if not isinstance(reply, tuple):
                reply = 200, [json.dumps(reply).encode()]
            self.send_response(reply[0])
            with contextlib.suppress(OSError):  # the client has given up
                self.end_headers()
                for part in reply[1]:
                    self.wfile.write(part)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))  # seconds to shut down
    thread.start()
    service.url = f"http://127.0.0.1:{server.server_port}/run_code"
    yield service
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(autouse=True)
def no_sandbox_here(monkeypatch):
    def run(*_, **__):
        raise AssertionError("a program ran on this machine")

    monkeypatch.setattr(sandbox, "run", run)


def block(program):
    return f"```python\n{program}\n```"


def truth(tests, function=None):
    return json.dumps({"function": function, "tests": tests})


PRINTS = truth([{"input": "3\n", "output": "10\n"}, {"input": "4\n", "output": "11\n"}])
CALLS = truth([{"args": [n], "kwargs": {}, "accepted": [n + 7]} for n in (3, 4)], "add")


@pytest.mark.parametrize(
    ("ground_truth", "program", "passed", "bug"),
    [
        (PRINTS, "print(int(input()) + 7)", 1, 1),
        (PRINTS, "print(10)", 0.5, 1),
        (PRINTS, "n = int(input())\nassert n != 4\nprint(n + 7)", 0.5, 0),
        (PRINTS, "print('10'); print(1 / 0)", 0, 0),  # the output of a crash is none
        (PRINTS, "print(", 0, 0),
        (PRINTS, "from __future__ import annotations\nprint(int(input()) + 7)", 1, 1),
        (PRINTS, "if __name__ == '__main__': print(int(input()) + 7)", 1, 1),
        (PRINTS, "", 0, 0),  # what prints nothing has not run
        (PRINTS, "print('\ud83d')", 0, 1),  # half a surrogate pair, which no file can hold
        (CALLS, "def add(n): return n + 7", 1, 1),
        (CALLS, "class Solution:\n    def add(self, n: List[int]): return n + 7", 1, 1),
        (CALLS, "def add(n): print('10'); return 11", 0.5, 1),  # what it prints is no result
        (CALLS, "def add(n): print(n + 7)", 0, 1),
        (CALLS, "def other(n): return n + 7", 0, 0),
        (CALLS, "print(10)\nimport sys\nsys.exit(0)", 0, 0),
        (CALLS, "class Equal(int): __eq__ = lambda *_: True\ndef add(n): return Equal(0)", 0, 1),
    ],
)
def test_scores(stub, ground_truth, program, passed, bug):
    found = score(block(program), ground_truth, service=SandboxFusion(stub.url))
    assert found == {"pass": passed, "length": float(passed == 1), "bug": bug}
    assert len(stub.requests) == 2


def test_no_expected_result_leaves_this_machine(stub):
    tests = [{"input": "MARKin", "output": "MARKout"}]
    calls = [{"args": ["MARKin"], "kwargs": {}, "accepted": ["MARKout"]}]
    for ground_truth in (truth(tests), truth(calls, "f")):
        score(block("def f(text): return 'MARKout'"), ground_truth, service=SandboxFusion(stub.url))
    for request in stub.requests:
        # once in the program itself
        assert json.dumps(request).count("MARKout") == 1 and "MARKin" in json.dumps(request)


FORMS = (
    {"inputs": ["3\n", "4\n"], "outputs": ["10\n", "11\n"]},
    {"fn_name": "add", "inputs": ["3", "4"], "outputs": ["10", "11"]},
    {"assert_case": ["assert add(3) == 10", "assert add(4) == 11"]},
)


@pytest.mark.parametrize("tests", FORMS, ids=["inputs", "fn_name", "assert_case"])
@pytest.mark.parametrize("result", ["n + 7", "10", "0", "1 / 0", "[n + 7]"])
def test_pass_is_what_verls_scorer_says_of_this_service(stub, tests, result):
    program = f"def add(n): return {result}\n"
    if "fn_name" not in tests and "inputs" in tests:
        program += "print(add(int(input())))"
    problem = problem_of(tests, "tests", print)
    ours = score(block(program), problem.text(), service=SandboxFusion(stub.url))["pass"]
    answer = block(program)
    verls = default_compute_score(
        "codecontests", answer, json.dumps(tests), sandbox_fusion_url=stub.url, memory_limit_mb=512
    )
    assert ours == verls


def test_limits_are_sent(stub):
    service = SandboxFusion(stub.url, memory_limit_mb=77)
    score(block("print(1)"), PRINTS, wall_seconds=6, service=service)
    for request in stub.requests:
        assert request["run_timeout"] == request["compile_timeout"] == 6
        assert request["memory_limit_MB"] == 77 and request["language"] == "python"


def test_a_program_without_end(stub):
    stub.answer = lambda request: run_here({**request, "run_timeout": 3})
    notes, tests = sandbox.ExecutionNotes(), [{"input": what} for what in ("\n", "x", "\n")]
    outcomes = SandboxFusion(stub.url).run("what = input()\nwhile what: pass", tests, notes=notes)
    assert [outcome.finished for outcome in outcomes] == [True, False, False]
    assert len(stub.requests) == 2 and notes.stopped and notes.seconds_waited > 0


@pytest.mark.parametrize("bytes_printed", [sandbox.OUTPUT_BYTES + 1, sandbox_service.REPLY_BYTES])
def test_output_without_end(stub, bytes_printed):
    outcomes = SandboxFusion(stub.url).run(f"print('x' * {bytes_printed})", [{"input": ""}])
    assert outcomes == [sandbox.TestResult(False, "")] and len(stub.requests) == 1


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ((500, [b"down"]), "HTTPError 500"),
        ((404, []), "HTTPError 404"),
        ((200, [b"<html>"]), "JSONDecodeError"),
        ((200, [b"\xff"]), "UnicodeDecodeError"),
        ([], r"the answer \[\]"),
        ({"status": "SandboxError", "message": "no image"}, "no image"),
        ({"status": "Success", "run_result": None}, "Success"),
        ({"status": "Failed", "run_result": None, "compile_result": None}, "Failed"),
    ],
)
def test_a_service_that_fails_says_nothing_about_the_program(stub, reply, message):
    stub.answer = lambda request: reply
    run = functools.partial(SandboxFusion(stub.url).run, "print(1)", [{"input": ""}])
    with pytest.raises(SandboxError, match=f"(?s)fusion.url={stub.url}: 3 requests.*{message}"):
        run()
    assert len(stub.requests) == 6  # 3 of them with a program of ours
    # one that fails for a while costs requests, and no score
    replies = itertools.chain([reply, reply], itertools.repeat(None))
    stub.answer = lambda request: next(replies) or run_here(request)
    assert run() == [sandbox.TestResult(True, "1\n")]


def test_a_program_that_brings_its_sandbox_down_has_failed(stub):
    def answer(request):
        return (500, [b"down"]) if "bomb" in request["code"] else run_here(request)

    stub.answer = answer
    bomb, good = block("bomb = 1\nprint(int(input()) + 7)"), block("print(int(input()) + 7)")
    service = SandboxFusion(stub.url)
    assert score(bomb, PRINTS, service=service) == {"pass": 0, "length": 0, "bug": 0}
    assert score(good, PRINTS, service=service) == {"pass": 1, "length": 1, "bug": 1}


def test_no_service_there(monkeypatch):
    monkeypatch.setattr(sandbox_service, "RETRY_SECONDS", 0.0)
    with pytest.raises(SandboxError, match=r"url=http://127.0.0.1:9/run_code: 3 requests.*refused"):
        SandboxFusion("http://127.0.0.1:9/run_code").run("print(1)", [{"input": ""}])


@pytest.mark.parametrize("wait", [60, 0.02], ids=["silent", "byte by byte"])
def test_an_answer_that_does_not_come_is_not_waited_for(stub, monkeypatch, wait):
    monkeypatch.setattr(sandbox_service, "ANSWER_SECONDS", 0.3)
    ended = threading.Event()

    def drip():
        while not ended.wait(wait):
            yield b" "

    stub.answer = lambda request: (200, drip())
    try:
        with pytest.raises(SandboxError, match=r"timed out|takes longer than 0\.3 s"):
            SandboxFusion(stub.url).run("print(1)", [{"input": ""}], wall_seconds=0.0)
        give_up = time.monotonic() + 60
        while len(stub.requests) < 6 and time.monotonic() < give_up:
            time.sleep(0.01)  # a busy stub reads the last one after its client has given up
    finally:
        ended.set()
    assert len(stub.requests) == 6


def test_only_so_many_requests_at_once(stub):
    def answer(request):
        time.sleep(0.05)
        finished = {"status": "Finished", "stdout": request["stdin"]}
        return {"status": "Success", "run_result": finished}

    def run(number):
        tests = [{"input": f"{number} {place}"} for place in range(5)]
        return [result.output for result in service.run("", tests)]

    stub.answer = answer
    service = SandboxFusion(stub.url, max_concurrent=3)
    with ThreadPoolExecutor(4) as threads:
        outputs = [*threads.map(run, range(4))]
    assert outputs == [[f"{n} {place}" for place in range(5)] for n in range(4)]
    assert stub.most == 3 and len(stub.requests) == 20


# --- verl's configuration ------------------------------------------------------------------------


def config_with(**sandbox_fusion):
    path = {"custom_reward_function": {"path": None}}
    return OmegaConf.create({"reward": {**path, "sandbox_fusion": sandbox_fusion}})


def test_the_block_of_verl():
    assert [*map(SandboxFusion.of, (None, {}, config_with(url=None).reward))] == [None] * 3
    block = {"url": "http://h/run_code", "max_concurrent": 2, "memory_limit_mb": None}
    service = SandboxFusion.of(OmegaConf.create({"_target_": "x", **block}))
    assert (service.url, service.memory_limit_mb) == ("http://h/run_code", 1024)
    for wrong in ({"url": "localhost:8080"}, {**block, "max_concurrent": 0}):
        with pytest.raises(ValueError, match=r"reward\.sandbox_fusion\.(url|max_concurrent): got"):
            SandboxFusion.of(wrong)


def test_check_asks_the_service(stub):
    assert what_scorers_miss(config_with(url=stub.url), coding.TASK.data_sources) == []
    assert len(stub.requests) == 1
    stub.answer = lambda request: {"status": "SandboxError"}
    with pytest.raises(SandboxError, match="SandboxError"):
        what_scorers_miss(config_with(url=stub.url), coding.TASK.data_sources)
    assert what_scorers_miss(config_with(url=stub.url), ["rlla"]) == []

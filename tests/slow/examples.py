"""The commands of the pages in examples/: they install and start real servers, and these answer.

Those of verifiers and OpenEnv are real; NeMo Gym's needs a newer Python, so it is our stub. The
quick tests compare with the same answers.
"""

import asyncio
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from aiohttp import ClientConnectorError
from foreign_answers import ANSWERS, RESPONSE
from repository import REPO

from examples import foreign_rewards

STARTED_SECONDS = 60


def ask(name, truth, url):
    entry = () if name == "nemo_gym" else ("sums",)
    function = getattr(foreign_rewards, name)
    deadline = time.monotonic() + STARTED_SECONDS
    while True:
        try:
            return asyncio.run(function(RESPONSE, truth, url, *entry))
        except ClientConnectorError:  # the server is not up yet
            assert time.monotonic() < deadline
            time.sleep(1)


@pytest.mark.parametrize("name", ANSWERS)
def test_the_server_of_a_page_gives_the_rewards(name, tmp_path):
    page = (REPO / "examples" / name / "README.md").read_text()
    block = re.search(r"```bash\n(.*?)```", page, re.S)[1]
    rows = tmp_path / "sums.jsonl"
    block = block.replace("ENV", str(tmp_path / "env")).replace("sums.jsonl", str(rows))
    *commands, start_server = block.splitlines()
    python = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{python}:{os.environ['PATH']}"}
    for command in commands:
        subprocess.run(["bash", "-c", command], cwd=REPO, env=environment, check=True)
    port = start_server.split()[-1]
    second_row = json.loads(rows.read_text().splitlines()[1])
    truth = second_row["reward_model"]["ground_truth"]
    server = subprocess.Popen(start_server.split(), cwd=REPO, env=environment)
    try:
        assert ask(name, truth, f"http://127.0.0.1:{port}") == ANSWERS[name][1]
    finally:
        server.terminate()
        server.wait()

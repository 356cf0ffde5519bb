"""Scores single responses with a taskset of verifiers 0.4, in verifiers' own environment.

python examples/verifiers/server.py MODULE:TASKSET --port 8900, with the module on the path.
"""

import argparse
import importlib
import inspect
import sys
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from aiohttp import web


def load_tasks(where: str) -> dict[str, vf.Task]:
    """Return {key: task} of MODULE:TASKSET; what needs a sandbox would be left out silently."""
    module, name = where.split(":")
    tasks = {
        task.key: task
        for task in getattr(importlib.import_module(module), name)(vf.TasksetConfig())
    }
    for function in (hook for kind in ("reward", "metric") for hook in first(tasks).hooks(kind)):
        if "runtime" in inspect.signature(function).parameters:
            sys.exit(
                f"{where}: {function.__name__} needs the sandbox of a rollout, and here is none"
            )
    return tasks


def first(tasks: dict[str, vf.Task]) -> vf.Task:
    return next(iter(tasks.values()))


async def score(task: vf.Task, response: str) -> dict[str, Any]:
    """Score a response as `verifiers` does when it replays a trace."""
    messages = task.data.prompt
    if isinstance(messages, str):
        messages = [vf.UserMessage(content=messages)]
    nodes = [vf.MessageNode(message=message) for message in messages or []]
    nodes.append(vf.MessageNode(message=vf.AssistantMessage(content=response), sampled=True))
    for parent, node in enumerate(nodes[1:]):
        node.parent = parent
    trace = vf.Trace(
        task=vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key),
        agent=vf.AgentInfo(config=vf.AgentConfig()),
        nodes=nodes,
    )
    await task.score(trace)
    return {
        "rewards": {name: reward.score for name, reward in trace.rewards.items()},
        "metrics": trace.metrics,
        "weights": {name: reward.weight for name, reward in trace.rewards.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("taskset", metavar="MODULE:TASKSET")
    parser.add_argument("--port", type=int, default=8900, help="default: %(default)s")
    args = parser.parse_args()
    sys.path.insert(0, str(Path.cwd()))
    tasks = load_tasks(args.taskset)

    async def answer(request: web.Request) -> web.Response:
        body = await request.json()
        if body["task"] not in tasks:
            raise web.HTTPNotFound(text=f"no task has the key {body['task']!r}: other rows?")
        try:
            return web.json_response(await score(tasks[body["task"]], body["response"]))
        except Exception as error:
            raise web.HTTPInternalServerError(text=f"{type(error).__name__}: {error}") from error

    app = web.Application(client_max_size=2**26)
    app.add_routes([web.post("/score", answer)])
    web.run_app(app, host="127.0.0.1", port=args.port)


if __name__ == "__main__":
    main()

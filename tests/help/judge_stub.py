"""A judge's server for tests: it answers by what the response says, with real servers' faults."""

import asyncio
import contextlib
import json
import re
import threading

from run_config import listed

from workshop.benchmarks.judge import serve

TEMPLATE = "Rate for {prompt} by {ground_truth} and {topic}: {response} Like {'clear': 3}"
OTHERS = {"raw_prompt": [{"role": "user", "content": "Why?"}], "extra_info": {"topic": "tea"}}

MARKED = re.compile(r"<(data-[0-9a-f]{16})>(.*?)</\1>", re.S)
FAULTS = {
    "429": (429, "retry-after: 7", "{}"),
    "503": (503, "content-type: text/plain", "down"),
    "400": (400, "content-type: text/plain", "no"),
    "html": (200, "content-type: text/html", "<p>10</p>"),
    "broken": (200, "content-type: application/json", "{"),
    "error": (200, "content-type: application/json", '{"error": {"message": "model is gone"}}'),
}
ANSWERS = {
    "nonsense": "Sure, 10!",
    "empty": None,
    "list": "[5, 1]",
    "deep": "[" * 100_000,
    "above": '{"clear": 11, "right": 1}',
    "below": '{"clear": -0.1, "right": 1}',
    "text": '{"clear": "7", "right": 1}',
    "true": '{"clear": 7, "right": true}',
    "nan": '{"clear": NaN, "right": 1}',
    "lacks": '{"clear": 7}',
}

# What a judge's model may write around its answer.
AROUND = {
    "thinks": '<think>{{"clear": 9}} or so</think>\n\n{}',
    "opens no thought": "so</think>{}",
    "fences": "```json\n{}\n```",
    "fences after a thought": "<think>so</think>\n```\n{}\n```\n",
    "says more": "Here it is:\n```json\n{}\n```\nThat is all.",
    "never ends its thought": "<think>{}",
    "repeats the response": 'To {{"clear": 10, "right": 1}} I give {}',
    "thinks twice": "<think>so</think>{} <think>or {{}}</think>",
}

# answers of a server that sends the key back, some of which are cut within the key
ECHOES = {
    "text": lambda key: f"Your key is {key}",
    "long": lambda key: "x" * 490 + key,
    "value": lambda key: json.dumps({"clear": "x" * 90 + key, "right": 1}),
    "good": lambda key: json.dumps({"clear": 7, "right": 1, "why": f"Bearer {key}"}),
}


class Stub:
    """`asked` has (response, other values, head, request) of each attempt; `gave` the answers."""

    def __init__(self):
        self.asked, self.gave, self.running, self.most = [], {}, 0, 0
        self.is_open = True  # else it answers nobody
        self.never = asyncio.Event()  # held here: a task that waits for a loose one is collected

    async def answers(self, body, head):
        question = body["messages"][1]["content"]
        *others, response = [json.loads(value) for _, value in MARKED.findall(question)]
        self.asked.append((response, others, head, body))
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0.01)
        while not self.is_open:
            await asyncio.sleep(0.01)
        self.running -= 1
        kind, _, rest = response.partition(" ")
        before = sum(response == asked for asked, *_ in self.asked) - 1
        if kind == "hang":
            await self.never.wait()
        if kind in FAULTS and (rest != "once" or before == 0):
            return FAULTS[kind]
        rewards = {"clear": len(response) % 11, "right": sum(response.encode()) % 2}
        good = json.dumps({**rewards, "why": "so"})
        text = ANSWERS.get(kind, good)
        if response in AROUND:
            text = AROUND[response].format(good)
        if kind == "echo":
            (key,) = re.findall(r"authorization: Bearer (.*)\r", head, re.I)
            if rest == "401":
                error = {"error": {"message": f"Incorrect API key provided: {key}"}}
                return 401, "content-type: application/json", json.dumps(error)
            text = ECHOES[rest](key)
        self.gave[response] = json.loads(good)
        choice = {"message": {"role": "assistant", "content": text}}
        if kind == "refused":
            choice["message"] = {"content": None, "refusal": "I cannot judge this."}
        answer = {"choices": [choice], "usage": {"total_tokens": 12}}
        closing = "connection: close"  # so that `check` leaves no client with an open one
        return 200, f"content-type: application/json\r\n{closing}", json.dumps(answer)


@contextlib.contextmanager
def judge_stub():
    """Yield a stub in a thread of its own; its `address` is that of a judge."""
    loop, stub = asyncio.new_event_loop(), Stub()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    server = asyncio.run_coroutine_threadsafe(serve(stub.answers), loop).result()
    stub.address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"

    async def end():
        server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    try:
        yield stub
    finally:
        asyncio.run_coroutine_threadsafe(end(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def config_of(address, limits=None, **entry):
    rewards = {"clear": [0, 10], "right": [0, 1]}
    judged = {"judge": address, "model": "m", "template": TEMPLATE, "rewards": rewards, **entry}
    functions = {"q": {k: v for k, v in judged.items() if v is not None}}
    return listed(functions, **({"timeout": 20} if limits is None else limits))

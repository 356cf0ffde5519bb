"""Times judgements against a stub in another process, which answers after a fixed time.

python -m workshop.benchmarks.judge

It prints the total beside the server's own time, and our CPU time beside that of the bare SDK.
"""

import asyncio
import json
import multiprocessing
import re
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import closing, suppress
from typing import Any

from verl_gdpo.scoring.judge import Judge
from verl_gdpo.scoring.limits import Limiter, Limits

JUDGEMENTS, AT_ONCE, SERVICE_SECONDS = 8192, 64, 2.0
PEERS = 1024  # requests of the SDK alone, after as many that are not counted
ANSWER = {"choices": [{"message": {"content": '{"clear": 7}'}}], "usage": {"total_tokens": 9}}
GOAL = 1.1  # of the server's own time


async def serve(answers: Callable[[Any, str], Awaitable[tuple[int, str, str]]]) -> asyncio.Server:
    """Serve requests by POST on a free port of this machine, with connections that are kept.

    Args:
        answers: takes the JSON and the head of a request, and returns status, headers and body.
    """

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError), closing(writer):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                (length,) = re.findall(r"content-length: (\d+)", head, re.I)
                body = json.loads(await reader.readexactly(int(length)))
                status, headers, text = await answers(body, head)
                size = f"content-length: {len(text.encode())}"
                writer.write(f"HTTP/1.1 {status} X\r\n{headers}\r\n{size}\r\n\r\n{text}".encode())

    return await asyncio.start_server(handle, "127.0.0.1", 0)


def stub(ports: Any) -> None:
    async def answers(_body: Any, _head: str) -> tuple[int, str, str]:
        await asyncio.sleep(SERVICE_SECONDS)
        return 200, "content-type: application/json", json.dumps(ANSWER)

    async def run() -> None:
        server = await serve(answers)
        ports.put(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(run())


async def measure(port: int) -> bool:
    judge = Judge(f"http://127.0.0.1:{port}/v1", "stub", "Clear? {response}", {"clear": (0, 10)})
    judge.connect()
    limiter = Limiter(Limits(max_concurrent=AT_ONCE))
    places = asyncio.Semaphore(AT_ONCE)

    async def limited(ask: Callable[[], Awaitable[Any]]) -> Any:
        return await limiter.call(ask, "a judgement")

    async def ours(text: str) -> Any:
        parts = {"solution_str": text, "answer_str": text, "reasoning_str": ""}
        return await judge(prompt=None, within_limits=limited, extra_info={}, **parts)

    async def bare(text: str) -> Any:
        messages = [judge._system, {"role": "user", "content": f"Clear? {text}"}]
        create = judge.client.chat.completions.create
        async with places:
            return await create(messages=messages, **judge._request)

    cpu: list[float] = []
    runs = ("first", bare, PEERS), ("SDK", bare, PEERS), ("ours", ours, JUDGEMENTS)
    for name, ask, count in runs:
        start, used = time.perf_counter(), time.process_time()
        await asyncio.gather(*(ask(f"{number} " + "word " * 400) for number in range(count)))
        ratio = (time.perf_counter() - start) / (count / AT_ONCE * SERVICE_SECONDS)
        cpu.append((time.process_time() - used) / count * 1e3)
        print(f"{name}: {ratio:.3f} x the server's own time, {cpu[-1]:.3f} ms of CPU a judgement")
    print(f"ours: {cpu[2] - cpu[1]:.3f} ms a judgement, {cpu[2] / cpu[1]:.3f} x the SDK alone")
    return ratio <= GOAL


if __name__ == "__main__":
    ports: Any = multiprocessing.Queue()
    multiprocessing.Process(target=stub, args=(ports,), daemon=True).start()
    sys.exit(not asyncio.run(measure(ports.get())))

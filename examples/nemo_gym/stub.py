"""Stands in for a resources server of NeMo Gym, whose package needs a later Python than verl.

The request and the answer have the form of BaseVerifyRequest and BaseMultiRewardVerifyResponse in
nemo_gym/base_resources_server.py of NeMo Gym 0.5.1 (commit 07d6b0d). A request without the fields
of the form is answered with 422, as there.

python examples/nemo_gym/stub.py --port 8902; --rows prints its rows as verl reads them.
"""

import argparse
import json
from typing import Any

from aiohttp import web

ROWS = 64
RESPONSE = ("id", "created_at", "model", "object", "output", "parallel_tool_calls", "tools")


def gym_row(index: int) -> dict[str, Any]:
    """Return a row of the stub's data set, in the form of NeMo Gym's JSONL files."""
    a, b = 3 * index + 1, 7 * index % 50
    prompt = f"What is {a} + {b}? End with the number."
    messages = [{"role": "user", "content": prompt}]
    return {"responses_create_params": {"input": messages}, "expected": f"{a + b}"}


def verl_row(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "data_source": "nemo_gym",
        "prompt": row["responses_create_params"]["input"],
        "reward_model": {"style": "rule", "ground_truth": json.dumps(row)},
    }


async def verify(request: web.Request) -> web.Response:
    body = await request.json()
    response, parameters = body.get("response", {}), body.get("responses_create_params", {})
    lacking = [key for key in RESPONSE if key not in response]
    if lacking or "input" not in parameters:
        raise web.HTTPUnprocessableEntity(text=json.dumps({"detail": lacking or ["input"]}))
    messages = [item for item in response["output"] if item["type"] == "message"]
    words = [part["text"] for message in messages for part in message["content"]]
    words = " ".join(words).split()
    components = {
        "correct": float(words[-1:] == [body["expected"]]),
        "brief": float(len(words) <= 10),
    }
    answer = {**body, "reward": sum(components.values()), "reward_components": components}
    return web.json_response(answer)


def make_app() -> web.Application:
    app = web.Application(client_max_size=2**26)
    app.add_routes([web.post("/verify", verify)])
    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, default=8902, help="default: %(default)s")
    parser.add_argument("--rows", action="store_true", help="print rows, and end")
    args = parser.parse_args()
    if args.rows:
        print("\n".join(json.dumps(verl_row(gym_row(index))) for index in range(ROWS)))
    else:
        web.run_app(make_app(), host="127.0.0.1", port=args.port)


if __name__ == "__main__":
    main()

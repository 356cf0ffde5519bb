"""An environment of OpenEnv 0.10 whose answer has the score of each rubric, on OpenEnv's server.

python examples/openenv/server.py --port 8901; with --rows it prints rows as verl reads them.
"""

import argparse
import json
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from openenv.core.rubrics import Rubric

ROWS = 64


class Answer(Action):
    text: str
    expected: str


class Correct(Rubric):
    def forward(self, action: Answer, observation: Observation) -> float:
        return float(action.text.split()[-1:] == [action.expected])


class Brief(Rubric):
    def forward(self, action: Answer, observation: Observation) -> float:
        return float(len(action.text.split()) <= 10)


class Sums(Rubric):
    """Brevity counts only for a correct answer: else that rubric does not run."""

    def __init__(self) -> None:
        super().__init__()
        self.correct, self.brief = Correct(), Brief()
        self.weights = {"correct": 0.8, "brief": 0.2}

    def forward(self, action: Answer, observation: Observation) -> float:
        if not self.correct(action, observation):
            return 0.0
        brief = self.brief(action, observation)
        return self.weights["correct"] + self.weights["brief"] * brief


class SumsEnvironment(Environment[Answer, Observation, State]):
    """One step long. OpenEnv makes a new one for each POST /step, so no score is an old one."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__(rubric=Sums())

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, **_: Any
    ) -> Observation:
        return Observation()

    def step(self, action: Answer, timeout_s: float | None = None, **_: Any) -> Observation:
        observation = Observation(done=True)
        observation.reward = self._apply_rubric(action, observation)
        leaves = {name: one for name, one in self.rubric.named_rubrics() if not [*one.children()]}
        scores = {name: one.last_score for name, one in leaves.items()}
        if wrong := [
            name for name, score in scores.items() if score is not None and score != score
        ]:
            raise ValueError(f"{wrong} is NaN, which the server would answer as null")
        observation.metadata = {"rewards": scores, "weights": self.rubric.weights}
        return observation

    @property
    def state(self) -> State:
        return State()


def row(index: int) -> dict[str, Any]:
    a, b = 3 * index + 1, 7 * index % 50
    prompt = f"What is {a} + {b}? End with the number."
    return {
        "data_source": "openenv",
        "prompt": [{"role": "user", "content": prompt}],
        "reward_model": {"style": "rule", "ground_truth": f"{a + b}"},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, default=8901, help="default: %(default)s")
    parser.add_argument("--rows", action="store_true", help="print rows, and end")
    args = parser.parse_args()
    if args.rows:
        print("\n".join(json.dumps(row(index)) for index in range(ROWS)))
    else:
        app = create_fastapi_app(SumsEnvironment, Answer, Observation)
        uvicorn.run(app, host="127.0.0.1", port=args.port, log_level="warning")


if __name__ == "__main__":
    main()

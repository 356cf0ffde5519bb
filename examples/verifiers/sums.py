"""A taskset of verifiers 0.4: sums of two numbers, two rewards and a metric.

python examples/verifiers/sums.py > rows.jsonl writes its rows as verl reads them.
"""

import json
from collections.abc import Iterator

import verifiers.v1 as vf

ROWS = 64


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=1.0)
    async def correct(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.split()[-1:] == [self.data.answer])

    @vf.reward(weight=0.2)
    async def brief(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply.split()) <= 10)

    @vf.metric
    async def words(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply.split()))


class SumTaskset(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self) -> Iterator[SumTask]:
        for index in range(ROWS):
            a, b = 3 * index + 1, 7 * index % 50
            yield SumTask(
                SumData(prompt=f"What is {a} + {b}? End with the number.", answer=f"{a + b}"),
                self.config.task,
            )


def main() -> None:
    for task in SumTaskset(vf.TasksetConfig()):
        row = {
            "data_source": "verifiers",
            "prompt": [{"role": "user", "content": task.data.prompt_text}],
            "reward_model": {"style": "rule", "ground_truth": task.key},
        }
        print(json.dumps(row))


if __name__ == "__main__":
    main()

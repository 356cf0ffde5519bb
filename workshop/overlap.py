"""How often data_prep and check find training rows that stand in the validation set again.

python -m workshop.overlap FOLDER, for the table in workshop/overlap.md. FOLDER has gsm8k/, math/,
code/ and toolrl/ with the files of their publishers.

Copies of 500 training rows are planted: a share of the words between spaces is replaced by words of
the same set, drawn at random. Validation rows are also compared with the training rows of the other
folders, of which none can be a copy.
"""

import json
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from verl_gdpo.tasks.preparation.overlap import Messages, Overlap, PromptReader, compare
from verl_gdpo.tasks.preparation.prepared_files import parquet_rows

SETS = {  # name: (training, validation)
    "GSM8K": ("gsm8k/train.jsonl", "gsm8k/test.jsonl"),
    "MATH": ("math/train_math.json", "math/test_math.json"),
    "OlympiadBench": ("math/train_math.json", "math/test_olympiad_bench.json"),
    "AIME": ("math/train_aime.json", "math/test_aime.json"),
    "AIME, MATH": ("math/train_aime.json", "math/test_math.json"),
    "LeetCode": ("code/train_code_leetcode.json", "code/test_code_leetcode.json"),
    "ToolRL": ("toolrl/train_mini_from_sft.parquet", "toolrl/test.parquet"),
}
SHARES, COPIES = (0.0, 0.05, 0.2), 500


def prompts_of(path: Path) -> list[Messages]:
    if path.suffix == ".parquet":
        return [row["prompt"] for row in parquet_rows(path)]
    text = path.read_text()
    rows = map(json.loads, text.splitlines()) if path.suffix == ".jsonl" else json.loads(text)
    texts = (row.get("problem") or row["question"] for row in rows)
    return [[{"role": "user", "content": text}] for text in texts]


def overlap(training: Sequence[Messages], validation: Sequence[Messages]) -> Overlap:
    def prompts(side: Sequence[Messages]) -> PromptReader:
        return PromptReader(len(side), lambda step: side[::step])

    return compare(prompts(training), prompts(validation))


def changed(prompt: Messages, share: float, words: Sequence[str], rng: random.Random) -> Messages:
    """The prompt, with other words in a share of the places of its user's messages."""

    def other(text: str) -> str:
        said = text.split(" ")
        for place in rng.sample(range(len(said)), round(share * len(said))):
            said[place] = rng.choice(words)
        return " ".join(said)

    return [
        part if part["role"] == "system" else {**part, "content": other(part["content"])}
        for part in prompt
    ]


def lines(folder: Path) -> Iterator[str]:
    sides = {name: [prompts_of(folder / path) for path in paths] for name, paths in SETS.items()}
    rng = random.Random(0)
    for name, (training, validation) in sides.items():
        strange = [
            prompt
            for other, (rows, _) in sides.items()
            if Path(SETS[other][0]).parent != Path(SETS[name][0]).parent
            for prompt in rows
        ]
        texts = (part["content"] for prompt in training for part in prompt[-1:])
        words = [word for text in texts for word in text.split()]
        real, alarms = overlap(training, validation), overlap(strange, validation)
        hits = []
        for share in SHARES:
            copies = rng.sample(training, min(COPIES, len(training)))
            found = overlap(training, [changed(copy, share, words, rng) for copy in copies])
            hits.append(f"{(len(found.equal) + len(found.near)) / len(copies):.1%}")
        counts = f"{len(training):,} | {len(validation):,} | {len(real.equal)} | {len(real.near)}"
        false = f"{len(alarms.equal) + len(alarms.near)}"
        yield f"| {name} | {counts} | {' | '.join(hits)} | {false} |"


if __name__ == "__main__":
    for line in lines(Path(sys.argv[1])):
        print(line, flush=True)

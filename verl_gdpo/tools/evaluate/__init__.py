"""Evaluates a policy on a benchmark, or compares results.

verl-gdpo evaluate RUN_OR_MODEL --bench NAME [...]
verl-gdpo evaluate RUN_OR_MODEL --rewards my_rewards.py:compute_score --rows test.parquet
verl-gdpo evaluate --compare RESULT RESULT ...
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from verl_gdpo.scoring.response import TAGS, thought_tags
from verl_gdpo.tasks import TASK_BY_SOURCE, TASKS
from verl_gdpo.tasks.preparation import DataError
from verl_gdpo.tasks.preparation.loading import whole_number
from verl_gdpo.terminal import printable
from verl_gdpo.tools.evaluate import bfcl, own_rewards, tasks
from verl_gdpo.tools.evaluate.benchmark import Benchmark
from verl_gdpo.tools.evaluate.dialogues import Dialogue, play, start_all
from verl_gdpo.tools.evaluate.policy import DTYPES, Policy, choose_dtype, find_policy
from verl_gdpo.tools.evaluate.results import compare, table, write


def main(argv: Sequence[str]) -> int:
    """Run the command: 0 if there is a result, 1 if something fails, 2 for wrong usage."""
    try:
        benchmarks = _benchmarks()
        arguments = _parse(benchmarks, argv)
        if arguments.compare:
            print(compare(partial(_benchmark_of_result, benchmarks), arguments.compare))
        elif arguments.rewards:
            own = own_rewards.OwnRewards(arguments.rewards)
            evaluate(own_rewards.benchmark_of(own), arguments)
        else:
            evaluate(benchmarks[arguments.bench], arguments)
    except BrokenPipeError:
        raise
    except (DataError, ValueError, OSError) as error:
        message = printable(" ".join(str(error).split()))
        print(f"verl-gdpo evaluate: {message}", file=sys.stderr)
        return 1
    return 0


def _benchmarks() -> dict[str, Benchmark]:
    """Return {NAME of --bench: benchmark}."""
    benchmarks = {}
    for task in TASKS.values():
        benchmark = tasks.benchmark_of(task)
        benchmarks[benchmark.name] = benchmark
    benchmarks[bfcl.BENCHMARK.name] = bfcl.BENCHMARK
    return benchmarks


def _benchmark_of_result(
    benchmarks: Mapping[str, Benchmark], result: Mapping[str, Any]
) -> Benchmark:
    """Return the benchmark of a result; raise LookupError if it is none of ours."""
    if result["bench"] == own_rewards.NAME:
        return own_rewards.benchmark_of_result(result)
    return benchmarks[result["bench"]]


def evaluate(benchmark: Benchmark, arguments: argparse.Namespace) -> None:
    """Ask all questions, and write and print the result.

    Raises:
        DataError, ValueError, OSError: the policy, the data or the folder cannot be used.
    """
    # This imports torch and transformers, for which `--help` and `--compare` need not wait.
    from verl_gdpo.tools.evaluate import engines

    policy = find_policy(arguments.policy, arguments.step, trust=arguments.trust)
    # The functions of a benchmark get these with the options.
    arguments.of_config = policy.of_config
    arguments.step = policy.step
    max_tokens = _max_tokens(benchmark, policy, arguments)
    folder = arguments.out or _usual_folder(benchmark, policy)
    # It is made now, because a folder that cannot be made would lose hours of answers.
    folder.mkdir(parents=True, exist_ok=True)

    scorer = benchmark.scorer(arguments)
    dialogues = start_all(benchmark.questions(arguments), arguments.samples)
    engine_name = engines.choose_engine(arguments.engine)
    template_options = policy.of_config("data.apply_chat_template_kwargs", {})
    dtype = arguments.dtype or choose_dtype(policy)
    settings = {
        "policy": str(policy.place),
        "step": policy.step,
        "scorer": scorer,
        "questions": _digest(dialogues),
        "engine": engine_name,
        "dtype": dtype,
        "max_tokens": max_tokens,
        "temperature": arguments.temperature,
        "samples": arguments.samples,
        "seed": arguments.seed,
        "template_options": template_options,
        "versions": {name: import_module(name).__version__ for name in (engine_name, "torch")},
    }

    tags = TAGS
    if policy.config is not None:
        tags = thought_tags(policy.config)
    engine = engines.load_engine(
        engine_name,
        policy.model,
        template_options,
        max_tokens,
        arguments.temperature,
        dtype,
        tags,
        benchmark.kept_tokens,
    )
    play(dialogues, engine, max_tokens, arguments.seed)
    result = write(folder, benchmark, dialogues, settings)
    print(table(result, benchmark.percent))
    print(f"written to {folder}")


def _max_tokens(benchmark: Benchmark, policy: Policy, arguments: argparse.Namespace) -> int:
    """Return the limit of an answer: of the command, of the run, or of the benchmark."""
    if arguments.max_tokens:
        return int(arguments.max_tokens)
    is_of_rows = arguments.rewards is not None or benchmark.data_source in TASK_BY_SOURCE
    if not is_of_rows:
        # The run was not trained on such questions, so its limit says nothing about them.
        return benchmark.max_tokens
    return int(policy.of_config("data.max_response_length", benchmark.max_tokens))


def _usual_folder(benchmark: Benchmark, policy: Policy) -> Path:
    """Return the folder of a result without --out: in that of the run, or else in this one."""
    if policy.run is not None:
        return policy.run / "evaluation" / f"{benchmark.name}-step_{policy.step}"
    return Path("evaluation") / f"{benchmark.name}-{policy.place.resolve().name}"


def _digest(dialogues: Sequence[Dialogue]) -> str:
    """Return a hash of what is asked and of what is right, before any answer."""
    asked = []
    for dialogue in dialogues:
        if dialogue.sample == 0:
            question = dialogue.question
            row = (question.key, question.category, question.ground_truth, dialogue.asks)
            asked.append(row)
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()


def _parse(benchmarks: Mapping[str, Benchmark], argv: Sequence[str]) -> argparse.Namespace:
    names = "\n".join(f"  {name:<11} {benchmarks[name].summary}" for name in benchmarks)
    parser = argparse.ArgumentParser(
        prog="verl-gdpo evaluate",
        description=f"Evaluate a policy on a benchmark:\n\n{names}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    from_1 = partial(whole_number, 1)
    about = "a run's folder, a checkpoint of verl, or the folder of a Hugging Face model"
    add("policy", metavar="RUN_OR_MODEL", nargs="?", type=Path, help=about)
    about = "one of the benchmarks above"
    add("--bench", metavar="NAME", choices=list(benchmarks), help=about)
    about = (
        "in the place of --bench, your own: FILE.py:FUNCTION or MODULE:FUNCTION, called as in "
        "training; every number that it returns is a column"
    )
    add("--rewards", metavar="FUNCTION", help=about)
    about = (
        "rows in verl's columns for --rewards, *.parquet, *.json or *.jsonl; default: those on "
        "which the run validated"
    )
    add("--rows", nargs="+", default=[], type=Path, metavar="FILE", help=about)
    about = "run code that the shards of a checkpoint name"
    add("--trust", action="store_true", help=about)
    add("--step", type=from_1, metavar="N", help="this checkpoint of a run, not the newest")
    about = "rows for --bench: *.parquet of `verl-gdpo data`, or *.json"
    add("--data", nargs="+", default=[], type=Path, metavar="FILE", help=about)
    about = "the format in which the model writes its calls of tools; default: the run's, or toolrl"
    add("--call-format", metavar="NAME", help=about)
    about = "the folder of the result; default: evaluation/NAME-... in the run, or here"
    add("--out", type=Path, metavar="FOLDER", help=about)
    about = "what generates; default: vllm if it is here beside a GPU"
    add("--engine", choices=["vllm", "transformers"], help=about)
    about = "the precision; default: float32, and on a GPU as in training"
    add("--dtype", choices=DTYPES, help=about)
    about = "the longest answer in tokens; default: the run's, or the benchmark's"
    add("--max-tokens", type=from_1, metavar="N", help=about)
    about = "answers to each question; default 1"
    add("--samples", type=from_1, default=1, metavar="K", help=about)
    about = "of the sampling; default 0, which is greedy"
    add("--temperature", type=float, default=0.0, metavar="T", help=about)
    add("--seed", type=int, default=0, metavar="N", help="of the sampling; default 0")
    about = "print these results of one benchmark side by side, and evaluate nothing"
    add("--compare", nargs="+", default=[], type=Path, metavar="RESULT", help=about)
    for benchmark in benchmarks.values():
        benchmark.add_options(parser.add_argument_group(benchmark.name))
    arguments = parser.parse_args(argv)
    _check_arguments(parser, arguments)
    return arguments


def _check_arguments(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Exit with a message for arguments that do not belong together."""
    if arguments.compare:
        others = arguments.policy or arguments.bench or arguments.rewards
        if len(arguments.compare) < 2 or others:
            parser.error("--compare takes two results or more, and nothing else")
    elif not arguments.policy or bool(arguments.bench) == bool(arguments.rewards):
        parser.error(
            "expected RUN_OR_MODEL and --bench NAME, RUN_OR_MODEL and --rewards FILE.py:FUNCTION, "
            "or --compare RESULT RESULT ..."
        )
    if arguments.rows and not arguments.rewards:
        parser.error("--rows needs --rewards FILE.py:FUNCTION; the rows of a benchmark are --data")
    if arguments.data and arguments.rewards:
        parser.error("--data is for --bench; the rows for --rewards are --rows FILE")
    if not 0 <= arguments.temperature <= 100:
        parser.error(f"--temperature {arguments.temperature}: expected a number from 0 to 100")
    if arguments.samples > 1 and not arguments.temperature:
        parser.error(
            f"--samples {arguments.samples} needs --temperature above 0: greedy samples are equal"
        )

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
from verl_gdpo.tools.evaluate.dialogues import play, start_all
from verl_gdpo.tools.evaluate.policy import choose_dtype, find_policy
from verl_gdpo.tools.evaluate.results import compare, table, write


def main(argv: Sequence[str]) -> int:
    """Run the command: 0 if there is a result, 1 if something fails, 2 for wrong usage."""
    try:
        ours = map(tasks.benchmark_of, TASKS.values())
        benchmarks = {benchmark.name: benchmark for benchmark in (*ours, bfcl.BENCHMARK)}
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


def _benchmark_of_result(
    benchmarks: Mapping[str, Benchmark], result: Mapping[str, Any]
) -> Benchmark:
    if result["bench"] == own_rewards.NAME:
        return own_rewards.benchmark_of_result(result)
    return benchmarks[result["bench"]]


def evaluate(benchmark: Benchmark, arguments: argparse.Namespace) -> None:
    """Ask all questions, and write and print the result.

    Raises:
        DataError, ValueError, OSError: the policy, the data or the folder cannot be used.
    """
    # imports torch and transformers, for which `--help` and `--compare` need not wait
    from verl_gdpo.tools.evaluate import engines

    policy = find_policy(arguments.policy, arguments.step, trust=arguments.trust)
    arguments.of_config, arguments.step = policy.of_config, policy.step
    max_tokens = arguments.max_tokens or benchmark.max_tokens
    is_of_rows = arguments.rewards is not None or benchmark.data_source in TASK_BY_SOURCE
    if not arguments.max_tokens and is_of_rows:
        max_tokens = int(policy.of_config("data.max_response_length", max_tokens))
    folder = arguments.out or Path("evaluation") / f"{benchmark.name}-{policy.place.resolve().name}"
    if policy.run is not None and not arguments.out:
        folder = policy.run / "evaluation" / f"{benchmark.name}-step_{policy.step}"
    folder.mkdir(parents=True, exist_ok=True)  # better now than after hours
    scorer = benchmark.scorer(arguments)
    dialogues = start_all(benchmark.questions(arguments), arguments.samples)
    firsts = [(one.question, one.asks) for one in dialogues if one.sample == 0]
    content = json.dumps([(q.key, q.category, q.ground_truth, asks) for q, asks in firsts])
    engine_name = engines.choose_engine(arguments.engine)
    template_options = policy.of_config("data.apply_chat_template_kwargs", {})
    settings = {
        "policy": str(policy.place),
        "step": policy.step,
        "scorer": scorer,
        "questions": hashlib.sha256(content.encode()).hexdigest(),  # and what is right
        "engine": engine_name,
        "dtype": arguments.dtype or choose_dtype(policy),
        "max_tokens": max_tokens,
        **{name: getattr(arguments, name) for name in ("temperature", "samples", "seed")},
        "template_options": template_options,
        "versions": {name: import_module(name).__version__ for name in (engine_name, "torch")},
    }
    about = (template_options, max_tokens, arguments.temperature, settings["dtype"])
    tags = TAGS
    if policy.config is not None:
        tags = thought_tags(policy.config)
    kept = benchmark.kept_tokens
    engine = engines.load_engine(engine_name, policy.model, *about, tags, kept)
    play(dialogues, engine, max_tokens, arguments.seed)
    result = write(folder, benchmark, dialogues, settings)
    print(table(result, benchmark.percent))
    print(f"written to {folder}")


def _parse(benchmarks: Mapping[str, Benchmark], argv: Sequence[str]) -> argparse.Namespace:
    names = "\n".join(f"  {name:<11} {benchmarks[name].summary}" for name in benchmarks)
    parser = argparse.ArgumentParser(
        prog="verl-gdpo evaluate",
        description=f"Evaluate a policy on a benchmark:\n\n{names}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add, from_1 = parser.add_argument, partial(whole_number, 1)
    about = "a run's folder, a checkpoint of verl, or the folder of a Hugging Face model"
    add("policy", metavar="RUN_OR_MODEL", nargs="?", type=Path, help=about)
    about = "one of the benchmarks above"
    add("--bench", metavar="NAME", choices=[*benchmarks], help=about)
    about = "in the place of --bench, your own: FILE.py:FUNCTION or MODULE:FUNCTION, called as in "
    about += "training; every number that it returns is a column"
    add("--rewards", metavar="FUNCTION", help=about)
    about = "rows in verl's columns for --rewards, *.parquet, *.json or *.jsonl; default: those on "
    about += "which the run validated"
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
    add("--dtype", choices=["float32", "bfloat16", "float16"], help=about)
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
    if arguments.compare:
        if len(arguments.compare) < 2 or arguments.policy or arguments.bench or arguments.rewards:
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
    return arguments

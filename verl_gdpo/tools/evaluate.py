"""Evaluates a policy on a benchmark, or compares results.

verl-gdpo evaluate RUN_OR_MODEL --bench NAME [...]
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

from verl_gdpo.evaluation import bfcl, records, tasks
from verl_gdpo.evaluation import dialogues as dialogues_of
from verl_gdpo.evaluation.benchmark import Benchmark
from verl_gdpo.evaluation.comparison import compare
from verl_gdpo.evaluation.dialogues import Dialogue
from verl_gdpo.evaluation.engines import ENGINES, Sampling, choose_engine, load_engine
from verl_gdpo.evaluation.policy import Policy, choose_dtype, find_policy
from verl_gdpo.evaluation.results import result_of, table, write
from verl_gdpo.tasks import TASK_BY_SOURCE, TASKS
from verl_gdpo.tasks.preparation.loading import whole_number
from verl_gdpo.terminal import printable

DTYPES = ("float32", "bfloat16", "float16")


def main(argv: Sequence[str]) -> int:
    """Run the command: 0 if there is a result, 1 if something fails, 2 for wrong usage."""
    try:
        ours = map(tasks.benchmark_of, TASKS.values())
        benchmarks = {benchmark.name: benchmark for benchmark in (*ours, bfcl.BENCHMARK)}
        parser = _parser(benchmarks)
        arguments = parser.parse_args(argv)
        _check_usage(parser, arguments)
        if arguments.compare:
            print(compare(arguments.compare))
        else:
            evaluate(benchmarks[arguments.bench], arguments)
    except BrokenPipeError:
        raise
    except (ValueError, OSError) as error:
        message = printable(" ".join(str(error).split()))
        print(f"verl-gdpo evaluate: {message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("verl-gdpo evaluate: stopped; the same command goes on", file=sys.stderr)
        return 1
    return 0


def evaluate(benchmark: Benchmark, arguments: argparse.Namespace) -> None:
    """Ask all questions that have no answer yet, and write and print the result.

    Raises:
        ValueError, OSError: the policy, the data or the folder cannot be used.
    """
    policy = find_policy(arguments.policy, arguments.step)
    arguments.of_config, arguments.step = policy.of_config, policy.step
    sampling = _sampling(benchmark, policy, arguments)
    dialogues = dialogues_of.start_all(benchmark.questions(arguments), arguments.samples)
    engine_name = choose_engine(arguments.engine)
    template_options = policy.of_config("data.apply_chat_template_kwargs", {})
    settings = {
        "bench": benchmark.name,
        "options": _own_options(benchmark, arguments),
        "scorer": benchmark.scorer(arguments),
        "questions": _content(dialogues),
        "model": policy.content(),
        "step": policy.step,
        "engine": engine_name,
        "dtype": arguments.dtype or choose_dtype(policy),
        **vars(sampling),
        "samples": arguments.samples,
        "seed": arguments.seed,
        "template_options": template_options,
        "versions": {name: import_module(name).__version__ for name in (engine_name, "torch")},
    }
    folder = arguments.out or _default_folder(benchmark, policy)
    records.start(folder, settings)
    answers = records.Answers(folder)
    try:
        dialogues_of.replay(dialogues, answers.known)
        if any(dialogue.asks is not None for dialogue in dialogues):
            about_model = (policy.model, template_options, sampling, settings["dtype"])
            engine = load_engine(engine_name, *about_model)
            _check_room(engine.positions, sampling)
            dialogues_of.play(dialogues, engine, answers, sampling.max_tokens, arguments.seed)
    finally:
        answers.close()
    result = result_of(benchmark, dialogues, settings, {"place": str(policy.place)})
    write(folder, result, dialogues, benchmark.data_source, policy.step)
    print(table(result))
    print(f"written to {folder}")


def _sampling(benchmark: Benchmark, policy: Policy, arguments: argparse.Namespace) -> Sampling:
    """How answers are drawn; a run's own limit of tokens counts for the rows of its task."""
    limit = benchmark.max_tokens
    if benchmark.data_source in TASK_BY_SOURCE:
        limit = policy.of_config("data.max_response_length", limit)
    tokens = arguments.max_tokens or int(limit)
    return Sampling(tokens, arguments.temperature, arguments.top_p, arguments.top_k)


def _check_room(positions: int, sampling: Sampling) -> None:
    if sampling.max_tokens >= positions:
        raise ValueError(
            f"--max-tokens {sampling.max_tokens}: the model has {positions} positions, which "
            "leaves no room for a prompt; choose a smaller limit"
        )


def _own_options(benchmark: Benchmark, arguments: argparse.Namespace) -> dict[str, str]:
    prefix = f"{benchmark.name}_"
    return {key: str(value) for key, value in vars(arguments).items() if key.startswith(prefix)}


def _content(dialogues: Sequence[Dialogue]) -> str:
    """A hash of what is asked first, and of what is right."""
    whole = hashlib.sha256()
    for dialogue in dialogues:
        if dialogue.sample == 0:
            question = dialogue.question
            asked = [dict(message) for message in dialogue.asks or ()]
            fields = [question.key, question.category, question.ground_truth, asked]
            whole.update(json.dumps(fields).encode() + b"\n")
    return whole.hexdigest()


def _default_folder(benchmark: Benchmark, policy: Policy) -> Path:
    if policy.run is not None:
        return policy.run / "evaluation" / f"{benchmark.name}-step_{policy.step}"
    return Path("evaluation") / f"{benchmark.name}-{policy.place.resolve().name}"


def _check_usage(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    if arguments.compare:
        if len(arguments.compare) < 2 or arguments.policy or arguments.bench:
            parser.error("--compare takes two results or more, and nothing else")
        return
    if not arguments.policy or not arguments.bench:
        parser.error("expected RUN_OR_MODEL and --bench NAME, or --compare RESULT RESULT ...")
    if arguments.samples > 1 and not arguments.temperature:
        parser.error(
            f"--samples {arguments.samples} needs --temperature above 0: greedy samples are equal"
        )


def _parser(benchmarks: Mapping[str, Benchmark]) -> argparse.ArgumentParser:
    names = "\n".join(f"  {name:<11} {benchmarks[name].summary}" for name in benchmarks)
    parser = argparse.ArgumentParser(
        prog="verl-gdpo evaluate",
        description=f"Evaluate a policy on a benchmark:\n\n{names}",
        epilog="The same command goes on with an evaluation that was stopped.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add, from_1 = parser.add_argument, partial(whole_number, 1)
    share, from_0 = partial(_between, 0.0, 1.0), partial(_between, 0.0, 100.0)
    about = "a run's folder, a checkpoint of verl, or the folder of a Hugging Face model"
    add("policy", metavar="RUN_OR_MODEL", nargs="?", type=Path, help=about)
    add("--bench", metavar="NAME", choices=[*benchmarks])
    add("--step", type=from_1, metavar="N", help="this checkpoint of a run, not the newest")
    about = "*.parquet of `verl-gdpo data`, or *.json"
    add("--data", nargs="+", default=[], type=Path, metavar="FILE", help=about)
    about = "default: evaluation/NAME-... in the run, or here"
    add("--out", type=Path, metavar="FOLDER", help=about)
    add("--engine", choices=[*ENGINES], help="default: vllm if it is here beside a GPU")
    add("--dtype", choices=DTYPES, help="default: float32, and on a GPU as in training")
    add("--max-tokens", type=from_1, metavar="N", help="the limit of an answer")
    add("--samples", type=from_1, default=1, metavar="K", help="of each question; default 1")
    add("--temperature", type=from_0, default=0.0, metavar="T", help="default 0, greedy")
    add("--top-p", type=share, default=1.0, metavar="P", help="default 1, off")
    add("--top-k", type=int, default=-1, metavar="K", help="default -1, off")
    add("--seed", type=int, default=0, metavar="N", help="of the samples; default 0")
    add("--compare", nargs="+", default=[], type=Path, metavar="RESULT", help="of one benchmark")
    for benchmark in benchmarks.values():
        benchmark.add_options(parser.add_argument_group(benchmark.name))
    return parser


def _between(low: float, high: float, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not low <= value <= high:
        raise argparse.ArgumentTypeError(
            f"got {text!r}; expected a number from {low:g} to {high:g}"
        )
    return value

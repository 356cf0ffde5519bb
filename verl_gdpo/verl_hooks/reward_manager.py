"""`reward.reward_manager.name=gdpo`: every reward of a sample under its own name.

Relies on verl 0.7.1 to 0.9: `verl.experimental.reward_loop.reward_manager`, there
`base.RewardManagerBase` with the coroutine `run_single(data) -> {"reward_score",
"reward_extra_info"}`, and `registry.REWARD_MANAGER`; `transfer_queue.enable`, true under V1 alone;
`RLHFDataset.dataframe`, a table of Hugging Face's `datasets`. On 0.8 and 0.9 also: the column
`response_len` of `data`, and `resolve_reward_manager_cls`.
"""

import concurrent.futures
import functools
import inspect
import logging
import math
import reprlib
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import ray
from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase
from verl.experimental.reward_loop.reward_manager.registry import REWARD_MANAGER

import verl_gdpo
from verl_gdpo.batch.matrix import SUM_TOLERANCE, not_the_sum
from verl_gdpo.batch.rows import ERROR_KEY
from verl_gdpo.batch.values import as_json, is_number, value_or_error
from verl_gdpo.rewards import TASK_OF, belongs_elsewhere, options_for
from verl_gdpo.settings.algorithm import GdpoSettings
from verl_gdpo.settings.reward_terms import gate, weighted_sum
from verl_gdpo.verl_hooks.slow_scoring import SlowScoring

logger = logging.getLogger(__name__)


class GdpoRewardManager(RewardManagerBase):  # type: ignore[misc]  # verl is seen as Any
    """Decodes a response once, scores it, and returns named, finite Python floats.

    The scorer is `reward.custom_reward_function.path` if set; else ours, if we have one for the
    row's `data_source`, with the options of `reward.reward_kwargs`; else verl's default. A custom
    function is called as verl calls it, sync or async; besides what verl gives it,
    `extra_info["response_tokens"]` is the response's length in tokens. It returns {name: reward},
    where `score` is replaced by the weighted sum and what is no number is only logged, or one
    number, which is then the reward "acc". None is the value of a reward that does not apply to
    the sample. With built-in scorers, rewards that belong only to other data sources become None.

    What cannot be scored is reported under `ERROR_KEY` for verl-gdpo's trainer to stop the run,
    because verl's V1 trainer goes on after an exception in here. The others do not, and get the
    exception itself.
    """

    def __init__(
        self,
        config: Any,
        tokenizer: Any,
        compute_score: Callable[..., Any],
        reward_router_address: str | None = None,
        reward_model_tokenizer: Any = None,
    ) -> None:
        super().__init__(config, tokenizer, compute_score)
        self.settings = GdpoSettings.from_algorithm(config.algorithm)
        self.is_custom = config.reward.custom_reward_function.path is not None
        options = dict(config.reward.get("reward_kwargs") or {})
        self.scorer_options = {source: options_for(source, options) for source in TASK_OF}
        self.slow_scoring = SlowScoring()
        # not `trainer.use_v1`: that is true also in trainers which do not look at it
        self.reports_errors = bool(config.transfer_queue.enable)
        self.router_kwargs = (
            {}
            if reward_router_address is None
            else {
                "reward_router_address": reward_router_address,
                "reward_model_tokenizer": reward_model_tokenizer,
            }
        )

    async def run_single(self, data: Any) -> dict[str, Any]:
        """Score the last row of `data` (a session's rows; its last output is what counts)."""
        fields = data[-1].non_tensor_batch
        try:
            with self.slow_scoring.of(_label(fields)):
                result = await self._score(data[-1])
            return self._checked(result, fields["data_source"], fields.get("global_steps"))
        except (Exception, SystemExit) as error:
            message = _describe(error, fields)
            logger.error("verl-gdpo: %s\n%s", message, traceback.format_exc())
            if not self.reports_errors:
                raise RuntimeError(message) from error
            return {"reward_score": 0.0, "reward_extra_info": {ERROR_KEY: message}}

    async def _score(self, row: Any) -> Any:
        """What the scorer returns for one row, unchecked."""
        fields = row.non_tensor_batch
        response_ids = row.batch["responses"]
        length = fields.get("response_len")
        if length is None:  # verl 0.7.1, and where a whole batch is scored at once
            length = row.batch["attention_mask"][-len(response_ids) :].sum()
        length = int(length)
        response = await self._in_thread(
            self.tokenizer.decode, response_ids[:length], skip_special_tokens=True
        )
        data_source = fields["data_source"]
        ground_truth = (fields.get("reward_model") or {}).get("ground_truth")
        if not self.is_custom and data_source in TASK_OF:
            return await self._in_thread(
                TASK_OF[data_source].score,
                response,
                ground_truth,
                response_tokens=length,
                step=fields.get("global_steps"),
                **self.scorer_options[data_source],
            )
        score = functools.partial(
            self.compute_score,
            data_source=data_source,
            solution_str=response,
            ground_truth=ground_truth,
            extra_info=self._extra_info(fields, length),
            **self.router_kwargs,
        )
        if inspect.iscoroutinefunction(self.compute_score):
            return await score()
        result = await self._in_thread(score)
        return await result if inspect.isawaitable(result) else result

    def _extra_info(self, fields: Mapping[str, Any], length: int) -> dict[str, Any]:
        """What verl's own managers put into `extra_info`, and the response's length in tokens."""
        return {
            **(fields.get("extra_info") or {}),
            **(fields.get("tool_extra_fields") or {}),
            "num_turns": fields.get("__num_turns__"),
            "rollout_reward_scores": fields.get("reward_scores", {}),
            "experiment_name": self.config.trainer.experiment_name,
            "response_tokens": length,
        }

    def _checked(self, result: Any, data_source: str, step: int | None) -> dict[str, Any]:
        """verl's result for one sample: rewards as finite floats, and their weighted sum."""
        if result is None:
            raise ValueError("the scorer returned None; expected a number or {name: reward}")
        info = dict(result) if isinstance(result, Mapping) else {"acc": result}
        if not self.is_custom:
            task = TASK_OF.get(data_source)
            for verl_name, name in (task.verl_names if task else {}).items():
                if verl_name in self.settings.names and name in info:
                    info[verl_name] = info.pop(name)
            elsewhere = [n for n in self.settings.names if belongs_elsewhere(n, data_source)]
            info = {**dict.fromkeys(elsewhere), **info}
        if self.settings.rewards is None:
            terms = self.settings.terms_for(self._all_rewards(info))
        else:
            terms = self.settings.terms_for(info)
        for name in self.settings.names or terms:
            try:
                info[name] = value_or_error(info[name])
            except ValueError as error:
                raise ValueError(f"reward {name!r} {error}") from None
        if self.settings.rewards is None and self.is_custom:
            _check_sum(info, terms)
        score = weighted_sum(gate(info, terms), terms, step)
        # what Ray cannot send would fail the session without a word to the trainer
        plain = {name: as_json(value) for name, value in info.items()}
        return {"reward_score": score, "reward_extra_info": {**plain, "score": score}}

    def _all_rewards(self, info: dict[str, Any]) -> list[str]:
        """The names of what counts when none are configured: all numbers, but for `score`.

        Where `score` is the only number, it is the reward "acc", as a bare number would be.
        """
        named = [name for name in info if name != "score"]
        if not any(is_number(info[name]) for name in named) and is_number(info.get("score")):
            info["acc"] = info["score"]
            return ["acc"]
        counts = [name for name in named if info[name] is None or is_number(info[name])]
        if not counts:
            raise ValueError(f"the scorer returned no number: {reprlib.repr(info)}")
        return counts

    async def _in_thread(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        call = functools.partial(_call, function, *args, **kwargs)
        return await self.loop.run_in_executor(None, call)


def _check_sum(info: Mapping[str, Any], names: Iterable[str]) -> None:
    """Refuse a `score` that says other weights, or other rewards, than the sum of all numbers."""
    if not is_number(info.get("score")):
        return
    own, values = float(info["score"]), {name: info[name] for name in names}
    total = sum(value or 0.0 for value in values.values())
    if not math.isclose(own, total, rel_tol=SUM_TOLERANCE, abs_tol=SUM_TOLERANCE):
        raise ValueError(not_the_sum(own, values))


class ScorerEscape(RuntimeError):
    """Stands for an exception that must not leave a worker thread as it is."""


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The result of `function`, whose exceptions all reach the coroutine that waits for it.

    On Python 3.11 a StopIteration never would, a SystemExit would end the process, and what
    cancels a future would cancel the session.
    """
    try:
        return function(*args, **kwargs)
    except (StopIteration, concurrent.futures.CancelledError) as error:
        raise ScorerEscape from error
    except Exception:
        raise
    except BaseException as error:
        raise ScorerEscape from error


def _describe(error: BaseException, fields: Mapping[str, Any]) -> str:
    """One line that names the sample, the error and, outside this package, the line of code."""
    if isinstance(error, ScorerEscape) and error.__cause__ is not None:
        error = error.__cause__
    frame = traceback.extract_tb(error.__traceback__)[-1]
    place = (
        ""
        if Path(frame.filename).is_relative_to(Path(verl_gdpo.__file__).parent)
        else (f" [{frame.filename}:{frame.lineno}]")
    )
    reason = str(error)
    if not isinstance(error, ValueError) or not reason:
        reason = ": ".join(filter(None, [type(error).__name__, reason]))
    return f"reward manager gdpo, {_label(fields)}: {reason}{place}"


def _label(fields: Mapping[str, Any]) -> str:
    index = (fields.get("extra_info") or {}).get("index", "?")
    return (
        f"prompt uid {fields.get('uid', '?')}, data_source {fields.get('data_source', '?')!r}, "
        f"extra_info.index {index}"
    )


def runs_gdpo_manager(config: Any) -> bool:
    """Whether verl would make our manager, or a subclass of it, in its reward workers.

    False for a name that verl does not know, which it says by itself when it makes them.
    """
    manager = config.reward.reward_manager
    if manager.source == "register":
        return issubclass(REWARD_MANAGER.get(manager.name, object), GdpoRewardManager)
    from verl.trainer.ppo import reward

    if not hasattr(reward, "resolve_reward_manager_cls"):  # verl 0.7.1
        return False
    return issubclass(reward.resolve_reward_manager_cls(config), GdpoRewardManager)


def scored_rows(dataset: Any) -> Any | None:
    """The columns that say how rows are scored; None for a dataset class without such a table."""
    table = getattr(dataset, "dataframe", None)
    columns = ["data_source", "reward_model"]
    has_them = {*columns} <= {*getattr(table, "column_names", ())}
    return table.select_columns(columns) if has_them else None  # type: ignore[union-attr]


def node_and_manager(worker: Any) -> tuple[str, bool]:
    """The address of a reward worker's node, and whether its manager is ours; runs there."""
    return ray.util.get_node_ip_address(), isinstance(worker.reward_manager, GdpoRewardManager)


# verl's register() refuses a name that is taken; taking it is the purpose here
REWARD_MANAGER["gdpo"] = GdpoRewardManager

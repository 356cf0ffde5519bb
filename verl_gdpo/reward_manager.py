"""`reward.reward_manager.name=gdpo`: every reward of a sample under its own name.

Relies on verl 0.7.1 to 0.9: `verl.experimental.reward_loop.reward_manager`, there
`base.RewardManagerBase` with the coroutine `run_single(data) -> {"reward_score",
"reward_extra_info"}`, and `registry.REWARD_MANAGER`; `transfer_queue.enable`, true under V1 alone.
"""

import functools
import inspect
import logging
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase
from verl.experimental.reward_loop.reward_manager.registry import REWARD_MANAGER

from verl_gdpo.reward_rows import ERROR_KEY, value_or_error
from verl_gdpo.reward_terms import gate, weighted_sum
from verl_gdpo.rewards import SCORERS, VERL_NAMES, belongs_elsewhere
from verl_gdpo.settings import GdpoSettings

logger = logging.getLogger(__name__)


class GdpoRewardManager(RewardManagerBase):  # type: ignore[misc]  # verl is seen as Any
    """Decodes a response once, scores it, and returns named, finite Python floats.

    The scorer is `reward.custom_reward_function.path` if set; else ours, if we have one for the
    row's `data_source`, with the options of `reward.reward_kwargs`; else verl's default. A custom
    function is called as verl calls it, sync or async; besides what verl gives it,
    `extra_info["response_tokens"]` is the response's length in tokens. It returns {name: reward}
    (a key `score` is passed over, since `reward_score` is the weighted sum) or one number, which is
    then the reward "acc". None is the value of a reward that does not apply to the sample; of our
    scorers and verl's, so is a configured reward that only other data sources have.

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
        self.scorer_options = dict(config.reward.get("reward_kwargs") or {})
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
            result = await self._score(data[-1])
            return self._checked(result, fields["data_source"], fields.get("global_steps"))
        except Exception as error:
            message = _describe(error, fields)
            logger.error("verl-gdpo: %s\n%s", message, traceback.format_exc())
            if not self.reports_errors:
                raise RuntimeError(message) from error
            return {"reward_score": 0.0, "reward_extra_info": {ERROR_KEY: message}}

    async def _score(self, row: Any) -> Any:
        """What the scorer returns for one row, unchecked."""
        fields = row.non_tensor_batch
        response_ids = row.batch["responses"]
        length = int(row.batch["attention_mask"][-len(response_ids) :].sum())
        response = await self._in_thread(
            self.tokenizer.decode, response_ids[:length], skip_special_tokens=True
        )
        data_source = fields["data_source"]
        ground_truth = (fields.get("reward_model") or {}).get("ground_truth")
        if not self.is_custom and data_source in SCORERS:
            return await self._in_thread(
                SCORERS[data_source],
                response,
                ground_truth,
                response_tokens=length,
                step=fields.get("global_steps"),
                **self.scorer_options,
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
            for verl_name, name in VERL_NAMES.get(data_source, {}).items():
                if verl_name in self.settings.names and name in info:
                    info[verl_name] = info.pop(name)
            elsewhere = [n for n in self.settings.names if belongs_elsewhere(n, data_source)]
            info = {**dict.fromkeys(elsewhere), **info}
        terms = self.settings.terms_for(info)
        for name in self.settings.names or terms:
            try:
                info[name] = value_or_error(info[name])
            except ValueError as error:
                raise ValueError(f"reward {name!r} {error}") from None
        score = weighted_sum(gate(info, terms), terms, step)
        return {"reward_score": score, "reward_extra_info": {**info, "score": score}}

    async def _in_thread(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return await self.loop.run_in_executor(None, functools.partial(function, *args, **kwargs))


def _describe(error: Exception, fields: Mapping[str, Any]) -> str:
    """One line that names the sample, the error and, outside this package, the line of code."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    place = (
        ""
        if Path(frame.filename).is_relative_to(Path(__file__).parent)
        else (f" [{frame.filename}:{frame.lineno}]")
    )
    index = (fields.get("extra_info") or {}).get("index", "?")
    reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    return (
        f"reward manager gdpo, prompt uid {fields.get('uid', '?')}, "
        f"data_source {fields.get('data_source', '?')!r}, extra_info.index {index}: {reason}{place}"
    )


# verl's register() refuses a name that is taken; taking it is the purpose here
REWARD_MANAGER["gdpo"] = GdpoRewardManager

"""What verl's workers run in a case: an agent loop, a model and a scorer that do as they are told.

The rows of a case say it: `extra_info["sessions"]` has an entry a session (`stage.py` lists them).
"""

import json
import logging
import threading
from dataclasses import dataclass
from typing import Any

from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.workers.rollout.replica import TokenOutput

AGENT_LOOPS = "- {name: scripted, _target_: scripted.ScriptedLoop}\n"


@dataclass
class Scored:
    """A session that the agent loop scores itself, as environments do; verl then calls no manager.

    Args:
        info: verl's `reward_extra_info`; the default leaves it out.
        outputs: number of outputs; as verl's documentation says, the last one has the reward.
    """

    score: float
    info: Any = ...
    outputs: int = 1


class ScriptedLoop(SingleTurnAgentLoop):
    async def run(self, sampling_params, extra_info, session_id, **kwargs):
        script = extra_info["sessions"][session_id]
        if isinstance(script, BaseException):
            raise script
        said = [{}] * script.outputs if isinstance(script, Scored) else script
        outputs = [
            await super(ScriptedLoop, self).run({"says": as_text(text)}, **kwargs)
            for text in (said if isinstance(said, list) else [said])
        ]
        if isinstance(script, Scored):
            outputs[-1].reward_score = script.score
            if script.info is not ...:
                outputs[-1].extra_fields["reward_extra_info"] = script.info
        return outputs if len(outputs) > 1 else outputs[0]


def as_text(said):
    return said if isinstance(said, str) else json.dumps(said)


class ScriptedModel:
    """Takes the place of verl's client of the rollout servers."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    async def generate(self, request_id, *, prompt_ids, sampling_params, **more):
        steps = {"min_global_steps": 0, "max_global_steps": 0}
        return TokenOutput(
            token_ids=self.tokenizer.encode(sampling_params["says"]), extra_fields=steps
        )


# the scorer of the current case, as a function of what the model said
told = None
reached = threading.Event()  # a case may set it in its scorer
named = threading.Event()  # set when a log says what `listen` waits for


def compute_score(data_source, solution_str, ground_truth, extra_info):
    return told(json.loads(solution_str))


async def compute_score_async(data_source, solution_str, ground_truth, extra_info):
    return await told(json.loads(solution_str))


def listen(logger, text):
    """Let `named` wait for a line with `text` in the log."""
    named.clear()
    handler = logging.Handler()
    handler.emit = lambda record: text in record.getMessage() and named.set()
    logger.addHandler(handler)


def tell(worker, config, function):
    """Let a reward worker of verl read the configuration and make its manager again."""
    global told
    told = function
    reached.clear()
    worker.config = config
    worker._init_reward_fn()
    worker.reward_manager.loop = worker.loop  # Ray calls this function in another thread


def configure(worker, config):
    """Give a configuration to an agent loop worker of verl."""
    worker.config = config

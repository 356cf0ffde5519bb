"""An agent loop with two outputs in odd sessions, as after a summary of the conversation.

verl loads it through `actor_rollout_ref.rollout.agent.agent_loop_config_path`.
"""

from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

CONFIG = "- {name: two_outputs, _target_: two_outputs.TwoOutputs}\n"


class TwoOutputs(SingleTurnAgentLoop):
    async def run(self, sampling_params, raw_prompt, session_id, **kwargs):
        last = await super().run(sampling_params, raw_prompt=raw_prompt, **kwargs)
        if session_id % 2 == 0:
            return last
        # another prompt length, and an answer of any other length
        question = raw_prompt[-1:]
        return [await super().run(sampling_params, raw_prompt=question, **kwargs), last]

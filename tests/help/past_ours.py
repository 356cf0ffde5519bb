"""Lets verl go past one function of our table at a time, and prints what a run then does.

    FOLDER=folder python past_ours.py

The file `cases.json` there is a list of {kind: "v1" or "legacy", prompts: {prompt: how many tokens
the policy writes in each session}, row: [module, path], how, overrides}; a case may lack the last
three. Each is played in a fork of this process, which has imported verl, and not yet our plugin:
- how="unused": verl's functions call another function in the place of the one of the row;
- how="in verl's place": ours is not put in the place of verl's.

The run is one step and one validation: verl's agent loop worker, reward worker, trainer and
functions, with `scripted_trainers.py`. Ray and TransferQueue are doubles. It prints a line of JSON
a case: what was raised, which advantages the policy was updated with, and what was left behind.
"""

import asyncio
import importlib
import importlib.util
import inspect
import json
import os
import sys
import traceback
from pathlib import Path
from types import CodeType, SimpleNamespace

import agent_loop_worker as loops
import pytest
import ray
import transfer_queue as tq
from memory_queue import MemoryQueue
from tiny_chat_model import make_chat_model
from verl.experimental.agent_loop.agent_loop import (
    AgentLoopMetrics,
    AgentLoopOutput,
    AgentLoopWorker,
)
from verl.experimental.reward_loop import reward_loop
from verl.trainer.ppo import core_algos, ray_trainer  # noqa: F401
from verl.trainer.ppo.v1 import agent_loop_tq, get_trainer_cls, replay_buffer, trainer_base  # noqa: F401
from verl_batch import verl_config

FOLDER = Path(os.environ["FOLDER"])
HELP = Path(loops.__file__).parent
LATER = "_of_a_later_verl"

SCORER = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    length = extra_info["response_tokens"]
    return {"long": float(length > 2), "even": float(length % 2 == 0), "seen": None}
"""


def load_scripted():
    """`scripted_trainers.py` as a module of verl's."""
    name = "verl.trainer.scripted_trainers"
    spec = importlib.util.spec_from_file_location(name, HELP / "scripted_trainers.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    for script, cls in (
        (module.OfV1, trainer_base.PPOTrainer),
        (module.OfLegacy, ray_trainer.RayPPOTrainer),
    ):
        for method, function in vars(script).items():
            if callable(function):
                setattr(cls, method, function)


def inherit_again():
    """Let verl's actor class have the methods of its base class, whatever becomes of them.

    Ray has copied them into the class when it was made, which in a run is after our plugin is
    loaded.
    """
    for name, function in list(vars(loops.WORKER_OF_V1).items()):
        own = vars(AgentLoopWorker).get(name)
        if own is not None and inspect.isfunction(function) and inspect.unwrap(function) is own:
            delattr(loops.WORKER_OF_V1, name)


# --- what an agent loop and a reward worker are replaced by ---------------------------------------


@loops.register(loops.SELF_SCORED)
class Writes(loops.AgentLoopBase):
    async def run(self, sampling_params, raw_prompt, **kwargs):
        count = given[raw_prompt[0]["content"]].pop(0)
        if count == 0:
            return []
        return AgentLoopOutput(
            prompt_ids=[5, 6],
            response_ids=[7] * count,
            response_mask=[1] * count,
            num_turns=2,
            metrics=AgentLoopMetrics(),
            extra_fields={},
        )


given = {}


class Rewards:
    """A reward worker of verl's in this process; each event loop gets one of its own."""

    def __init__(self, config):
        self.config, self.workers = config, {}
        self.compute_score = SimpleNamespace(remote=self._score)
        self.__ray_call__ = SimpleNamespace(remote=lambda function, *args: function(self, *args))

    def _worker(self, loop):
        if loop not in self.workers:
            self.workers[loop] = reward_loop.RewardLoopWorker(self.config)
        return self.workers[loop]

    async def _score(self, data):
        return await self._worker(asyncio.get_running_loop()).compute_score(data)

    @property
    def reward_manager(self):
        async def made():
            return self._worker(asyncio.get_running_loop()).reward_manager

        return asyncio.run(made())


class Script:
    """The rollouts of a run; and what became of it."""

    def __init__(self, kind, config, prompts):
        self.kind, self.lengths, self.prompts, self.trained = kind, prompts, [*prompts], None
        cls = loops.WORKER_OF_V1 if kind == "v1" else AgentLoopWorker
        self.worker = loops.make_worker(cls, FOLDER / "model")
        self.worker.config = config
        self.tokenizer = self.worker.tokenizer
        double = Rewards(config)
        self.worker.reward_loop_worker_handles = [double]
        self.rewards = SimpleNamespace(
            reward_loop_workers=[double], reward_loop_worker_handles=[double]
        )

    def write(self):
        given.update({prompt: [*lengths] for prompt, lengths in self.lengths.items()})

    def rollouts(self):
        """Those of V1, which are there before the trainer samples."""
        self.write()
        loops.generate_on_v1(self.worker, self.prompts, self.prompts, ["d"] * len(self.prompts))

    def validate(self, batch):
        self.write()
        loops.generate_on_v1(
            self.worker, self.prompts, [*batch["uid"]], ["d"] * len(self.prompts), validate=True
        )

    def batch(self):
        self.write()
        uids = [prompt for prompt, lengths in self.lengths.items() for _ in lengths]
        return loops.legacy_batch(uids, uids, ["d"] * len(uids))

    def generate(self, data):
        if data.meta_info.get("validate"):
            self.write()
        return loops.generate_on_legacy([self.worker], data)

    def validation(self):
        sources = loops.objects(["d"] * len(self.prompts))
        if self.kind == "v1":
            return [{"raw_prompt": loops.messages_of(self.prompts), "data_source": sources}]
        batch = loops.legacy_batch(self.prompts, self.prompts, ["d"] * len(self.prompts))
        return [{**batch.non_tensor_batch, **batch.batch}]

    def update(self, trainer, batch):
        """What the policy would be updated with."""
        if self.kind == "v1":
            rows = self.queue.rows
            self.trained = {key: rows[key]["advantages"].tolist()[0] for key in batch.keys}
        else:
            uids = batch.non_tensor_batch["uid"]
            first = batch.batch["advantages"][:, 0].tolist()
            self.trained = {
                f"{uid}_{number % 4}_0": value
                for number, (uid, value) in enumerate(zip(uids, first, strict=True))
            }


# --- how verl goes past ours ----------------------------------------------------------------------


def renamed(code, name):
    """The code with another name in the place of this one."""
    names = tuple(name + LATER if each == name else each for each in code.co_names)
    constants = tuple(
        renamed(each, name) if isinstance(each, CodeType) else each for each in code.co_consts
    )
    return code.replace(co_names=names, co_consts=constants)


def classes_and_functions():
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] != "verl":
            continue
        yield module, [value for value in vars(module).values() if callable(value)]
        for value in list(vars(module).values()):
            value = getattr(getattr(value, "__ray_metadata__", None), "modified_class", value)
            if isinstance(value, type) and value.__module__ == module_name:
                yield value, [*vars(value).values()]


def go_past(module, path):
    """Let all of verl's code call another name, which has verl's function."""
    owner_name, _, name = path.rpartition(".")
    of_class = None
    if owner_name:
        of_class = getattr(importlib.import_module(module), owner_name)
        of_class = getattr(getattr(of_class, "__ray_metadata__", None), "modified_class", of_class)
    for owner, functions in [*classes_and_functions()]:
        for function in functions:
            while hasattr(function, "__wrapped__"):
                function = function.__wrapped__
            code = getattr(function, "__code__", None)
            if code is not None and getattr(function, "__module__", "").startswith("verl."):
                function.__code__ = renamed(code, name)
        if of_class is None:
            is_place = not isinstance(owner, type)
        else:
            is_place = isinstance(owner, type) and issubclass(owner, of_class)
        if is_place and name in vars(owner):
            setattr(owner, name + LATER, vars(owner)[name])


def play(case):
    row, how = case.get("row"), case.get("how")
    if row and how == "unused":
        go_past(*row)
    patch = pytest.MonkeyPatch()
    queue = MemoryQueue(patch)
    patch.setattr(tq, "init", lambda *_: None)
    patch.setattr(ray, "get", list)
    patch.setattr(ray.util, "get_node_ip_address", lambda: "10.0.0.7")
    from verl_gdpo.hooks import extend

    if row and how != "unused":
        replace = extend._replace

        def replace_others(owner, name, extension):
            if [extension.module, extension.path] != row:
                replace(owner, name, extension)

        patch.setattr(extend, "_replace", replace_others)
    import verl_gdpo.plugin  # noqa: F401

    kind = case["kind"]
    out = FOLDER / f"run_{os.getpid()}"
    config = verl_config(
        f"reward.custom_reward_function.path={FOLDER}/scorer.py",
        f"actor_rollout_ref.model.path={FOLDER}/model",
        f"trainer.rollout_data_dir={out}/rollouts",
        f"trainer.validation_data_dir={out}/validation",
        f"trainer.use_v1={kind == 'v1'}",
        "transfer_queue.enable=" + str(kind == "v1"),
        f"data.train_batch_size={len(case['prompts'])}",
        "data.gen_batch_size=1",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.rollout.val_kwargs.n=4",
        "actor_rollout_ref.rollout.agent.num_workers=1",
        "actor_rollout_ref.rollout.agent.default_agent_loop=" + loops.SELF_SCORED,
        *case.get("overrides", ()),
    )
    script = Script(kind, config, case["prompts"])
    script.queue = queue
    cls = get_trainer_cls("sync") if kind == "v1" else ray_trainer.RayPPOTrainer
    cls.script = script
    trainer = cls(config)
    trainer.init()
    fit = getattr(cls, "fit" + LATER, cls.fit)
    if kind == "v1":
        trainer.replay_buffer.poll_interval = 0.01
        script.rollouts()
        fit(trainer, None)
    else:
        fit(trainer)
    dump = [json.loads(line) for line in (out / "rollouts" / "7.jsonl").read_text().splitlines()]
    return {
        "trained": script.trained,
        "dumped": sorted(dump[0]),
        "metrics": sorted(name for name in trainer.metrics if name.startswith("gdpo/")),
        "validated": trainer.validated,
        "validation_dumps": {
            str(file.relative_to(out / "validation")): len(file.read_text().splitlines())
            for file in sorted((out / "validation").rglob("*.jsonl"))
        },
    }


def main():
    (FOLDER / "scorer.py").write_text(SCORER)
    load_scripted()
    inherit_again()
    make_chat_model(FOLDER / "model")
    tokenizer = reward_loop.hf_tokenizer(str(FOLDER / "model"))
    reward_loop.hf_tokenizer = lambda *_, **__: tokenizer  # one for all reward workers
    verl_config()  # which is composed once for all cases
    cases = json.loads((FOLDER / "cases.json").read_text())
    for number, case in enumerate(cases):
        said = FOLDER / f"stderr_{number}"
        told = FOLDER / f"told_{number}"
        pid = os.fork()
        if pid == 0:
            os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT), 2)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            try:
                result = play(case)
            except BaseException as error:
                result = {"raised": f"{type(error).__name__}: {error}"}
                traceback.print_exc()
            told.write_text(json.dumps(result, default=str))
            os._exit(0)
        os.waitpid(pid, 0)
        result = json.loads(told.read_text())
        lines = said.read_text().splitlines()
        warned = [line for line in lines if line.startswith("verl-gdpo: WARNING")]
        print(json.dumps({**case, **result, "warned": warned}))


main()

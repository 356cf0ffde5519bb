"""Lets verl go past one function of our table at a time, and prints what a run then does.

    FOLDER=folder python past_ours.py

The file `cases.json` there is a list of {kind, prompts: {prompt: how many tokens the policy writes
in each session}, row: [module, path], how, overrides}; a case may lack the last three. Each is
played in a fork of this process, which has imported verl, and not yet our plugin:
- how="unused": verl's functions call another function in the place of the one of the row;
- how="in verl's place": ours is not put in the place of verl's.

The run is one step and one validation: verl's agent loop worker, reward worker, trainer and
functions, with `scripted_trainers.py`. Ray and TransferQueue are doubles. Its kinds:
- "v1" and "legacy": the trainer;
- "main": V1, started by verl's main module, as `python -m` runs it;
- "fully_async": the trainer and the rollouter of `fully_async_policy`, whose first sample fails.

It prints a line of JSON a case: what was raised, which advantages the policy was updated with, what
was left behind, and how often a frame was looked for.
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
from types import CodeType, ModuleType, SimpleNamespace

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


def compute_sum(data_source, solution_str, ground_truth, extra_info):  # of a run without gdpo
    return float(len(solution_str))
"""
FULLY_ASYNC = "verl.experimental.fully_async_policy"
# What verl's main module looks at before it starts Ray.
MAIN_KEYS = [
    "actor_rollout_ref.actor.ppo_mini_batch_size=1",
    "actor_rollout_ref.actor.use_dynamic_bsz=True",
    "actor_rollout_ref.rollout.name=vllm",
    "trainer.n_gpus_per_node=1",
]


def load_scripted():
    """`scripted_trainers.py` as a module of verl's."""
    name = "verl.trainer.scripted_trainers"
    spec = importlib.util.spec_from_file_location(name, HELP / "scripted_trainers.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    follow_script(trainer_base.PPOTrainer, module.OfV1)
    follow_script(ray_trainer.RayPPOTrainer, module.OfLegacy)
    return module


def follow_script(cls, script):
    """Let a class of verl have the methods of a scripted one, as if they were verl's own."""
    for method, function in vars(script).items():
        if callable(function):
            setattr(cls, method, function)


def inherit_again(cls):
    """Let an actor class of verl have the methods of its base classes, whatever becomes of them.

    Ray has copied them into the class when it was made, which in a run is after our plugin is
    loaded. The first base is the class as verl defines it, whose methods stay with Ray's.
    """
    for name, function in list(vars(cls).items()):
        if not inspect.isfunction(function):
            continue
        for base in cls.__mro__[2:]:
            if vars(base).get(name) is inspect.unwrap(function):
                delattr(cls, name)
                break


def load_fully_async(scripted):
    """The classes of `fully_async_policy` that Ray would send to the trainer and the rollouter."""
    classes = []
    for name, script in (
        ("FullyAsyncTrainer", scripted.OfFullyAsyncTrainer),
        ("FullyAsyncRollouter", scripted.OfFullyAsyncRollouter),
    ):
        module_name = "fully_async_" + name.removeprefix("FullyAsync").lower()
        module = importlib.import_module(f"{FULLY_ASYNC}.{module_name}")
        cls = getattr(module, name).__ray_metadata__.modified_class
        inherit_again(cls)
        follow_script(cls, script)
        classes.append(cls)
    return classes


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

    def __init__(self, is_v1, config, prompts):
        self.is_v1, self.lengths, self.prompts, self.trained = is_v1, prompts, [*prompts], None
        cls = loops.WORKER_OF_V1 if is_v1 else AgentLoopWorker
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
        if self.is_v1:
            return [{"raw_prompt": loops.messages_of(self.prompts), "data_source": sources}]
        batch = loops.legacy_batch(self.prompts, self.prompts, ["d"] * len(self.prompts))
        return [{**batch.non_tensor_batch, **batch.batch}]

    def update(self, trainer, batch):
        """What the policy would be updated with."""
        if self.is_v1:
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
    loaded = importlib.import_module(module)
    if owner_name:
        of_class = getattr(loaded, owner_name)
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


def load_main(row, how):
    """verl's main module, as `python -m` runs it."""
    source = Path(sys.modules["verl"].__path__[0], "trainer", "main_ppo.py")
    start = 'if __name__ == "__main__":\n    main()\n'
    text = source.read_text()
    assert start in text
    module = ModuleType("__main__")
    module.__file__ = str(source)
    exec(compile(text.replace(start, ""), source, "exec"), vars(module))
    # Hydra looks here for the agent loop of this file.
    module.Writes = Writes
    if row and how == "unused":
        name = row[1]
        function = inspect.unwrap(module.main)
        function.__code__ = renamed(function.__code__, name)
        setattr(module, name + LATER, inspect.unwrap(getattr(module, name)))
    sys.modules["__main__"] = module
    return module


looks = []  # for a trainer, in the frames of the functions that wait


def looking(running_trainer):
    def look():
        looks.append(1)
        return running_trainer()

    return look


def play(case, scripted):
    kind, row, how = case["kind"], case.get("row"), case.get("how")
    if kind == "fully_async":
        classes = load_fully_async(scripted)
    if row and how == "unused":
        go_past(*row)
    patch = pytest.MonkeyPatch()
    queue = MemoryQueue(patch)
    patch.setattr(tq, "init", lambda *_: None)
    patch.setattr(ray, "get", list)
    patch.setattr(ray, "init", lambda **_: None)
    patch.setattr(ray, "nodes", list)
    patch.setattr(ray.util, "get_node_ip_address", lambda: "10.0.0.7")
    from verl_gdpo.hooks import extend, net

    if row and how != "unused":
        replace = extend._replace

        def replace_others(owner, name, extension):
            if [extension.module, extension.path] != row:
                replace(owner, name, extension)

        patch.setattr(extend, "_replace", replace_others)
    patch.setattr(net, "running_trainer", looking(net.running_trainer))
    import verl_gdpo.plugin  # noqa: F401

    out = FOLDER / f"run_{os.getpid()}"
    is_v1 = kind in ("v1", "main")
    config = verl_config(
        f"reward.custom_reward_function.path={FOLDER}/scorer.py",
        f"actor_rollout_ref.model.path={FOLDER}/model",
        f"trainer.rollout_data_dir={out}/rollouts",
        f"trainer.validation_data_dir={out}/validation",
        f"trainer.use_v1={is_v1}",
        f"transfer_queue.enable={is_v1}",
        f"data.train_batch_size={len(case['prompts'])}",
        "data.gen_batch_size=1",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.rollout.val_kwargs.n=4",
        "actor_rollout_ref.rollout.agent.num_workers=1",
        "actor_rollout_ref.rollout.agent.default_agent_loop=" + loops.SELF_SCORED,
        *(MAIN_KEYS if kind == "main" else []),
        *case.get("overrides", ()),
    )
    script = Script(is_v1, config, case["prompts"])
    script.queue = queue
    played = {}
    if kind == "v1":
        trainer = train_on_v1(script, config)
    elif kind == "legacy":
        trainer = train_on_legacy(script, config)
    elif kind == "main":
        trainer = train_from_main(script, config, row, how)
    else:
        trainer, played["rollouter"] = train_fully_async(script, config, *classes)
    dump = [json.loads(line) for line in (out / "rollouts" / "7.jsonl").read_text().splitlines()]
    return {
        **played,
        "trained": script.trained,
        "dumped": sorted(dump[0]),
        "metrics": sorted(name for name in trainer.metrics if name.startswith("gdpo/")),
        "validated": trainer.validated,
        "validation_dumps": {
            str(file.relative_to(out / "validation")): len(file.read_text().splitlines())
            for file in sorted((out / "validation").rglob("*.jsonl"))
        },
    }


def train_on_v1(script, config):
    cls = get_trainer_cls("sync")
    cls.script = script
    trainer = cls(config)
    trainer.init()
    trainer.replay_buffer.poll_interval = 0.01
    script.rollouts()
    fit_of(cls)(trainer, None)
    return trainer


def train_on_legacy(script, config):
    cls = ray_trainer.RayPPOTrainer
    cls.script = script
    trainer = cls(config)
    trainer.init()
    fit_of(cls)(trainer)
    return trainer


def fit_of(cls):
    """The method of a trainer that verl calls: in a later verl, it may have another name."""
    return getattr(cls, "fit" + LATER, cls.fit)


def train_from_main(script, config, row, how):
    main = load_main(row, how)
    trainers = []

    def run(config):
        trainers.append(train_on_v1(script, config))
        return []

    runner = SimpleNamespace(run=SimpleNamespace(remote=run))
    main.TaskRunnerV1 = SimpleNamespace(remote=lambda: runner)
    inspect.unwrap(main.main)(config)
    return trainers[0]


def train_fully_async(script, config, trainer_cls, rollouter_cls):
    """The trainer, and what the `fit` of the rollouter has raised."""
    for cls in (trainer_cls, rollouter_cls):
        cls.script = script
    # Ray has the methods of an actor before it makes one.
    train, roll_out = fit_of(trainer_cls), fit_of(rollouter_cls)
    trainer = trainer_cls(config, script.tokenizer, {}, None)
    asyncio.run(train(trainer))

    async def make_and_roll_out():
        await roll_out(rollouter_cls(config, script.tokenizer))

    try:
        asyncio.run(make_and_roll_out())
    except Exception as error:
        return trainer, f"{type(error).__name__}: {error}"
    return trainer, None


def main():
    (FOLDER / "scorer.py").write_text(SCORER)
    scripted = load_scripted()
    inherit_again(loops.WORKER_OF_V1)
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
                result = play(case, scripted)
            except BaseException as error:
                result = {"raised": f"{type(error).__name__}: {error}"}
                traceback.print_exc()
            result["looked"] = len(looks)
            told.write_text(json.dumps(result, default=str))
            os._exit(0)
        os.waitpid(pid, 0)
        result = json.loads(told.read_text())
        lines = said.read_text().splitlines()
        warned = [line for line in lines if line.startswith("verl-gdpo: WARNING")]
        print(json.dumps({**case, **result, "warned": warned}))


main()

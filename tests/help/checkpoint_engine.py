"""Saves and loads checkpoints with verl's FSDP engine, as the trainer's workers do.

python checkpoint_engine.py RANKS '[["save", "FOLDER", "MODEL", "key=value", ...], ...]'

A key with a dot is one of the model, such as `model.lora_rank`; another one is the engine's. For
each case it prints a line: a digest of the weights as rank 0 has them, or, with one rank, the error
of a load.
"""

import hashlib
import json
import os
import socket
import sys

import torch
import yaml
from torch import distributed, multiprocessing

OUTCOME = "outcome "  # what such a line begins with


def digest(engine):
    found = hashlib.sha256()
    for parameter in engine.module.state_dict().values():
        full = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        found.update(full.float().numpy().tobytes())
    return found.hexdigest()


def outcome(what, folder, model, model_keys, engine_keys):
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine import EngineRegistry

    padded = {"use_remove_padding": False, "override_config": {"attn_implementation": "sdpa"}}
    model_keys = {**padded, **model_keys}
    contents = ["model", "optimizer", "extra"]
    engine_keys = {"strategy": "fsdp2", "use_torch_compile": False, **engine_keys}
    engine = EngineRegistry.new(
        model_type="language_model",
        backend=engine_keys["strategy"],
        model_config=HFModelConfig(path=model, **model_keys),
        engine_config=FSDPEngineConfig(**engine_keys),
        optimizer_config=FSDPOptimizerConfig(lr=1e-3, total_training_steps=10),
        checkpoint_config=CheckpointConfig(save_contents=contents, load_contents=contents),
    )
    engine.initialize()
    if what == "save":
        with torch.no_grad():
            for parameter in engine.module.parameters():
                parameter.add_(1)
        engine.save_checkpoint(local_path=folder)
    else:
        engine.load_checkpoint(local_path=folder)
    return digest(engine)


def work(rank, ranks, port, cases):
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), MASTER_PORT=str(port)
    )
    distributed.init_process_group("gloo")
    for what, *case in cases:
        try:
            found = outcome(what, *case)
        except Exception as error:
            if what == "save" or ranks > 1:  # another rank could wait for this one
                raise
            found = repr(error)
        if rank == 0:
            print(OUTCOME + json.dumps(found), flush=True)
    distributed.destroy_process_group()


def case_of(what, folder, model, *keys):
    given = {key: yaml.safe_load(value) for key, value in (one.split("=", 1) for one in keys)}
    model_keys = {k.removeprefix("model."): v for k, v in given.items() if k.startswith("model.")}
    engine_keys = {key: value for key, value in given.items() if "." not in key}
    return what, folder, model, model_keys, engine_keys


def main():
    ranks, cases = int(sys.argv[1]), [case_of(*one) for one in json.loads(sys.argv[2])]
    os.environ.update(MASTER_ADDR="127.0.0.1", VERL_PLATFORM="cpu")
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    multiprocessing.spawn(work, (ranks, port, cases), nprocs=ranks)


if __name__ == "__main__":
    main()

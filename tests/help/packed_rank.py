"""One rank of `test_attention.py`: python packed_rank.py FOLDER MODEL

Packed rows go through verl's engine, on two ranks. Each row alone goes through the model of
transformers, with its eager attention. Writes how far outputs and gradients are apart at most.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from tensordict import TensorDict
from transformers import AutoModelForCausalLM
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine import EngineRegistry

from verl_gdpo.tools.run import attention

RANK, FOLDER, MODEL = int(os.environ["RANK"]), Path(sys.argv[1]), sys.argv[2]
LENGTHS = ((5, 1, 9, 1, 1, 3), (7,))  # of the rows of each rank
FLOAT32 = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
CALLS = []


def rows_of(rank):
    generator = torch.Generator().manual_seed(rank)
    # without 0, which verl takes for padding: its embedding gets no gradient
    return [torch.randint(1, 64, (length,), generator=generator) for length in LENGTHS[rank]]


def loss_of(log_probs):
    """Of the log-probabilities of a row; the last one is of the next row's first token."""
    return log_probs[:-1].pow(2).sum()


def one_by_one():
    """Log-probabilities of this rank's rows, and the gradients that FSDP2 averages over ranks."""
    model = AutoModelForCausalLM.from_pretrained(MODEL, attn_implementation="eager").float()
    model.train()
    mine = []
    for rank in (0, 1):
        for row in rows_of(rank):
            logits = model(row[None], use_cache=False).logits[0]
            found = logits[:-1].log_softmax(-1).gather(-1, row[1:, None]).squeeze(-1)
            found.pow(2).sum().div(2).backward()
            mine += [found.detach()] if rank == RANK else []
    return mine, {name: parameter.grad for name, parameter in model.named_parameters()}


def packed(is_fused, **engine_keys):
    options = {"impl_backend": "torch", "head_in_root": True} if is_fused else {}
    engine = EngineRegistry.new(
        model_type="language_model",
        backend="fsdp2",
        model_config=HFModelConfig(
            path=MODEL,
            use_remove_padding=True,
            use_fused_kernels=is_fused,
            fused_kernel_options=options,
            enable_gradient_checkpointing=True,
            override_config={"attn_implementation": attention.SDPA},
        ),
        engine_config=FSDPEngineConfig(
            strategy="fsdp2", use_torch_compile=False, mixed_precision=FLOAT32, **engine_keys
        ),
        optimizer_config=FSDPOptimizerConfig(lr=1e-3, total_training_steps=10),
        checkpoint_config=CheckpointConfig(),
    )
    engine.initialize()
    rows = rows_of(RANK)
    positions = [torch.arange(len(row)) for row in rows]
    batch = TensorDict(
        {
            "input_ids": torch.nested.as_nested_tensor(rows, layout=torch.jagged),
            "position_ids": torch.nested.as_nested_tensor(positions, layout=torch.jagged),
        },
        batch_size=[len(rows)],
    )
    tensordict_utils.assign_non_tensor(
        batch, use_remove_padding=True, use_fused_kernels=is_fused, temperature=1.0
    )
    found = []

    def loss(model_output, **_):
        found[:] = model_output["log_probs"].unbind()
        return sum(map(loss_of, found)), {}

    with engine.train_mode():
        total, _ = engine.forward_step(batch, loss_function=loss, forward_only=False)
        total.backward()
        gradients = {
            name: parameter.grad.full_tensor()
            for name, parameter in engine.module.named_parameters()
        }
    return [row[:-1].detach() for row in found], gradients


def difference(one, other):
    """The largest, over outputs and over gradients as shares of the largest."""
    outputs = [a - b for a, b in zip(one[0], other[0], strict=True) if len(a)]
    assert {*one[1]} == {*other[1]}
    gradients = [(one[1][name] - g) / g.abs().max() for name, g in other[1].items()]
    return max(float(part.abs().max()) for part in outputs + gradients)


original = attention.packed_sdpa


def counted(module, query, *arguments, **options):
    CALLS.append(query.shape[2])
    return original(module, query, *arguments, **options)


attention.packed_sdpa = counted
attention.make_known()
torch.set_num_threads(1)
dist.init_process_group("gloo")
expected = one_by_one()
worst = {
    "plain": difference(packed(False), expected),
    "fused": difference(packed(True), expected),
    "to a fixed length": difference(
        packed(True, pad_to_length=True, pad_to_length_bucket=32), expected
    ),
}
(FOLDER / f"{RANK}.json").write_text(json.dumps({"worst": worst, "tokens": CALLS}))
dist.barrier()
dist.destroy_process_group()

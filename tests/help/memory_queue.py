"""Replaces TransferQueue by two dicts in memory: {key: tag} and {key: fields}."""

from collections import Counter
from types import SimpleNamespace

import torch
import transfer_queue as tq
from tensordict import NonTensorStack, TensorDict

from verl_gdpo.algorithm.values import ROLLOUT_KEY


class MemoryQueue:
    """Counts what is read: {(field, number of rows): times}."""

    def __init__(self, monkeypatch):
        self.tags, self.rows, self.reads = {}, {}, Counter()
        names = ("kv_list", "kv_batch_get", "kv_batch_put", "kv_clear")
        for name in (*names, "async_kv_put", "async_kv_batch_put"):
            monkeypatch.setattr(tq, name, getattr(self, name))

    def add_group(self, uid, infos, lengths, partition="train", step=1, **fields):
        """A finished prompt with a row a session, as verl's agent loop leaves them."""
        prompt = {"is_prompt": True, "global_steps": step, "status": "finished"}
        self.tags[uid] = (partition, prompt)
        for session, (info, length) in enumerate(zip(infos, lengths, strict=True)):
            key = f"{uid}_{session}_0"
            self.tags[key] = (partition, {"response_len": length, "seq_len": length + 2})
            score = float(info.get("score", 0.0))
            # as our agent loop workers mark each row
            rollout = {"generated_tokens": length, "tool_seconds": 0.0}
            info = {ROLLOUT_KEY: rollout, **info}
            self.rows[key] = {
                "uid": uid,
                "data_source": "d",
                "extra_fields": {"reward_extra_info": info},
                "prompts": torch.tensor([5, 6]),
                "responses": torch.arange(length),
                "response_mask": torch.ones(length, dtype=torch.long),
                "rm_scores": torch.tensor([0.0] * (length - 1) + [score]),
                "reward_model": {"ground_truth": "4"},
                "num_turns": 2,
                **fields,
            }

    def kv_list(self):
        partitions = {}
        for key, (partition, tag) in self.tags.items():
            partitions.setdefault(partition, {})[key] = tag
        return partitions

    def kv_batch_get(self, keys, partition_id, select_fields):
        assert partition_id in ("train", "val")
        fields = {}
        for name in set(select_fields) & set(self.rows[keys[0]]):
            self.reads[name, len(keys)] += 1
            column = [self.rows[key][name] for key in keys]
            is_tensor = isinstance(column[0], torch.Tensor)
            fields[name] = (
                torch.nested.as_nested_tensor(column, layout=torch.jagged)
                if is_tensor
                else NonTensorStack(*column)
            )
        return TensorDict(fields, batch_size=len(keys))

    def kv_batch_put(self, keys, partition_id, fields=None, tags=None):
        for name, column in fields.items() if fields is not None else ():
            for key, value in zip(keys, column.unbind(), strict=True):
                self.rows[key][name] = value
        for key, tag in zip(keys, tags or [], strict=bool(tags)):
            self.tags[key] = (partition_id, tag)
        tags = [self.tags[key][1] for key in keys]
        return SimpleNamespace(keys=keys, tags=tags, partition_id=partition_id)

    def kv_clear(self, keys, partition_id):
        for key in keys:
            del self.tags[key]

    async def async_kv_put(self, key, partition_id, tag):
        """Only verl's agent loop worker puts tags by themselves, and only those of prompts."""
        self.tags[key] = (partition_id, {"is_prompt": True, "global_steps": 7, **tag})

    async def async_kv_batch_put(self, keys, fields, tags, partition_id):
        """Rows with all their fields, as verl's agent loop worker makes them."""
        columns = {name: list(column) for name, column in fields.items()}
        for number, (key, tag) in enumerate(zip(keys, tags, strict=True)):
            self.tags[key] = (partition_id, tag)
            row = {name: column[number] for name, column in columns.items()}
            self.rows[key] = {
                name: getattr(value, "data", value)
                if not isinstance(value, torch.Tensor)
                else value
                for name, value in row.items()
            }

"""What verl does when a run goes on with other settings.

The first tests ask verl's own objects why a key of `resume_rules.yaml` must not change. The last
one stops and resumes a whole run.
"""

import json
import subprocess
import sys

import checkpoint_engine
import pytest
import torch
from broken_training import SAVED, Training, check_resumed, train_until_killed
from omegaconf import OmegaConf
from torchdata.stateful_dataloader import StatefulDataLoader
from verl.trainer.ppo.utils import create_rl_sampler
from verl.utils.torch_functional import (
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
)

from verl_gdpo.tools.run.starts import starts_of
from workshop.tiny_policy.model import make_tiny_model

ROWS, BATCH, TAKEN = 20, 4, 2


def loader(rows=ROWS, batch=BATCH, seed=0, shuffle=True, workers=0):
    """As verl's trainers make it; the rows are their numbers."""
    sampler = create_rl_sampler(
        OmegaConf.create({"shuffle": shuffle, "seed": seed}), [*range(rows)]
    )
    return StatefulDataLoader(
        [*range(rows)], batch_size=batch, num_workers=workers, drop_last=True, sampler=sampler
    )


def after_resume(**changed):
    """(the rows that a run would have gone on with, those after a resume with a change)."""
    first = loader()
    batches = iter(first)
    for _ in range(TAKEN):
        next(batches)
    state = first.state_dict()
    resumed = loader(**changed)
    resumed.load_state_dict(state)
    return torch.cat([*batches]).tolist(), torch.cat([*resumed]).tolist()


@pytest.mark.parametrize("changed", [{}, {"seed": 1}, {"batch": BATCH // 2}], ids=str)
def test_a_resume_goes_on_with_the_rows_that_are_left(changed):
    """verl divides its steps by the number of batches to know in which epoch it is."""
    expected, found = after_resume(**changed)
    assert found == expected and len(found) == ROWS - TAKEN * BATCH


def test_more_rows_are_another_order():
    """Rows that the run has seen come again in the same epoch."""
    expected, found = after_resume(rows=2 * ROWS)
    seen = {*range(ROWS)} - {*expected}
    assert found[: len(expected)] != expected
    assert seen & {*found}


def test_other_numbers_of_loader_workers_are_an_error():
    with pytest.raises(AssertionError):
        after_resume(workers=2)


def optimizer(**settings):
    return torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))], **settings)


def rate_after_resume(make, before, after, at=30):
    """The learning rate's share of the peak at a step, and after a resume with more steps."""
    first = make(optimizer(lr=1.0), before)
    for _ in range(at):
        first.optimizer.step()
        first.step()
    resumed = make(optimizer(lr=1.0), after)
    resumed.load_state_dict(first.state_dict())
    resumed.optimizer.load_state_dict(first.optimizer.state_dict())
    was = first.get_last_lr()[0]
    resumed.optimizer.step()
    resumed.step()
    return was, resumed.get_last_lr()[0]


def test_more_steps_move_a_cosine_rate():
    was, now = rate_after_resume(lambda of, n: get_cosine_schedule_with_warmup(of, 0, n), 100, 1000)
    assert was == pytest.approx(0.79, abs=0.01) and now > 0.99


def test_more_steps_do_not_move_a_constant_rate():
    was, now = rate_after_resume(lambda of, n: get_constant_schedule_with_warmup(of, 0), 100, 1000)
    assert was == now == 1.0


LORA = "model.lora_rank=4"
# (name of the checkpoint, model, settings, what the error says)
OF_ONE_RANK = [
    ("plain", "wide", [], "size mismatch for lm_head.weight"),
    ("plain", "model", [LORA], "Unexpected key"),
    ("lora", "model", [], "Unexpected key"),
    ("lora", "model", ["model.lora_rank=8"], "size mismatch for base_model"),
    ("lora", "model", [LORA, 'model.target_modules=["q_proj"]'], "Unexpected key"),
]
OF_TWO_RANKS = [
    ("plain", "model", [], "model_world_size_2_rank_"),  # the rank that ends first
    ("two", "model", ["fsdp_size=1"], "different meshes"),
]
OF_MEMORY = [
    [],
    ["offload_policy=True"],
    ["param_offload=True", "optimizer_offload=True"],
    ["reshard_after_forward=False"],
    ["model.enable_gradient_checkpointing=True"],
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with models and checkpoints of verl's engine, and the digest of the plain one."""
    folder = tmp_path_factory.mktemp("engine")
    for name, settings in {"model": {}, "wide": {"hidden_size": 32}}.items():
        make_tiny_model(folder / name, texts=["Weather in Oslo"], seed=1, **settings)
    of_one = [("plain", "model", []), ("lora", "model", [LORA])]
    plain, _ = outcomes(engine(1, "save", folder, of_one))
    outcomes(engine(2, "save", folder, [("two", "model", [])]))
    return folder, plain


@pytest.fixture(scope="module")
def loaded(saved):
    """What comes of each load by one rank. One process does all of them: it takes a while."""
    folder, _ = saved
    cases = [case[:3] for case in OF_ONE_RANK] + [("plain", "model", one) for one in OF_MEMORY]
    found = outcomes(engine(1, "load", folder, cases))
    return {str(case): one for case, one in zip(cases, found, strict=True)}


def engine(ranks, what, folder, cases):
    """The process of `checkpoint_engine.py`, at its end."""
    told = [
        [what, f"{folder}/of_{name}", f"{folder}/{model}", *more] for name, model, more in cases
    ]
    script = [checkpoint_engine.__file__, str(ranks), json.dumps(told)]
    command = [sys.executable, "-W", "ignore", *script]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


def outcomes(done):
    """The digest of the weights of each case, or its error."""
    assert done.returncode == 0, done.stderr
    begin = checkpoint_engine.OUTCOME
    lines = [line for line in done.stdout.splitlines() if line.startswith(begin)]
    return [json.loads(line.removeprefix(begin)) for line in lines]


@pytest.mark.parametrize(("name", "model", "settings", "error"), OF_ONE_RANK)
def test_a_checkpoint_that_does_not_fit(loaded, name, model, settings, error):
    assert error in loaded[str((name, model, settings))]


@pytest.mark.parametrize(("name", "model", "settings", "error"), OF_TWO_RANKS)
def test_a_checkpoint_that_does_not_fit_two_ranks(saved, name, model, settings, error):
    done = engine(2, "load", saved[0], [(name, model, settings)])
    assert done.returncode != 0
    assert error in done.stderr


@pytest.mark.parametrize("settings", OF_MEMORY)
def test_what_saves_memory_changes_no_weight(saved, loaded, settings):
    assert loaded[str(("plain", "model", settings))] == saved[1]


KEPT = "trainer.max_actor_ckpt_to_keep"
FREE = (
    *("trainer.save_freq=2", "trainer.test_freq=2", "trainer.val_before_train=True"),
    *("trainer.logger=[console,file]", "trainer.log_val_generations=1"),
    "data.val_batch_size=4",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096",
    "actor_rollout_ref.model.enable_gradient_checkpointing=True",
    *("actor_rollout_ref.rollout.gpu_memory_utilization=0.3", "reward.num_workers=2"),
)


def test_a_run_that_is_stopped_and_resumed(tmp_path):
    """Of grpo, without a word; refused with another estimator; with changes, free and allowed."""
    given = ("estimator=grpo", "trainer.logger=[console,file,wandb]", f"{KEPT}=2")
    training = Training(tmp_path, *given, WANDB_MODE="offline")
    expected = train_until_killed(training)
    with training.resumed() as launcher:
        check_resumed(training, launcher, expected)
        launcher.terminate()
        assert training.end_of(launcher)[0] == 143
    with training.resumed("algorithm.adv_estimator=gdpo") as launcher:
        exit_code, output = training.end_of(launcher)
    assert exit_code == 1
    assert "algorithm.adv_estimator: 'grpo' -> 'gdpo'" in output
    n = "actor_rollout_ref.rollout.n"
    # the learning rate is constant, so the number of steps needs no word
    allowed = (f"{n}=2", "trainer.total_training_steps=10", f"++allow_change=[{n}]")
    # the second start may have saved step 8 too
    with training.resumed(*FREE, *allowed) as launcher:
        assert training.end_of(launcher)[0] == 0

    starts = starts_of(training.folder)
    estimators = [one.start.configuration["algorithm"]["adv_estimator"] for one in starts]
    assert estimators == ["grpo"] * 3
    ends = [one.end["why"] for one in starts]
    assert ends == ["exit code 137", "stopped", "finished"]
    assert [one.start.step for one in starts][:2] == [0, SAVED]
    assert starts[2].start.changes[n] == [4, 2, "on request"]
    ids = {path.name[-8:] for path in training.folder.glob("wandb/offline-run-*")}
    assert ids == {starts[0].start.wandb_run_id}
    (saved,) = {path.name for path in training.folder.glob("checkpoints/*_10/actor/model_*")}
    assert "world_size_1_" in saved  # why the number of processes is refused
    # the last start knew those of the starts before it
    left = training.folder.glob("checkpoints/global_step_*/actor")
    assert sorted(int(path.parent.name[12:]) for path in left) == [8, 10]

    for command, where in (("summary", []), ("report", ["--out", str(tmp_path / "report")])):
        done = subprocess.run(
            [sys.executable, "-m", "verl_gdpo", command, str(training.folder), *where],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        for text in ("exit code 137", "stopped", f"{n}: 4 -> 2 (on request)"):
            assert command == "report" or text in done.stdout
    assert [path.name for path in (tmp_path / "report").iterdir()] == ["index.html"]

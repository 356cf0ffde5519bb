"""One mistake hides no other one, and accuses nothing that is right."""

import multiprocessing
import os
import signal
from unittest.mock import Mock

import pytest
from omegaconf import OmegaConf
from processes import completed
from rows_for_check import COMMAND, ENDS, arguments_of, messages_of

from verl_gdpo.tools import CHECK_FAULT
from verl_gdpo.tools.check import asked_again, ends_are_told, main
from verl_gdpo.tools.check.mended import without_mistakes

NAIVE = ("algorithm.adv_estimator=grpo", "reward.reward_manager.name=naive")


# --- reward files that end the process ------------------------------------------------------------


@pytest.mark.parametrize("manager", [(), NAIVE])
@pytest.mark.parametrize("name", list(ENDS))
def test_a_reward_file_that_ends_the_process_is_a_problem_with_its_line(plain, data, name, manager):
    path = f"{data}/{name}.py"
    code, _, printed = plain(*manager, f"reward.custom_reward_function.path={path}")
    assert code == 1
    (problem,) = messages_of(printed)
    assert f"[{path}:2]" in problem
    assert ("KeyboardInterrupt" if name == "interrupts" else "SystemExit") in problem


def test_a_function_that_ends_the_process_is_a_problem_with_its_line(plain, tmp_path):
    path = tmp_path / "ends_late.py"
    path.write_text("import os\n\ndef compute_score(**_):\n    os._exit(0)\n")
    code, _, printed = plain(*NAIVE, f"reward.custom_reward_function.path={path}")
    assert code == 1
    assert f"[{path}:4]" in printed


def test_only_this_process_does_not_end_at_once():
    really = os._exit
    with ends_are_told():
        with pytest.raises(SystemExit):
            os._exit(3)
        # A process that is forked needs it, as the pools of multiprocessing do.
        child = multiprocessing.get_context("fork").Process(target=_exit_with_7)
        child.start()
        child.join()
    assert child.exitcode == 7
    assert os._exit is really


def _exit_with_7():
    os._exit(7)


def test_ctrl_c_ends_the_check_and_is_no_problem_of_the_reward_file(data, monkeypatch):
    def interrupted(*_):
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError

    monkeypatch.setattr("verl_gdpo.tools.check.compose_accepted", interrupted)
    before = signal.getsignal(signal.SIGINT)
    assert main(arguments_of(COMMAND, data)) == 130
    assert signal.getsignal(signal.SIGINT) is before


CRASHES = """
import os, signal
from verl_gdpo.tools.check import others_kept_away

def segfaults():
    os.kill(os.getpid(), signal.SIGSEGV)

with others_kept_away(verbose=False) as out:
    print("a note", file=out, flush=True)
    os.write(2, b"what a library printed")
    segfaults()
"""


def test_a_crash_of_the_interpreter_names_the_line(tmp_path):
    path = tmp_path / "crashes.py"
    path.write_text(CRASHES)
    done = completed(path)
    assert done.returncode == -signal.SIGSEGV
    assert done.stdout == "a note\n"
    assert "Segmentation fault" in done.stderr and "what a library" not in done.stderr
    assert f'File "{path}", line 6 in segfaults' in done.stderr


def test_a_fault_of_the_check_is_told_from_a_problem(data, monkeypatch, capfd):
    """The launcher deletes the new folder of a run whose configuration was refused."""
    monkeypatch.setattr("verl_gdpo.tools.check.look.look", Mock(side_effect=KeyError("a bug")))
    assert main(arguments_of(COMMAND, data)) == CHECK_FAULT
    printed = capfd.readouterr().err
    assert "KeyError: 'a bug'" in printed
    assert printed.endswith("verl-gdpo check: the fault above is the check's own\n")


# --- what is right is not accused -----------------------------------------------------------------


def test_of_two_overrides_of_one_key_the_wrong_one_alone_is_accused(plain):
    code, _, printed = plain("+data.train_batch_size=32")
    assert code == 1
    (problem,) = messages_of(printed)
    assert problem.startswith("+data.train_batch_size=32: Could not append to config.")


def test_a_misspelt_key_leaves_its_value_to_the_key_that_is_meant(checks, data):
    """Else verl's default would be accused: 6 rows are less than a batch of 1024."""
    command = COMMAND.replace("data.train_batch_size=6", "data.train_batch_sze=6")
    code, _, printed = checks("--rows", "1", *arguments_of(command, data))
    assert code == 1
    (problem,) = messages_of(printed)
    assert problem == (
        "data.train_batch_sze=6: there is no key data.train_batch_sze; did you mean "
        "data.train_batch_size?"
    )


@pytest.mark.parametrize(
    ("module", "is_refused"), [("torchao.optim", False), ("torch.optimm", True)]
)
def test_elsewhere_does_not_refuse_what_only_this_machine_lacks(plain, module, is_refused):
    """A module that its package lacks is misspelt, and lacks everywhere."""
    impl = f"actor_rollout_ref.actor.optim.optimizer_impl={module}"
    code, output, printed = plain(impl)
    assert code == is_refused
    assert f"Failed to import module '{module}'" in (printed if is_refused else output)
    if not is_refused:
        assert "check: warning: actor_rollout_ref.actor.optim" in output


def test_elsewhere_a_checkpoint_may_be_missing_here(plain):
    path = "/no/such/global_step_3"
    code, output, _ = plain("trainer.resume_mode=resume_path", f"trainer.resume_from_path={path}")
    assert code == 0
    assert "check: warning: trainer.resume_from_path" in output


def test_elsewhere_a_package_of_rewards_may_be_missing_here(plain):
    path = "reward.custom_reward_function.path=pkg://my_own_rewards.math"
    code, output, _ = plain(path)
    assert code == 0
    assert "check: warning: reward.custom_reward_function.path=pkg://my_own_rewards.math" in output


# --- intentions without effect --------------------------------------------------------------------


def test_a_reward_as_text_is_a_warning_at_the_end(plain, data):
    scorer = [f"reward.custom_reward_function.path={data}/rewards.py"]
    code, output, _ = plain(*scorer, "reward.custom_reward_function.name=text_beside")
    assert code == 0
    last = output.rpartition("data_source 'rlla', 7 responses:")[2]
    assert "check: warning: 'style' is '1.0', and no number in any response" in last


@pytest.mark.parametrize(
    ("rewards", "unnamed"),
    [
        ("{right: 1}", "short, length"),
        ("{right: 1, length: null}", "short"),
        ("{right: 1, length: 0, short: null}", ""),
    ],
)
def test_numbers_that_no_weight_names_are_one_line(plain, data, rewards, unnamed):
    scorer = [f"reward.custom_reward_function.path={data}/rewards.py"]
    scorer += ["reward.custom_reward_function.name=three", f"++algorithm.gdpo.rewards={rewards}"]
    code, output, _ = plain(*scorer)
    assert code == 0
    lines = [line for line in output.splitlines() if "returned as numbers" in line]
    assert len(lines) == bool(unnamed)
    if unnamed:
        assert lines[0].startswith(f"verl-gdpo check: warning: {unnamed}: returned as numbers")


@pytest.mark.parametrize(
    ("added", "words"),
    [
        (
            [*NAIVE, "+algorithm.gdpo.rewards={a: 1}"],
            "algorithm.gdpo={'rewards': {'a': 1}}: nobody",
        ),
        ([*NAIVE, "+algorithm.gdpo_reward_keys=[a]"], "algorithm.gdpo_reward_keys=['a']: nobody"),
        ([NAIVE[0], "+algorithm.gdpo.eps=1e-6"], "only the estimator gdpo reads it"),
        ([NAIVE[0], "+algorithm.gdpo.rewards={format: 1, correctness: 1}"], ""),
    ],
)
def test_our_keys_that_nobody_reads_in_this_run_are_a_warning(plain, data, added, words):
    files = [f"data.{key}={data}/math.parquet" for key in ("train_files", "val_files")]
    if added[1] != NAIVE[1]:
        files = []
    code, output, _ = plain(*added, *files)
    assert code == 0
    told = " ".join(output.split())
    assert words in told
    assert ("nobody reads it" in told or "estimator gdpo reads" in told) == bool(words)


# --- asking again ---------------------------------------------------------------------------------


def refuses(config):
    """As verl: the first mistake ends it."""
    if config.a.mode == "sync":
        raise ValueError("sync has gone")
    if config.a.size is None:
        raise ValueError("set 'size' or 'sizes'")
    if config.b.share > 1:
        raise ValueError(f"share {config.b.share} is above 1")
    return "fine"


DEFAULTS = OmegaConf.create({"a": {"mode": "async", "size": None}, "b": {"share": 0.5}})


def test_a_question_is_asked_again_without_what_it_refused():
    wrong = OmegaConf.create({"a": {"mode": "sync", "size": None}, "b": {"share": 2}})
    result, mistakes = asked_again.refusals(refuses, wrong, DEFAULTS)
    assert result is None
    assert [str(mistake) for mistake in mistakes] == [
        "sync has gone",
        "set 'size' or 'sizes'",
        "share 2 is above 1",
    ]
    assert wrong.a.mode == "sync"
    right = OmegaConf.merge(DEFAULTS, {"a": {"size": 4}})
    assert asked_again.refusals(refuses, right, DEFAULTS) == ("fine", [])


def test_what_is_only_wrong_because_of_the_mending_is_no_mistake():
    def sizes_fit(config):
        for block in ("actor", "critic"):
            if config.batch < config[block].mini:
                raise ValueError(
                    f"batch {config.batch} must be >= {block}.mini {config[block].mini}"
                )

    defaults = OmegaConf.create({"actor": {"mini": 256}, "critic": {"mini": 256}, "batch": 1024})
    wrong = OmegaConf.create({"actor": {"mini": 6}, "critic": {"mini": 7}, "batch": 6})
    _, mistakes = asked_again.refusals(sizes_fit, wrong, defaults)
    assert [str(mistake) for mistake in mistakes] == ["batch 6 must be >= critic.mini 7"]


def test_a_question_whose_message_names_nothing_is_asked_once():
    def vague(config):
        raise ValueError("something is wrong")

    _, mistakes = asked_again.refusals(vague, DEFAULTS, DEFAULTS)
    assert len(mistakes) == 1


def test_the_least_is_left_out_of_a_mended_configuration():
    def mistakes_of(config):
        gdpo = config.algorithm.get("gdpo") or {}
        found = [f"{key} is unknown" for key in gdpo if key not in ("rewards", "eps")]
        rewards = gdpo.get("rewards") or {}
        found += [f"{name} is heavy" for name, weight in rewards.items() if weight == "heavy"]
        if config.n == 1:
            found.append("n is 1")
        return found

    gdpo = {"epss": 1, "eps": 2, "rewards": {"a": "heavy", "b": None}}
    wrong = OmegaConf.create({"algorithm": {"gdpo": gdpo}, "reward": {}, "n": 1})
    mended = without_mistakes(wrong, mistakes_of)
    assert mended.algorithm.gdpo == {"eps": 2, "rewards": {"b": None}}
    assert mistakes_of(mended) == ["n is 1"]
    assert wrong.algorithm.gdpo == gdpo


def test_without_a_function_of_the_list_its_rewards_go_too():
    functions = {"x": {"path": "a"}, "x.y": {"wrong": 1}}
    gdpo = {"rewards": {"x": 1, "x.y__a": 1}}
    config = {"algorithm": {"gdpo": gdpo}, "reward": {"reward_functions": functions}}

    def mistakes_of(config):
        return ["x.y is wrong"] if "x.y" in config.reward.reward_functions else []

    mended = without_mistakes(OmegaConf.create(config), mistakes_of)
    assert mended.reward.reward_functions == {"x": {"path": "a"}}
    assert mended.algorithm.gdpo.rewards == {"x": 1}

"""The arguments that go on with a run."""

import pytest
from processes import completed
from saved_checkpoint import save_checkpoint

from verl_gdpo.tools.run.resume import arguments
from verl_gdpo.tools.run.starts import StartManifest, write


@pytest.fixture
def run(tmp_path):
    """Its folder, whose name Hydra would read otherwise."""
    run = tmp_path / "it's"
    recipes = {"estimator": "grpo", "task": "tool_rl"}
    write(run, StartManifest("2026-01-01T00:00:00+00:00", recipes=recipes), "")
    save_checkpoint(run / "checkpoints", 3)
    return run


def test_what_goes_on_with_a_run(run):
    given = ["estimator=grpo", "+trainer.x=1", "++y=2", "~z", "trainer.resume_mode=disable"]
    quoted = str(run).replace("'", "\\'")
    assert arguments(run, given) == [
        *("--config-dir", f"{run}/starts/1", "--config-name", "composed"),
        f"run_dir='{quoted}'",
        f"hydra.run.dir='{quoted}/hydra/${{now:%Y-%m-%d_%H-%M-%S}}'",
        "trainer.resume_from_path=null",
        *("++trainer.x=1", "++y=2", "~z", "trainer.resume_mode=disable"),
    ]


@pytest.mark.parametrize(
    ("override", "own"), [("estimator=gdpo", "grpo"), ("attention=sdpa", "none")]
)
def test_another_recipe_is_refused(run, override, own):
    with pytest.raises(ValueError, match=f"{override}: the run goes on with its own recipe, {own}"):
        arguments(run, [override])


def test_nothing_to_go_on_from(tmp_path):
    with pytest.raises(ValueError, match=r"nothing to resume in .*: no checkpoint"):
        arguments(tmp_path, [])
    save_checkpoint(tmp_path / "checkpoints", 3)
    done = completed("-m", "verl_gdpo.tools.run.resume", tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "no start that trained up to it" in done.stderr

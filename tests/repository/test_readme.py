"""The documents are true: their code runs, their links lead somewhere, their tables fit."""

import ast
import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf
from pages import FILES, PAGES, cells_after, rows_after
from quick_composition import compose_quickly as compose_config
from repository import REPO

from verl_gdpo import REQUIRED_VERL, TESTED_VERL, __version__
from verl_gdpo.__main__ import COMMANDS
from verl_gdpo.algorithm.read_settings import read_settings
from verl_gdpo.algorithm.settings import (
    DIALECTS,
    SETTING_KEYS,
    Condition,
    GdpoSettings,
    RewardTerm,
    SettingsError,
)
from verl_gdpo.algorithm.variants import VARIANTS
from verl_gdpo.hooks.configuration import settings_of_run
from verl_gdpo.scoring.function_list import check_entry, entries_of, options_of_entry
from verl_gdpo.scoring.judge import Judge
from verl_gdpo.scoring.limits import KEYS as LIMITS
from verl_gdpo.scoring.response import KEY as THOUGHT_TAGS

LINKS = [
    (page, target, anchor)
    for page, text in PAGES.items()
    for target, anchor in re.findall(r"\]\(((?!https?:)[^)#\s]*)#?([^)\s]*)\)", text)
]


def test_the_readme_links_all_pages():
    linked = {target for page, target, _ in LINKS if page == "README.md"}
    assert {page for page in PAGES if page.startswith("docs/")} <= linked


@pytest.mark.parametrize(("page", "target", "anchor"), LINKS)
def test_a_link_leads_somewhere(page, target, anchor):
    path = (REPO / page).parent.joinpath(target).resolve() if target else REPO / page
    name = path.relative_to(REPO).as_posix()
    assert name in FILES or any(file.startswith(f"{name}/") for file in FILES)
    if anchor:
        assert anchor in anchors(PAGES[name])


def anchors(text):
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_code_in_python_is_executed(page):
    tests = re.findall(r"(?:<!-- executed by (\S+) -->\n)?^```python$", PAGES[page], re.M)
    assert {*tests} <= FILES


def executed_block(page):
    (block,) = re.findall(r"<!-- executed by .*? -->\n```python\n(.*?)```", PAGES[page], re.DOTALL)
    return block


def test_the_reward_example():
    names = {}
    exec(executed_block("README.md"), names)
    extra_info = {"generated_tokens": 201}
    assert names["compute_score"]("any", " 4 ", "4", extra_info) == {"correct": 1.0, "short": 0.0}


def test_the_file_map_is_the_tree():
    page = PAGES["docs/how_it_works.md"]
    mapped = re.findall(r"^\| `([^`]+/)` \|", page.split("## File map")[1], re.M)
    modules = [file.split("/") for file in FILES if re.fullmatch(r"verl_gdpo/.+/.+\.py", file)]
    assert {*mapped} == {f"verl_gdpo/{parts[1]}/" for parts in modules}


def test_the_layers_are_the_contract():
    (block,) = re.findall(r"```\n(__main__.*?)```", PAGES["CONTRIBUTING.md"], re.DOTALL)
    lines = [[name.removesuffix("/") for name in line.split()] for line in block.splitlines()]
    contract = re.search(
        r"^layers = \[\n(.*?)^\]", (REPO / "pyproject.toml").read_text(), re.M | re.S
    )
    layers = [re.findall(r"verl_gdpo\.(\w+)", layer) for layer in contract[1].splitlines()]
    assert [[name.removesuffix(".py") for name in line] for line in lines] == layers


def described(schema):
    """{field: its line}; pydantic keeps the lines of a base class there."""
    fields_of = [of.__pydantic_fields__ for of in schema.__mro__ if of is not object]
    return {name: f.description for of in fields_of for name, f in of.items() if f.description}


def table_of(schema, **shown):
    rows = []
    for name, line in described(schema).items():
        default = shown.get(name, schema.__pydantic_fields__[name].default)
        rows.append(f"| `{name}` | `{'null' if default is None else default}` | {line} |")
    return "\n".join(rows)


def test_the_settings_tables_are_the_schema():
    page = PAGES["docs/keys.md"]
    tables = re.findall(r"^\| key \| default \|.*\n\|---.*\n((?:\|.*\n)+)", page, re.M)
    shown = {"eps": "1e-4", "normalize_by_std": None, "combine": "sum"}  # as a user writes them
    assert tables[0].strip() == table_of(GdpoSettings, **shown)
    assert tables[1].strip() == table_of(RewardTerm)
    assert GdpoSettings().eps == float(shown["eps"]) and GdpoSettings().combine is None
    for schema in (GdpoSettings, RewardTerm, Condition):
        named = {f.name for f in fields(schema)} - {"bounds", "rewards_as_written"}
        assert named <= {*described(schema)}


def test_the_keys_are_verls_or_ours():
    config = compose_config(REPO / "recipes", "train", [])
    # which are not in the configuration until somebody adds them
    known = {f"algorithm.gdpo_reward_{what}" for what in ("keys", "weights")}
    known |= {"reward.reward_kwargs", "reward.custom_reward_function.reward_kwargs"}
    known |= {f"reward.{key}" for key in LIMITS} | {THOUGHT_TAGS}
    groups = "actor_rollout_ref|algorithm|critic|data|reward|trainer"
    pattern = rf"[`+ ]((?:{groups})(?:\.(?!py\b|jsonl\b)[a-z]\w*)+)"
    # test_resume_rules.py looks at the patterns of keys
    pages = {
        page: re.sub(r"<!-- rules -->.*?<!-- end -->", "", text, flags=re.S)
        for page, text in PAGES.items()
    }
    named = {(page, key) for page, text in pages.items() for key in re.findall(pattern, text)}
    assert len(named) > 30
    for page, key in named:
        parent, _, last = key.rpartition(".")
        if ours := re.match(r"algorithm\.gdpo\.(\w+)", key):
            assert ours[1] in SETTING_KEYS, page
        else:
            is_known = bool({key, parent} & known) or key.startswith("reward.reward_functions")
            is_known |= (
                ".engine_kwargs." in key
            )  # verl hands these to the engine, whatever they are
            assert is_known or last in {*OmegaConf.select(config, parent)}, page


def test_the_table_of_variants():
    rows = rows_after("docs/variants.md", "| `name` |")
    assert [row[0] for row in rows] == list(VARIANTS)
    for name, _, _, _, source in rows:
        (arxiv,) = re.findall(r"abs/([\d.]+)", source)
        assert f"arXiv {arxiv}" in VARIANTS[name].__doc__


def test_the_table_of_dialects():
    keys = ["group_norm", "batch_norm", "eps", "batch_eps", "batch_var_eps", "normalize_by_std"]
    rows = rows_after("docs/variants.md", "| `dialect` | `group_norm` |")
    assert [row[0] for row in rows] == list(DIALECTS)
    for name, *values, _ in rows:
        read = {k: yaml.safe_load(v) for k, v in zip(keys, values, strict=True)}
        # YAML takes 1e-6 for a string
        read |= {key: float(read[key]) for key in ("eps", "batch_var_eps")}
        assert read == DIALECTS[name]


def test_the_examples_of_rewards_are_read():
    block, judged = re.findall(r"```yaml\n(.*?)```", PAGES["docs/rewards.md"], re.DOTALL)
    (entry,) = entries_of(OmegaConf.create(judged)).values()
    check_entry("judge", entry)
    options = {**options_of_entry(entry), "rewards": entry["rewards"]}
    Judge(**options | {"judge": entry["judge"], "template": "{response}"})
    settings = read_settings(OmegaConf.create(block).algorithm)
    assert settings.rewards == {
        "correctness": RewardTerm(1.0),
        "length": RewardTerm(0.5, Condition("correctness", 1.0), "zero"),
        "format": RewardTerm({0: 1.0, 100: 0.5}),
    }


def test_the_first_settings_in_the_answers_are_the_recipes():
    rows = {row[0]: row[1:] for row in rows_after("docs/faq.md", "| recipe | model |")}
    files = {path.stem: path for path in (REPO / "recipes" / "task").glob("*.yaml")}
    assert {*rows} == {*files}
    for name, (model, rate, samples, prompts, coefficient) in rows.items():
        recipe = yaml.safe_load(files[name].read_text())
        policy = recipe["actor_rollout_ref"]
        assert policy["model"]["path"].endswith(f"/{model}")
        assert policy["actor"]["optim"]["lr"] == rate  # YAML takes 1e-6 for a text
        assert policy["rollout"]["n"] == int(samples)
        assert recipe["data"]["train_batch_size"] == int(prompts)
        assert policy["actor"]["kl_loss_coef"] == float(coefficient)


def test_the_script_in_the_answers_composes():
    """On verl's own configuration, and without a GPU beside the folder of our recipes."""
    section = PAGES["docs/faq.md"].split("### How does my own script look, in full?")[1]
    block = re.search(r"```bash\n(.*?)```", section, re.DOTALL)[1]
    found = re.findall(r"^(\w+)=\((.*?)\)$", block, re.MULTILINE | re.DOTALL)
    words = {name: shlex.split(text) for name, text in found}
    folder, recipes, *hardware = words["cpu"]
    assert (folder, recipes) == ("--config-dir", "$(verl-gdpo recipes)")
    on_gpus = compose_config(None, "ppo_trainer", words["mine"] + words["gpu"])
    without_gpu = compose_config(REPO / "recipes", "ppo_trainer", hardware + words["mine"])
    assert (on_gpus.trainer.device, on_gpus.actor_rollout_ref.rollout.name) == ("cuda", "vllm")
    assert (without_gpu.trainer.device, without_gpu.actor_rollout_ref.rollout.name) == ("cpu", "hf")
    for config in (on_gpus, without_gpu):
        settings = settings_of_run(config)
        assert settings.rewards == {"correct": RewardTerm(1.0), "short": RewardTerm(0.5)}


def test_the_error_of_several_mistakes_is_shown():
    page = PAGES["docs/keys.md"]
    (shown,) = re.findall(r"```\n(the configuration has .*?)\n```", page, re.DOTALL)
    with pytest.raises(SettingsError) as raised:
        read_settings({"gdpo": {"batch_norm": "tokens", "eps": "small"}})
    # pydantic finds them in the order of the fields
    assert sorted(str(raised.value).splitlines()) == sorted(shown.splitlines())


def test_the_messages_on_the_page_of_failures_are_the_codes():
    parts = set()
    for file in (file for file in FILES if re.fullmatch(r"verl_gdpo/.*\.py", file)):
        for node in ast.walk(ast.parse((REPO / file).read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                parts.add(node.value)
    rows = rows_after("docs/failures.md", "| the message contains |")
    assert len(rows) > 8
    for message, _ in rows:
        for part in filter(None, map(str.strip, message.split("..."))):
            assert any(part in text for text in parts), part


def test_the_versions_are_the_same_everywhere():
    # pip takes newer ones too, which `lookup.look_into_untested` asks for their names
    assert f'"verl{REQUIRED_VERL}",' in (REPO / "pyproject.toml").read_text()
    for page in ("README.md", "docs/status.md", "docs/trainers.md"):
        assert f"verl {' and '.join(TESTED_VERL)}" in " ".join(PAGES[page].split())


def test_the_versions_in_the_table_of_trainers_are_tested():
    """By `nox -s verl`, and by the default tests on what is pinned."""
    trainers = set()
    named = set()
    for trainer, _, _, versions, _ in cells_after("docs/status.md", "| trainer | engines |"):
        trainers |= {*re.findall(r"`(\w+)`", trainer)}
        named |= {*re.findall(r"\d+\.\d+\.\d+", versions)}
    v1 = {"sync", "colocate_async", "separate_async"}
    assert trainers == v1 | {"legacy", "one_step_off_policy", "fully_async_policy"}
    batches = rows_after("docs/trainers.md", "| trainer | the batch |")
    assert {re.match(r"\w+", trainer)[0] for trainer, _ in batches} == trainers
    pinned = re.findall(r"^verl==([\d.]+) ", (REPO / "requirements/cpu.txt").read_text(), re.M)
    by_nox = re.findall(r'"verl==([\d.]+)"', (REPO / "noxfile.py").read_text())
    assert named == {*by_nox} | {*pinned}
    assert named == {*TESTED_VERL}


def test_the_commands():
    named = {c for text in PAGES.values() for c in re.findall(r"[`(]verl-gdpo (\w+)", text)}
    assert named == {*COMMANDS}
    section = PAGES["docs/faq.md"].split("### Which commands are there?")[1]
    first_block = section.split("```")[1]
    listed = re.findall(r"^verl-gdpo (\w+)", first_block, re.M)
    assert sorted(listed) == sorted(COMMANDS)


def test_the_nox_sessions():
    named = re.findall(r"nox -s ([^`\n]+)`", "\n".join(PAGES.values()))
    assert {*" ".join(named).split()} == nox_sessions()


def nox_sessions():
    """The names of the functions that noxfile.py marks as sessions."""
    defined = set()
    for node in ast.parse((REPO / "noxfile.py").read_text()).body:
        decorators = getattr(node, "decorator_list", [])
        if any("nox.session" in ast.unparse(one) for one in decorators):
            defined.add(node.name)
    return defined


def test_the_weekly_workflow_runs_all_that_is_slow():
    """Every session but the one that renews versions, every file of tests/slow/, and the mark."""
    weekly = yaml.safe_load((REPO / ".github/workflows/weekly.yml").read_text())
    matrix_of = {name: job["strategy"]["matrix"] for name, job in weekly["jobs"].items()}
    assert {*matrix_of["session"]["session"]} == nox_sessions() - {"pins"}
    arguments = " ".join(matrix_of["slow"]["tests"]).split()
    assert arguments[:2] == ["-m", "slow"]
    assert "--hypothesis-profile=weekly" in arguments
    by_pytest = {argument for argument in arguments if argument.startswith("tests/slow/")}
    by_nox = {*re.findall(r'"(tests/slow/\w+\.py)"', (REPO / "noxfile.py").read_text())}
    slow = {file for file in FILES if re.fullmatch(r"tests/slow/(?!conftest)\w+\.py", file)}
    assert by_pytest | by_nox == slow and not by_pytest & by_nox


def test_the_tests_that_pages_name_are_there():
    for page, text in PAGES.items():
        named = {*re.findall(r"\btests/[\w/]+(?:\.\w+|\b)", text)}
        for path in named:
            is_folder = any(file.startswith(f"{path.rstrip('/')}/") for file in FILES)
            assert path in FILES or is_folder, (page, path)


def test_the_slow_files_are_on_the_page_of_maintenance():
    page = PAGES["MAINTAINING.md"]
    named = re.findall(r"`(\w+)`", page.split("\n## Versions\n")[0])
    slow = {Path(file).stem for file in FILES if file.startswith("tests/slow/")}
    assert slow - {"conftest", "verl_symbols"} <= {*named}


def test_pre_commit_runs_the_checks_of_tests_run_sh():
    """With the programs of the environment, whose versions are those of requirements/dev.txt."""
    settings = yaml.safe_load((REPO / ".pre-commit-config.yaml").read_text())
    (local,) = settings["repos"]
    assert local["repo"] == "local"
    checks = (REPO / "tests" / "run.sh").read_text().splitlines()
    for hook in local["hooks"]:
        assert hook["language"] == "system"
        folder, program = hook["entry"].split("/bin/")
        assert folder == ".venv"
        assert any(line.startswith(program) for line in checks), program


def test_actions_are_pinned_by_commit():
    for file in (REPO / ".github" / "workflows").iterdir():
        used = re.findall(r"uses: (.*)", file.read_text())
        assert used and all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v[\d.]+", one) for one in used)


def test_the_citation():
    citation = yaml.safe_load((REPO / "CITATION.cff").read_text())
    assert citation["version"] == __version__
    (paper,) = citation["references"]
    assert paper["url"] in PAGES["README.md"]

"""How verl's `algorithm` block is read, and each block that is refused, by its message."""

import re

import pytest
from omegaconf import OmegaConf

from verl_gdpo.algorithm.read_settings import plain, read_settings
from verl_gdpo.algorithm.settings import Condition, GdpoSettings, RewardTerm, SettingsError
from verl_gdpo.algorithm.variants import CombineSetting


def read(**algorithm):
    return read_settings(OmegaConf.create(algorithm))


def test_defaults_are_the_paper():
    expected = {"group_norm": "per_reward", "batch_norm": "sample", "eps": 1e-4}
    assert read() == GdpoSettings(rewards=None, normalize_by_std=True, **expected)


def test_everything_set():
    options = {"group_norm": "summed", "batch_norm": "token", "eps": 1e-6}
    options |= {"normalize_by_std": False, "batch_eps": 0.5, "batch_var_eps": 2.0}
    terms = {"format": RewardTerm(1.0), "correctness": RewardTerm(0.5)}
    written = {"format": 1, "correctness": 0.5, "left out": None}
    settings = read(norm_adv_by_std_in_grpo=False, gdpo={"rewards": written, **options})
    assert settings == GdpoSettings(rewards=terms, **options)
    assert settings.rewards_as_written == written


@pytest.mark.parametrize(
    ("written", "term"),
    [
        (1, RewardTerm(1.0)),
        ({}, RewardTerm(1.0, None, None, None)),
        ({"when": {"reward": "b", "at_least": 1}}, RewardTerm(1.0, Condition("b", 1.0))),
        (
            {
                "weight": 0.5,
                "when": {"reward": "b", "at_least": 0},
                "otherwise": "missing",
                "bounds": [-3, 3],
            },
            RewardTerm(0.5, Condition("b", 0.0), "missing", (-3.0, 3.0)),
        ),
    ],
)
def test_what_a_reward_may_be(written, term):
    assert read(gdpo={"rewards": {"a": written}}).rewards == {"a": term}
    assert read_settings({"gdpo": {"rewards": {7: written}}}).rewards == {"7": term}


def test_verls_lists_are_another_way_to_say_rewards():
    keys = {"gdpo_reward_keys": ["b", "a"]}
    assert read(**keys).rewards == {"b": RewardTerm(), "a": RewardTerm()}
    terms = read(**keys, gdpo_reward_weights=[2, 0.5]).rewards
    assert list(terms.items()) == [("b", RewardTerm(2.0)), ("a", RewardTerm(0.5))]


def test_std_is_inherited():
    assert read(norm_adv_by_std_in_grpo=False).normalize_by_std is False
    assert read(norm_adv_by_std_in_grpo=True, gdpo={"normalize_by_std": None}).normalize_by_std


def test_declared_bounds_give_way_to_written_ones():
    declared = {"a": (0.0, 1.0), "b": (0.0, 1.0), "unclear": None}
    block = {"gdpo": {"rewards": {"a": {"bounds": [0, 9]}, "b": 1}}}
    assert read_settings(block, declared).bounds == {"a": (0.0, 9.0), "b": (0.0, 1.0)}


def test_combine():
    for value in ("sum", {"name": "sum"}, None):
        assert read(gdpo={"combine": value}).combine is None
    for name in ("dara", "dvao"):
        assert read(gdpo={"combine": name}).combine == CombineSetting(name, {})
    parameters = {"mode": "asymmetric", "maximum": 3}
    combined = read(gdpo={"combine": {"name": "dara", **parameters}}, norm_adv_by_std_in_grpo=False)
    assert combined.combine == CombineSetting("dara", parameters)


def test_dialects_are_named_values():
    assert read(gdpo={"dialect": "paper"}) == read(gdpo={"dialect": "trl"}) == GdpoSettings()
    assert read(gdpo={"dialect": "nemo_rl"}) == GdpoSettings(eps=1e-6, batch_eps=0.0)
    builtin = GdpoSettings(batch_norm="token", eps=1e-6, batch_eps=0.0, batch_var_eps=1e-8)
    assert read(gdpo={"dialect": "verl_builtin"}) == builtin
    # the same value beside it is no contradiction
    same = {"dialect": "verl_builtin", "batch_norm": "token", "eps": 1e-6, "batch_eps": 0}
    assert read(gdpo=same) == builtin
    assert read(gdpo={"eps": 1e-5, "batch_eps": 1e-5}) == read(gdpo={"eps": 1e-5})


def test_values_that_refer_to_others_are_resolved():
    config = OmegaConf.create({"high": 3.0, "rewards": {"a": {"bounds": [0, "${high}"]}}})
    assert plain(config.rewards) == {"a": {"bounds": [0, 3.0]}}
    assert plain(7) == 7


# --- refused: the key, the value and the reason --------------------------------------------------

NUMBER, FINITE, NONE = "Input should be a valid number", "should be a finite number", "got none"
WHOLE, AT_LEAST_0 = "should be a valid integer", "should be greater than or equal to 0"
ALL_0 = "expected at least one reward with a weight; all weights are 0"
SCHEDULE = {"weight": {0: 1.0, 9: -1.0}}


def when(reward="b", **more):
    return {"when": {"reward": reward, "at_least": 0, **more}}


# one reward "a"
OF_TERM = [
    ("1", f".a.weight: got '1'; {NUMBER}"),
    (True, f".a.weight: got True; {NUMBER}"),
    (float("inf"), ".a.weight: got inf; Input should be a finite number"),
    ({"weight": {5: None}}, f".a.weight.5: got None; {NUMBER}"),
    ({"weight": {0: 1.0, 9: float("nan")}}, ".a.weight.9: got nan; Input should be a finite"),
    ({"weight": {}}, ".a.weight: got {}; Dictionary should have at least 1 item"),
    ({"weight": {-1: 1.0}}, f".a.weight.-1: got -1; Input {AT_LEAST_0}"),
    ({"weight": {1.5: 1.0}}, f".a.weight.1.5: got 1.5; Input {WHOLE}"),
    ({"weight": {True: 1.0}}, f".a.weight.1: got True; Input {WHOLE}"),
    ({"wieght": 1}, ".a: got {'wieght': 1}; wieght: unknown setting; did you mean 'weight'?"),
    ({"otherwise": "zero"}, ".a: got {'otherwise': 'zero'}; otherwise needs when"),
    (when() | {"otherwise": "none"}, ".a.otherwise: got 'none'; expected zero, missing or a"),
    ({"when": "b"}, ".a.when: got 'b'; Input should be a dictionary"),
    ({"when": {"reward": "b"}}, ".a.when.at_least: got {'reward': 'b'}; Field required"),
    (when(at_most=1), ".a.when.at_most: got 1; Unexpected keyword argument"),
    (when("a"), ".a.when.reward: expected another reward than 'a'"),
    (when("score"), ".a.when.reward: got 'score'; 'score' is verl's"),
    (when(1), ".a.when.reward: got 1; name 1: expected text"),
    (when("uid"), ".a.when.reward: got 'uid'; name 'uid': it is a column of verl's dumps"),
    ({"bounds": "01"}, ".a.bounds: got '01'; Input should be a valid tuple"),
    ({"bounds": [0, 1, 2]}, ".a.bounds: got [0, 1, 2]; Tuple should have at most 2 items"),
    ({"bounds": [0, None]}, f".a.bounds.1: got None; {NUMBER}"),
    ({"bounds": [0, float("inf")]}, ".a.bounds.1: got inf; Input should be a finite number"),
    ({"bounds": [1, 1]}, ".a.bounds: got [1, 1]; expected the lowest value below the highest"),
]
OF_REWARDS = [
    (["format"], ": got ['format']; expected {name: weight}"),
    ({}, f": expected at least one reward with a weight; {NONE}"),
    ({"a": None}, f": expected at least one reward with a weight; {NONE}"),
    ({"a": 0, "b": {"weight": {0: 0, 9: 0.0}}}, f": {ALL_0}"),
    ({"a": 1, "score": 1}, ".score: got 'score'; 'score' is verl's name for the sum"),
    (
        {"a": 1, "reward": 1},
        ".reward: got 'reward'; name 'reward': it is a metric of verl's validation",
    ),
    ({"a/b": 1}, ".a/b: got 'a/b'; name 'a/b': expected text that can be printed, without '/'"),
    # names that are pydantic's own marks
    ({"number": {"weight": "1"}, "schedule": 1}, f".number.weight: got '1'; {NUMBER}"),
]
OF_GDPO = [
    (["format"], ": expected a mapping"),
    ({"batchnorm": "none"}, ".batchnorm: unknown setting; did you mean 'batch_norm'?"),
    ({"bounds": {}}, ".bounds: unknown setting"),
    (
        {"batch_norm": "tokens"},
        ".batch_norm: got 'tokens'; Input should be 'sample', 'token' or 'none'",
    ),
    ({"group_norm": None}, ".group_norm: got None; Input should be 'per_reward' or 'summed'"),
    ({"eps": "small"}, f".eps: got 'small'; {NUMBER}"),
    ({"eps": -1.0}, f".eps: got -1.0; Input {AT_LEAST_0}"),
    ({"batch_eps": -1.0}, f".batch_eps: got -1.0; Input {AT_LEAST_0}"),
    ({"batch_var_eps": -1.0}, f".batch_var_eps: got -1.0; Input {AT_LEAST_0}"),
    ({"normalize_by_std": 1}, ".normalize_by_std: got 1; Input should be a valid boolean"),
    ({"normalize_by_std": False}, ".normalize_by_std=False contradicts algorithm.norm_adv_by_std"),
    (
        {"combine": "rvp"},
        ".combine: got 'rvp'; expected one of ['sum', 'rvpo', 'dara', 'sa_mrpo', 'gd2po', 'dvao'], "
        "or {name: ..., parameter: value}; did you mean 'rvpo'?",
    ),
    ({"combine": {"k": 1}}, ".combine: got {'k': 1}; expected one of ['sum'"),
    ({"combine": {"name": "sum", "k": 1}}, ".combine: got {'name': 'sum', 'k': 1}; expected one"),
    (
        {"combine": "rvpo"},
        "missing 1 required keyword-only argument: 'k'; rvpo takes ['k'], as in "
        "{name: NAME, PARAMETER: VALUE}",
    ),
    ({"combine": "gd2po"}, "missing 1 required keyword-only argument: 'tau'"),
    (
        {"combine": {"name": "rvpo", "K": 1}},
        "got an unexpected keyword argument 'K'; rvpo takes ['k']",
    ),
    ({"combine": {"name": "sa_mrpo", "bounds_K": []}}, ".combine: functools.partial() got"),
    ({"combine": {"name": "sa_mrpo", "x": 1}}, "argument 'x'; sa_mrpo takes ['gamma'], as in"),
    ({"combine": {"name": "rvpo", "k": -1}}, ".combine: rvpo k: expected a number above 0, got -1"),
    ({"combine": {"name": "dara", "mode": "both"}}, ".combine: dara mode: expected one of"),
    ({"combine": "dvao", "rewards": {"a": 1, "b": SCHEDULE}}, "of 0 or more, got [1.0, -1.0]"),
    ({"combine": "dvao", "rewards": {"a": -0.1}}, "expected weights of 0 or more, got [-0.1]"),
    ({"combine": "dara", "group_norm": "summed"}, ".combine=dara needs group_norm=per_reward"),
    ({"dialect": "TRL"}, ".dialect: got 'TRL'; Input should be 'paper', 'trl', 'nemo_rl' or 'verl"),
    (
        {"dialect": "nemo_rl", "eps": 1e-4},
        ".eps=0.0001 contradicts algorithm.gdpo.dialect=nemo_rl, which stands for eps=1e-06; leave "
        "one of them out",
    ),
    ({"dialect": "trl", "batch_norm": "token"}, ".batch_norm=token contradicts"),
    ({"dialect": "verl_builtin", "batch_eps": 1e-4}, ".batch_eps=0.0001 contradicts"),
    ({"dialect": "paper", "batch_eps": 0}, "which stands for batch_eps=null"),
    ({"dialect": "nemo_rl", "batch_var_eps": 1e-8}, ".batch_var_eps=1e-08 contradicts"),
    ({"dialect": "trl", "combine": "dara"}, ".combine=dara contradicts algorithm.gdpo.dialect=trl"),
]
KEYS, WEIGHTS = "gdpo_reward_keys", "gdpo_reward_weights"
DIFFERENT = "algorithm.gdpo_reward_keys: expected a list of different names, got "
OF_ALGORITHM = [
    ({KEYS: ["b", "a", "b"]}, f"{DIFFERENT}['b', 'a', 'b']"),
    ({KEYS: "ab"}, f"{DIFFERENT}'ab'"),
    ({KEYS: [1]}, f"{DIFFERENT}[1]"),
    ({WEIGHTS: [1]}, f"{DIFFERENT}None"),
    ({KEYS: []}, "gdpo_reward_keys: expected at least one reward with a weight; got none"),
    (
        {KEYS: ["a", "b"], WEIGHTS: [1]},
        "gdpo_reward_weights: expected 2 numbers, one for each of gdpo_reward_keys=['a', 'b'], got",
    ),
    ({KEYS: ["a"], WEIGHTS: "1"}, "gdpo_reward_weights: expected 1 numbers"),
    ({KEYS: ["a", "b"], WEIGHTS: [1, "x"]}, f"gdpo_reward_weights.b.weight: got 'x'; {NUMBER}"),
    ({KEYS: ["a"], WEIGHTS: [0]}, f"algorithm.gdpo_reward_weights: {ALL_0}"),
    ({KEYS: ["a/b"], WEIGHTS: [1]}, "algorithm.gdpo_reward_keys.a/b: got 'a/b'; name 'a/b'"),
    ({KEYS: ["a"], "gdpo": {"rewards": {"a": 1}}}, "say the same thing; give one of them"),
]
NO_STD = [
    ({"combine": "dvao"}, "combine=dvao divides by its own std, so set algorithm.norm_adv_by_std"),
    ({"dialect": "trl"}, "algorithm.norm_adv_by_std_in_grpo=False contradicts algorithm.gdpo"),
    (
        {"dialect": "trl", "normalize_by_std": False},
        "algorithm.gdpo.normalize_by_std=False contradicts algorithm.gdpo.dialect=trl",
    ),
]


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        *(({"gdpo": {"rewards": {"a": a}}}, f"algorithm.gdpo.rewards{why}") for a, why in OF_TERM),
        *(({"gdpo": {"rewards": of}}, f"algorithm.gdpo.rewards{why}") for of, why in OF_REWARDS),
        *(({"gdpo": of}, f"algorithm.gdpo{why}" * (why[0] in ".:") or why) for of, why in OF_GDPO),
        *OF_ALGORITHM,
        *(({"norm_adv_by_std_in_grpo": False, "gdpo": of}, why) for of, why in NO_STD),
    ],
)
def test_refused_with_the_key_the_value_and_the_reason(algorithm, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        read_settings(algorithm)


# --- several mistakes at once: one line each -----------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "messages"),
    [
        # two misspelt keys, and a value
        (
            {"gdpo": {"batchnorm": "none", "epss": 1, "batch_norm": "tokens"}},
            [
                "algorithm.gdpo.batchnorm: unknown setting; did you mean 'batch_norm'?",
                "algorithm.gdpo.epss: unknown setting; did you mean 'eps'?",
                "algorithm.gdpo.batch_norm: got 'tokens'; Input should be 'sample', 'token' or",
            ],
        ),
        # of one reward, and of another
        (
            {"gdpo": {"rewards": {"a": {"wieght": 1, "bound": 2, "otherwise": "no"}, "b": "1"}}},
            [
                "algorithm.gdpo.rewards.a: got {'wieght': 1, 'bound': 2, 'otherwise': 'no'}; "
                "wieght: unknown setting; did you mean 'weight'?",
                "algorithm.gdpo.rewards.a: got {'wieght': 1, 'bound': 2, 'otherwise': 'no'}; "
                "bound: unknown setting; did you mean 'bounds'?",
                "algorithm.gdpo.rewards.a.otherwise: got 'no'; expected zero, missing or",
                f"algorithm.gdpo.rewards.b.weight: got '1'; {NUMBER}",
            ],
        ),
        (
            {"gdpo": {"rewards": {"a": {"otherwise": "zero", "bounds": [1, 1]}}}},
            [
                "algorithm.gdpo.rewards.a: got {'otherwise': 'zero', 'bounds': [1, 1]}; otherwise",
                "algorithm.gdpo.rewards.a.bounds: got [1, 1]; expected the lowest value below",
            ],
        ),
        # a value that is refused does not hide what is said of the others
        (
            {"gdpo": {"eps": "small", "rewards": {"a": 0, "b": {"weight": 0} | when("b")}}},
            [
                f"algorithm.gdpo.eps: got 'small'; {NUMBER}",
                f"algorithm.gdpo.rewards: {ALL_0}",
                "algorithm.gdpo.rewards.b.when.reward: expected another reward than 'b'",
            ],
        ),
        # each key that contradicts a dialect, and the variant
        (
            {"gdpo": {"dialect": "trl", "eps": 1.0, "batch_norm": "token", "combine": "dvao"}},
            [
                "algorithm.gdpo.batch_norm=token contradicts algorithm.gdpo.dialect=trl",
                "algorithm.gdpo.eps=1.0 contradicts algorithm.gdpo.dialect=trl",
                "algorithm.gdpo.combine=dvao contradicts algorithm.gdpo.dialect=trl",
            ],
        ),
        (
            {"gdpo": {"combine": {"name": "rvpo", "k": -1}, "group_norm": "summed"}},
            [
                "algorithm.gdpo.combine=rvpo needs group_norm=per_reward",
                "algorithm.gdpo.combine: rvpo k: expected a number above 0, got -1",
            ],
        ),
        # verl's lists, and a key of ours
        (
            {KEYS: ["a", "a"], "gdpo": {"min_groups": 3, "max_failed": 2}},
            [
                "algorithm.gdpo.min_groups: unknown setting; did you mean 'min_group'?",
                f"{DIFFERENT}['a', 'a']",
                "algorithm.gdpo.max_failed: got 2; Input should be less than or equal to 1",
            ],
        ),
    ],
)
def test_all_mistakes_are_said_at_once(algorithm, messages):
    with pytest.raises(SettingsError) as raised:
        read_settings(algorithm)
    first, *lines = str(raised.value).split("\n")
    assert first == f"the configuration has {len(messages)} mistakes:"
    assert len(lines) == len(messages) == len(raised.value.mistakes)
    for line, message in zip(lines, messages, strict=True):
        assert line.startswith(f"  {message}")


@pytest.mark.parametrize(
    ("gdpo", "message"),
    [
        # the value that is refused was no contradiction of the dialect
        ({"dialect": "nemo_rl", "eps": "small"}, f"algorithm.gdpo.eps: got 'small'; {NUMBER}"),
        # an unknown key may be the condition that `otherwise` needs
        (
            {"rewards": {"a": {"wehn": {"reward": "b", "at_least": 0}, "otherwise": "zero"}}},
            "algorithm.gdpo.rewards.a: got {'wehn': {'reward': 'b', 'at_least': 0}, 'otherwise': "
            "'zero'}; wehn: unknown setting; did you mean 'when'?",
        ),
        # rewards that cannot be read are not said to have no weight
        ({"rewards": {"a": "1", "b": 0}}, f"algorithm.gdpo.rewards.a.weight: got '1'; {NUMBER}"),
        # a key that has to go contradicts nothing else
        (
            {"normalize_by_std": False, "combine": "dvao"},
            "algorithm.gdpo.normalize_by_std=False contradicts algorithm.norm_adv_by_std_in_grpo="
            "True; set the latter alone",
        ),
    ],
)
def test_one_mistake_is_said_once(gdpo, message):
    with pytest.raises(SettingsError) as raised:
        read_settings({"gdpo": gdpo})
    assert str(raised.value) == message


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ({"a": [0.9, 0.1]}, "keep_groups.a: got [0.9, 0.1]; expected the lowest mean, and then"),
        ({"a": 0.5}, "keep_groups.a: got 0.5; Input should be a valid tuple"),
        ({"a": [0.5]}, "keep_groups.a.1: got [0.5]; Field required"),
        ({"a": ["low", 1]}, "keep_groups.a.0: got 'low'; Input should be a valid number"),
        ({"a": [0, float("inf")]}, "keep_groups.a.1: got inf; Input should be a finite number"),
        ({"score": [0, 1]}, "'score' is verl's name for the sum; name its rewards instead"),
        ([0, 1], "keep_groups: got [0, 1]; expected {NAME: [lowest mean, highest mean]} or null"),
    ],
)
def test_ranges_to_keep_groups_by(written, message):
    with pytest.raises(SettingsError) as raised:
        read_settings({"gdpo": {"keep_groups": written}})
    assert message in str(raised.value)


def test_ranges_that_can_be():
    written = {"a": [0, 1], "b": [0.5, 0.5], "c": None}
    settings = read_settings({"gdpo": {"keep_groups": written}})
    assert settings.keep_groups == {"a": (0.0, 1.0), "b": (0.5, 0.5)}
    assert read_settings({"gdpo": {"keep_groups": None}}).keep_groups is None

"""The calls of dialogues: as the package makes them, and what hostile ones cannot do."""

import os
import signal
from pathlib import Path
from types import MethodType

import pytest

from verl_gdpo.evaluation.bfcl import simulators, simulators_inside
from verl_gdpo.evaluation.bfcl.form import Call
from verl_gdpo.evaluation.bfcl.simulators import LimitError
from verl_gdpo.sandbox.limited_process import LimitedPool


def folder(**contents):
    return {"type": "directory", "contents": contents}


NOTES = {"notes.txt": {"type": "file", "content": "b\na (x)"}}
ENTRY = {
    "id": "multi_turn_base_0",
    "question": "is not needed",
    "initial_config": {
        "GorillaFileSystem": {"root": {"home": folder(inner=folder(), **NOTES)}},
        "TwitterAPI": {"username": "ann", "password": "x", "authenticated": True},
    },
    "involved_classes": ["GorillaFileSystem", "TwitterAPI", "MathAPI"],
}


def results(*calls, entry=ENTRY):
    (found,) = simulators.results(entry, [calls])
    return found


@pytest.fixture
def pool(monkeypatch):
    """Puts a pool with few seconds in the place of the one for all."""

    def pool(cpu_s=simulators.LIMIT_CPU_S):
        made = LimitedPool(simulators_inside.__file__, cpu_s, simulators.LIMIT_BYTES)
        monkeypatch.setattr(simulators, "LIMIT_CPU_S", cpu_s)
        monkeypatch.setattr(simulators, "_pool", made)
        return made

    return pool


def process():
    """The process that answered last."""
    return simulators._pool._idle.queue[-1].process


SAME_AS_THE_PACKAGE = (
    "ls()",
    "ls(True)",
    "cd(folder='inner')",
    "cd(folder='..')",
    "cat(file_name='notes.txt')",
    "sort('notes.txt')",
    "mkdir(dir_name='new')",  # returns None
    "grep(file_name='notes.txt', pattern='a (x')",  # the package drops the blank
    "post_tweet(content='Hi.', tags=['#a'])",
    "logarithm(value=8, base=2, precision=12)",  # no JSON
    "square_root(number=2, precision=9)",
    "mean(numbers=[1, 2.5, -3])",
    "list_all_following()",  # a list
    # names
    "lsx()",
    "LS()",
    "GorillaFileSystem.ls()",
    "os.system(command='true')",
    "_load_scenario(scenario={})",
    "run()",
    "x.kill(pid=1)",
    " ls()",
    "ls ()",
    "list files()",
    "(a=1)",
    # arguments
    "cd()",
    "cd(folder='a', mode=1)",
    "cd('a', folder='b')",
    "cd(folder=None)",
    "cd(folder=['a'])",
    "tail(file_name='notes.txt', lines='2')",
    "mean(numbers=nan)",
    "mean(numbers=[inf, 1])",
    "mean(numbers='text')",
    "add(a=1, b='x')",
    "add(a={'x': [1]}, b=True)",
    "echo(content='\\ud800 \\x00')",
    "cd(from=1)",
    "cd(a b=1)",
    "cd(a-b=1)",
    "cd(=1)",
    "cd(folder='a'",
    "mean(numbers=" + "[" * 300 + "]" * 300 + ")",
    "power(base=10, exponent=5000)",
    "comment(tweet_id=9, comment_content='x')",
)


def test_results_are_those_of_the_package():
    from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_utils import execute_multi_turn_func_call

    calls = list(SAME_AS_THE_PACKAGE)
    expected, _ = execute_multi_turn_func_call(
        calls, ENTRY["initial_config"], ENTRY["involved_classes"], "a_test", ENTRY["id"]
    )
    assert expected[0] == '{"current_directory_content": ["inner", "notes.txt"]}'
    assert results(*calls) == expected


def test_calls_begin_where_the_calls_before_ended_and_each_request_begins_anew():
    steps = [["mkdir(dir_name='new')"], ["cd(folder='new')", "pwd()"]]
    there = '{"current_working_directory": "/home/new"}'
    for _ in range(2):
        assert simulators.results(ENTRY, steps)[1][1] == there
    assert "new" not in results("ls()")[0]


def test_a_default_argument_that_a_call_changed_is_new_in_the_next_call():
    # the package's mention() adds to the list that post_tweet() has as its default
    calls = ["post_tweet(content='x')", "mention(tweet_id=0, mentioned_usernames=['@bob'])"]
    for _ in range(2):
        *_, again = results(*calls, "post_tweet(content='y')")
        assert '"mentions": []' in again


def test_what_is_in_a_module_of_the_package_stays_as_it_is():
    # in long contexts, the package's module lends its credit cards to all simulators
    card = {"random_seed": 1, "access_token": "t", "token_expires_in": 9, "budget_limit": None}
    keys = ("credit_card_list", "booking_record")
    names = ("token_type", "token_scope", "user_first_name", "user_last_name")
    entry = {
        "id": "multi_turn_long_context_0",
        "initial_config": {"TravelAPI": card | {key: {} for key in keys} | dict.fromkeys(names)},
        "involved_classes": ["TravelAPI"],
    }
    book = (
        "book_flight(access_token='t', card_id='1432', travel_date='d', travel_from='SFO', "
        "travel_to='LAX', travel_class='first', travel_cost=5)"
    )
    from bfcl_eval.eval_checker.multi_turn_eval.func_source_code import long_context

    card_id, before = next(
        (card_id, card["balance"])
        for card_id, card in long_context.CREDIT_CARD_EXTENSION.items()
        if card.get("balance", 0) > 5
    )
    balance = f"get_credit_card_balance(access_token='t', card_id={card_id!r})"
    calls = [book.replace("1432", card_id), balance]
    for _ in range(2):
        booked, left = results(*calls, entry=entry)
        assert '"booking_status": true' in booked
        assert left == f'{{"card_balance": {before - 5.0}}}'


@pytest.mark.parametrize(
    "call",
    [
        "__import__('os').system('touch FILE')",
        "cd(folder=__import__('os').system('touch FILE'))",
        "cd(folder=open('FILE', 'w'))",
        "open(file='FILE', mode='w')",
        "ls.__globals__['subprocess'].run(args=['touch', 'FILE'])",
        "ls.__func__(a=1)",
        "(lambda: open('FILE', 'w'))()",
        "[open('FILE', 'w') for _ in 'x']",
        'cd(folder=f\'{open("FILE", "w")}\')',
        "cd(*[open('FILE', 'w')])",
        "cd(**{'folder': open('FILE', 'w')})",
        "cd(*['inner'])",
        "cd(folder=f'{1}')",
        "eval(source='open(1)')",
        "json.dumps(obj=1)",
        "touch(file_name='FILE')",
        "echo(content='x', file_name='../../../../FILE')",
        "cat(file_name='/etc/passwd')",
        "cd(folder='../../../../etc')",
        "ls().__class__",
        "a" + ".a" * 100_000 + "()",
        "add(a=" + "-" * 100_000 + "1, b=1)",
    ],
)
def test_an_attack_does_nothing(call, tmp_path):
    file = tmp_path / "file"
    (said,) = results(call.replace("FILE", str(file)))
    assert said.startswith(("Error during execution: ", '{"error": '))
    assert "root:" not in said
    assert "0x" not in said  # an address would be another one each time
    assert not file.exists()
    assert results("pwd()") == ['{"current_working_directory": "/home"}']


def doubled(times):
    """A folder that holds itself, so to say, twice: find() lists 2^times names."""
    for number in range(times):
        yield f"cp(source='inner', destination='copy{number}')"
        yield f"mv(source='copy{number}', destination='inner')"


@pytest.mark.parametrize(
    "calls",
    [
        ["power(base=9, exponent=999999999)"],  # inside one multiplication
        ["round_number(number=5, decimal_places=-1000000000)"],
        [*doubled(60), "find()"],
        ["echo(content='" + "x" * simulators_inside.ROOM_CHARS + "')"],
        ["echo(content='" + "x" * simulators.MAX_REQUEST_CHARS + "')"],
    ],
    ids=["power", "round", "folders", "long result", "long call"],
)
def test_what_needs_too_much_ends_its_dialogue_alone(calls, pool):
    pool(0.3)
    with pytest.raises(LimitError, match=r"multi_turn_base_0: the calls need more than 0.3 s"):
        results(*calls)
    assert len(results("pwd()")) == 1


def test_calls_that_no_policy_could_read_are_not_made(monkeypatch):
    monkeypatch.setattr(simulators, "MAX_REQUEST_CHARS", 1000)
    with pytest.raises(LimitError):
        results(*["ls()"] * 200)


def test_pythons_warnings_about_a_call_are_not_printed(capfd, monkeypatch, pool):
    monkeypatch.setenv("PYTHONWARNINGS", "always")  # some are not shown by default
    pool()
    assert "No such directory" in results("cd(folder='\\d')")[0]
    assert capfd.readouterr().err == ""


def test_an_error_that_cannot_be_printed_is_named():
    """Python prints no number of more than 4,300 digits, which a call can hold in hexadecimal."""

    def ls(_):
        raise KeyError(16**5000)

    made = simulators_inside.Simulators(ENTRY)
    made._methods["ls"] = MethodType(ls, made)
    assert made.results(["ls()"]) == ["Error during execution: KeyError"]


def test_half_a_character_in_a_result_can_be_read():
    made = simulators_inside.Simulators(ENTRY)
    made._methods["ls"] = MethodType(lambda _: "\ud800", made)
    assert made.results(["ls()"]) == ["\\ud800"]


def test_a_dialogue_that_needs_too_much_cannot_be_right(pool):
    pool(0.3)
    with pytest.raises(LimitError):
        simulators.is_right(ENTRY, [[["ls()", "power(base=9, exponent=999999999)"]]], [["ls()"]])


def test_memory_is_bounded():
    text = "9" * 3_000_000
    call = f"compute_exchange_rate(base_currency='USD', target_currency='JPY', value='{text}')"
    entry = {**ENTRY, "involved_classes": ["MathAPI"]}
    calls = ["logarithm(value=3, base=2, precision=9999999999)", call]
    said = results(*calls, entry=entry)
    assert all("rror" in one for one in said)
    pid = process().pid
    peak = next(
        line.split()[1]
        for line in Path(f"/proc/{pid}/status").read_text().split("\n")
        if line.startswith("VmPeak")
    )
    assert int(peak) << 10 <= simulators.LIMIT_BYTES


GOLD = [["mkdir(dir_name='a')", "ls()"], [], ["cd(folder='a')"]]


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        ([[GOLD[0]], [], [GOLD[2]]], True),
        ([[["mkdir('a')"], ["pwd()"], ["ls(a=False)"]], [], [["cd('a')"]]], True),
        ([[["ls()", "mkdir(dir_name='a')"]], [], [GOLD[2]]], False),  # another listing
        ([[["mkdir(dir_name='a')"]], [], [GOLD[2]]], False),  # ls() was asked for
        ([[GOLD[0]], [["touch(file_name='x')"]], [GOLD[2]]], False),  # another state
        ([[GOLD[0]], [["pwd()"]], [GOLD[2]]], True),  # the package does not look there
        ([[GOLD[0], GOLD[2]], [], []], False),  # a turn without a call
        ([[], [], []], False),
    ],
)
def test_a_dialogue_is_right_if_the_packages_checker_says_so(turns, expected):
    assert simulators.is_right(ENTRY, turns, GOLD) is expected
    assert simulators.is_right(ENTRY, [[GOLD[0]], [], [GOLD[2]]], GOLD)  # after a wrong one


def test_folders_in_themselves_cannot_be_compared():
    calls = ["cp(source='inner', destination='inner')"]
    with pytest.raises(LimitError):
        simulators.is_right(ENTRY, [[calls]], [calls])


def test_a_process_that_was_killed_is_started_again():
    results("pwd()")
    os.kill(process().pid, signal.SIGKILL)
    assert results("pwd()") == ['{"current_working_directory": "/home"}']


@pytest.mark.parametrize("name", ["bfcl_eval", "mpmath"])
def test_a_package_that_cannot_be_imported_raises(name, tmp_path, monkeypatch, pool):
    (tmp_path / f"{name}.py").write_text("raise OSError('a bad disk')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    pool()
    with pytest.raises(OSError, match=r"multi_turn_base_0: no process .*: OSError: a bad disk"):
        results("ls()")


def test_a_call_of_an_answer_is_a_text_that_is_understood():
    call = Call("echo", {"content": 'it\'s "a" \\ new\nline', "file_name": None})
    assert results(str(call)) == ['{"terminal_output": "it\'s \\"a\\" \\\\ new\\nline"}']

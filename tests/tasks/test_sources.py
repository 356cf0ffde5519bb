"""`python -m data_prep`: sources, refused rows, atomic files and the schema."""

import copy
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from added_task import add_task
from local_server import Files, serving
from processes import completed
from repository import REPO

from verl_gdpo import atomic
from verl_gdpo.tasks import TASKS, preparation
from verl_gdpo.tasks.math_length import rows as math_length
from verl_gdpo.tasks.preparation import (
    DataError,
    LeftOut,
    loading,
    local_files,
    prepared_files,
    schema,
)
from verl_gdpo.tasks.preparation.prepared_files import parquet_rows, write_parquets
from verl_gdpo.tasks.tool_rl import rows as tool_rl
from verl_gdpo.tasks.tool_rl.rows import SOURCES
from verl_gdpo.tools.data import as_typed, main

CALL = '{"name": "Get News", "parameters": {"page": "1"}}'
TOOL = f"<think> t </think>\n<tool_call>\n{CALL}\n</tool_call>"
RESPONSE = "<think> t </think>\n<response> hi </response>"
BOTH = f"<think> t </think>\n<tool_call>\n{CALL}\n{CALL}\n</tool_call>\n<response> hi </response>"
NEITHER = "<think> t </think>"
HALF_A_CALL = TOOL.replace('"page": "1"}}', '"page": ')
HELLO, HELLO_BLOB_ID = b"hello\n", "ce013625030ba8dba906f756967f9e9ca394464a"  # git hash-object


def row(index=0, *, user="What is new?", ground_truth=TOOL, split="train"):
    return {
        "data_source": "rlla",
        "prompt": [{"role": "system", "content": "Tools: é"}, {"role": "user", "content": user}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": {"index": index, "split": split},
    }


def items(count):
    """The content of an rlla_rl.json; item i is recognised by its input."""
    return [{"instruction": "s", "input": f"question {i}", "output": TOOL} for i in range(count)]


def write_json(path, content):
    path.write_text(json.dumps(content))
    return path


def files_in(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def run(capsys, *arguments, task="tool_rl"):
    """Exit code, stdout, stderr of one command line."""
    try:
        code = main([task, *map(str, arguments)])
    except SystemExit as stop:
        code = stop.code
    output = capsys.readouterr()
    return code, output.out, output.err


def read_rows(path, split):
    return [*local_files.read_rows(path, split, SOURCES)]


# ---- schema


def test_files_read_back_as_verl_reads_them_and_concatenate(tmp_path):
    rows = [row(0), row(1, user="second", ground_truth=RESPONSE)]
    write_parquets({tmp_path / "a.parquet": rows, tmp_path / "b.parquet": rows[:1]})
    loaded = [
        datasets.load_dataset("parquet", data_files=str(tmp_path / name), cache_dir=str(tmp_path))
        for name in ("a.parquet", "b.parquet")
    ]
    together = datasets.concatenate_datasets([one["train"] for one in loaded])
    assert list(together) == [*rows, rows[0]]


def test_rows_of_several_row_groups_keep_their_order(tmp_path, monkeypatch):
    monkeypatch.setattr(prepared_files, "ROWS_PER_GROUP", 2)
    rows = [row(i, user=f"question {i}") for i in range(5)]
    write_parquets({tmp_path / "a.parquet": rows})
    assert [*parquet_rows(tmp_path / "a.parquet")] == rows
    assert pq.ParquetFile(tmp_path / "a.parquet").num_row_groups == 3  # 2 + 2 + 1


def test_checked_accepts_several_turns_and_every_kind():
    several_turns = row()
    turns = [("system", ""), ("user", ""), ("assistant", ""), ("user", "x")]
    several_turns["prompt"] = [{"role": role, "content": text} for role, text in turns]
    rows = [row(ground_truth=text) for text in (TOOL, RESPONSE, BOTH, NEITHER)]
    given = [*enumerate([several_turns, *rows])]
    assert [*schema.checked(given, "rows")] == given


# place in a row, what is put there (... removes it), the field and the words of the message
REFUSALS = [
    (("reward_model", "ground_truth"), ..., "reward_model.ground_truth", "missing"),
    (("reward_model", "ground_truth"), None, "reward_model.ground_truth", "got None; expected a s"),
    (("reward_model", "ground_truth"), " \n", "reward_model.ground_truth", "expected some text"),
    (("reward_model", "ground_truth"), HALF_A_CALL, "reward_model.ground_truth", "line 1 of 1"),
    (("reward_model",), None, "reward_model", "expected an object"),
    (("prompt",), [], "prompt", "expected at least one message"),
    (("prompt",), "What is new?", "prompt", "expected a list"),
    (("prompt", 1, "content"), 7, "prompt[1].content", "got 7; expected a str"),
    (("prompt", 1, "content"), "\ud83d", "prompt[1].content", "expected valid Unicode"),
    (("prompt", 1, "role"), "human", "prompt[1].role", "got 'human'; expected one of"),
    (("prompt", 1, "role"), "system", "prompt[1].role", "only as the first"),
    (("prompt", 1, "role"), "assistant", "prompt[1].role", "expected 'user'"),
    (("prompt", 1), {"from": "human", "value": "x"}, "prompt[1].from", "unknown"),
    (("prompt", 1, "content"), "\n", "prompt[1].content", "expected some text"),
    (("data_source",), "openai/gsm9k", "data_source", "expected one of ['rlla'"),
    (("images",), [], "images", "unknown"),
    (("extra_info", "index"), True, "extra_info.index", "got True; expected an int"),
    (("extra_info", "index"), 2**63, "extra_info.index", "expected an int in [0, 2**63)"),
]


@pytest.mark.parametrize(("place", "value", "field", "words"), REFUSALS)
def test_a_refusal_names_row_and_field(tmp_path, place, value, field, words):
    bad = copy.deepcopy(row(1))
    target = bad
    for step in place[:-1]:
        target = target[step]
    if value is ...:
        del target[place[-1]]
    else:
        target[place[-1]] = value
    with pytest.raises(DataError) as caught:
        write_parquets({tmp_path / "a.parquet": [row(0), bad]})
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / 'a.parquet'}, row 1, field {field}: ")
    assert words in message
    assert files_in(tmp_path) == {}


def test_rows_that_are_no_rows_are_refused():
    with pytest.raises(DataError, match=r"^here: got no rows"):
        [*schema.checked([], "here")]
    with pytest.raises(DataError, match=r"^here, row 0, the whole row: got 'x'; expected an obj"):
        [*schema.checked([(0, "x")], "here")]


# ---- files that appear whole or not at all


def test_failure_while_writing_the_second_file_leaves_both_as_they_were(tmp_path, monkeypatch):
    paths = [tmp_path / "train.parquet", tmp_path / "test.parquet"]
    for path in paths:
        path.write_bytes(b"old")
    writers = [pq.ParquetWriter]  # and no second one, as on a full disk

    def write(*arguments):
        if not writers:
            raise OSError("No space left on device")
        return writers.pop()(*arguments)

    monkeypatch.setattr(pq, "ParquetWriter", write)
    with pytest.raises(OSError, match="No space left"):
        write_parquets({path: [row()] for path in paths})
    assert files_in(tmp_path) == {"train.parquet": b"old", "test.parquet": b"old"}


def test_an_interrupt_in_the_block_leaves_nothing(tmp_path):
    with (
        pytest.raises(KeyboardInterrupt),
        atomic.replace_together(tmp_path / "new" / "a") as (temporary,),
    ):
        temporary.write_bytes(b"half")
        raise KeyboardInterrupt
    assert files_in(tmp_path / "new") == {}


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_stays_one_and_its_file_is_replaced(tmp_path, exists):
    (tmp_path / "disk").mkdir()
    if exists:
        (tmp_path / "disk" / "a").write_bytes(b"old")
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "a")
    with atomic.replace_together(tmp_path / "link") as (temporary,):
        assert temporary.parent == tmp_path / "disk"  # a rename does not leave a file system
        temporary.write_bytes(b"new")
    assert (tmp_path / "link").is_symlink()
    assert files_in(tmp_path / "disk") == {"a": b"new"}


HELD = """
import os, signal, sys, time
from pathlib import Path
from verl_gdpo.atomic import replace_together
with replace_together(*map(Path, sys.argv[2:])) as temporary:
    for path in temporary:
        path.write_bytes(b"half")
    print("writing", flush=True)
    if sys.argv[1] == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.stdin.read()
"""


@contextmanager
def writer(end, *paths):
    """A process that is writing the files, and dies or waits."""
    command = [sys.executable, "-c", HELD, end, *map(str, paths)]
    with subprocess.Popen(
        command, cwd=REPO, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "writing\n"
        if end == "dies":
            assert process.wait(30) == -signal.SIGKILL
        yield
        process.stdin.close()


def test_a_new_start_removes_what_a_killed_writer_left_and_nothing_else(tmp_path):
    paths = [tmp_path / "a[1].parquet", tmp_path / "b.parquet"]
    with writer("waits", *paths), writer("dies", *paths):
        assert len(files_in(tmp_path)) == 4
        others = [".c.tmp", ".b.parquet.tmp", ".ab.parquet.x.tmp"]
        for name in others:
            (tmp_path / name).write_bytes(b"mine")
        with atomic.replace_together(*paths) as temporary:
            for path in temporary:
                path.write_bytes(b"new")
            assert len(files_in(tmp_path)) == 2 + 2 + len(others)  # of the living, and of this one
        assert [path.read_bytes() for path in paths] == [b"new", b"new"]
    assert {*files_in(tmp_path)} == {*others, *(path.name for path in paths)}
    assert [path.read_bytes() for path in paths] == [b"half", b"half"]  # the living one came last


def test_a_temporary_file_that_is_taken_for_a_leftover_is_made_again(tmp_path, monkeypatch):
    """Between its making and its lock, another start may remove it; nor need there be locks."""
    taken = []

    def flock(file, _):
        taken.append(file)
        if len(taken) == 1:
            next(tmp_path.iterdir()).unlink()
        else:
            raise OSError("no locks here")

    monkeypatch.setattr(atomic.fcntl, "flock", flock)
    for content in (b"1", b"2"):
        with atomic.replace_together(tmp_path / "a") as (temporary,):
            assert temporary.exists()
            temporary.write_bytes(content)
        assert files_in(tmp_path) == {"a": content}
    assert len(taken) == 3


# ---- made once, and again when what makes it changes


def if_needed(capsys, out, *more):
    tiny = ("--synthetic", 5)
    return run(capsys, "--if-needed", "--out", out, *tiny, *more)


def test_files_are_made_again_if_they_or_their_arguments_differ(tmp_path, capsys):
    assert if_needed(capsys, tmp_path)[0] == 0
    whole, times = files_in(tmp_path), [path.stat().st_mtime_ns for path in tmp_path.iterdir()]
    code, output, _ = if_needed(capsys, tmp_path)
    assert code == 0 and "up to date" in output
    assert [path.stat().st_mtime_ns for path in tmp_path.iterdir()] == times
    for name in whole:
        (tmp_path / name).unlink()
        assert if_needed(capsys, tmp_path)[0] == 0 and files_in(tmp_path) == whole
    assert if_needed(capsys, tmp_path, "--seed", 1)[0] == 0 and files_in(tmp_path) != whole


def test_rows_that_a_person_made_with_other_options_are_kept(tmp_path, capsys):
    """`run.sh` says --keep-others."""
    assert run(capsys, "--out", tmp_path, "--synthetic", 7, "--seed", 3)[0] == 0
    whole = files_in(tmp_path)
    code, output, _ = if_needed(capsys, tmp_path, "--keep-others")
    assert code == 0 and files_in(tmp_path) == whole
    assert "kept as `verl-gdpo data tool_rl --synthetic 7 --seed 3` made it" in output
    (tmp_path / "test.parquet").unlink()  # half of them is no data
    assert if_needed(capsys, tmp_path, "--keep-others")[0] == 0
    assert files_in(tmp_path) != whole
    # its own are made again when the code changes, and a file that somebody changed is refused
    assert "up to date" in if_needed(capsys, tmp_path, "--keep-others")[1]
    edit(tmp_path / "train.parquet")
    code, _, error = if_needed(capsys, tmp_path, "--keep-others")
    assert code == 1 and "it was changed after data_prep wrote it" in error


def test_without_a_source_rows_that_are_there_are_kept(tmp_path, capsys):
    """A task without upstream: run.sh cannot know where its rows come from."""

    anyhow = ("--if-needed", "--keep-others")
    code, _, error = run(capsys, "--out", tmp_path, *anyhow, task="math_length")
    assert code == 2 and "math_length has no rows to download; expected --from FILE or" in error
    assert run(capsys, "--out", tmp_path, "--synthetic", 6, task="math_length")[0] == 0
    code, output, _ = run(capsys, "--out", tmp_path, *anyhow, task="math_length")
    assert code == 0 and "kept as `verl-gdpo data math_length --synthetic 6`" in output


def test_a_task_whose_rows_are_made_needs_no_source(tmp_path, capsys):
    options = ("--if-needed", "--keep-others", "--synthetic-test", 9, "--seed", 3)
    assert run(capsys, "--out", tmp_path, *options, task="constraints")[0] == 0
    files = (tmp_path / f"{split}.parquet" for split in ("train", "test"))
    assert [pq.read_metadata(file).num_rows for file in files] == [2000, 9]
    assert "up to date" in run(capsys, "--out", tmp_path, *options, task="constraints")[1]


def test_other_code_makes_new_files(tmp_path, capsys, monkeypatch):
    assert {path.name for path in prepared_files._code(TASKS["tool_rl"])} >= {
        *("schema.py", "local_files.py", "loading.py", "score.py", "rows.py", "words.json"),
        "form.py",
    }
    changed = tmp_path / "changed.py"
    changed.write_text("")
    monkeypatch.setattr(prepared_files, "CODE", tmp_path)
    assert "up to date" not in if_needed(capsys, tmp_path / "out")[1]
    assert "up to date" in if_needed(capsys, tmp_path / "out")[1]
    changed.write_text("# other rows")
    assert "up to date" not in if_needed(capsys, tmp_path / "out")[1]


def test_other_content_of_a_source_makes_new_files(tmp_path, capsys):
    source = write_json(tmp_path / "a.json", items(50))
    arguments = ("--if-needed", "--out", tmp_path / "out", "--from", source)
    assert "up to date" not in run(capsys, *arguments)[1]
    assert "up to date" in run(capsys, *arguments)[1]
    write_json(source, items(51))
    assert "up to date" not in run(capsys, *arguments)[1]


def edit(path):
    """Drop a row as a user would, with a tool that keeps the metadata."""
    table = pq.read_table(path)
    pq.write_table(table.slice(1), path)
    assert table.schema.metadata == pq.read_table(path).schema.metadata != {}


def damage(path):
    path.write_bytes(path.read_bytes()[:100])


def move_and_link(path):
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def link_to_nothing(path):
    path.unlink()
    path.symlink_to(path.with_name("nothing"))


@pytest.mark.parametrize("more", [(), ("--if-needed",)])
@pytest.mark.parametrize(
    ("change", "why"),
    [
        (edit, "it was changed after data_prep wrote it"),
        (damage, "it cannot be read, or data_prep did not write it"),
        (move_and_link, "it is a link"),
        (link_to_nothing, "it is a link"),
    ],
)
def test_a_file_that_is_not_as_data_prep_wrote_it_is_not_replaced(
    tmp_path, capsys, change, why, more
):
    tiny = ("--out", tmp_path, "--synthetic", 5, "--seed")
    assert run(capsys, *tiny, 0)[0] == run(capsys, *tiny, 1)[0] == 0  # as it was written, it is
    whole = files_in(tmp_path)
    mine = tmp_path / "test.parquet"
    change(mine)
    before = {path: path.exists() and path.read_bytes() for path in tmp_path.iterdir()}
    code, output, errors = run(capsys, *tiny, 2, *more)
    assert (code, output, errors.count("\n")) == (1, "", 1)
    assert f"{mine} is left as it is: {why}. Replace it with --force" in errors
    assert "data.train_files=FILE" in errors
    assert {path: path.exists() and path.read_bytes() for path in tmp_path.iterdir()} == before
    assert run(capsys, *tiny, 1, *more, "--force")[0] == 0
    assert files_in(tmp_path).items() >= whole.items()


def test_a_folder_may_be_a_link(tmp_path, capsys):
    (tmp_path / "disk").mkdir()
    (tmp_path / "data").symlink_to(tmp_path / "disk")
    for seed in (0, 1):
        assert if_needed(capsys, tmp_path / "data", "--seed", seed)[0] == 0
    assert sorted(files_in(tmp_path / "disk")) == ["test.parquet", "train.parquet"]


# ---- download


@pytest.fixture
def upstream(tmp_path_factory, monkeypatch):
    """(address, folder) of a server of files."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    folder = tmp_path_factory.mktemp("upstream")
    with serving(partial(Files, directory=folder)) as server:
        yield server.url, folder


def test_fetch_takes_a_good_copy_and_replaces_a_bad_one(tmp_path, upstream, capsys):
    url, folder = upstream
    (folder / "hello").write_bytes(HELLO)
    path = tmp_path / "cache" / "hello"
    for content in (None, None, b"damaged"):
        if content:
            path.write_bytes(content)
        loading.fetch(f"{url}/hello", path, blob_id=HELLO_BLOB_ID)
        assert files_in(path.parent) == {"hello": HELLO}
    progress_lines = capsys.readouterr().err.splitlines()
    assert [line.split()[0] for line in progress_lines] == ["downloading", "using", "downloading"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"other\n", r"got git blob id [0-9a-f]{40} \(6 bytes\); expected " + HELLO_BLOB_ID),
        (None, "download failed: HTTP Error 404: "),
        (b"x" * 3000, "download failed: got more than 2,000 bytes"),
    ],
)
def test_a_failed_download_leaves_what_was_there(tmp_path, upstream, content, words, monkeypatch):
    monkeypatch.setattr(loading, "MAX_BYTES", 2000)
    url, folder = upstream
    if content:
        (folder / "hello").write_bytes(content)
    (tmp_path / "hello").write_bytes(b"old")
    with pytest.raises(DataError, match=f"^{url}/hello: {words}"):
        loading.fetch(f"{url}/hello", tmp_path / "hello", blob_id=HELLO_BLOB_ID)
    assert files_in(tmp_path) == {"hello": b"old"}


def test_an_address_that_cannot_work_is_a_data_error(tmp_path, upstream, monkeypatch):
    monkeypatch.setattr(loading, "TIMEOUT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for url, words in (
            ("mirror/x", "download failed: unknown url type"),
            ("file:///no/such/file", "download failed: .*No such file"),
            ("http://127.0.0.1:1/a b", "download failed: URL can't contain"),
            (f"http://127.0.0.1:{silent.getsockname()[1]}", "download failed: .*timed out"),
        ):
            with pytest.raises(DataError, match=words):
                loading.fetch(url, tmp_path / "x", blob_id=HELLO_BLOB_ID)
    assert files_in(tmp_path) == {}


def parquet_bytes(rows):
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows), sink)
    return sink.getvalue().to_pybytes()


OTHER_COLUMNS = parquet_bytes([{"question": "q", "answer": "a"}])


def upstream_bytes(split, count):
    """A file as upstream's: other order of the fields, and the prompt once more in extra_info."""
    rows = []
    for i in range(count):
        one = row(i, user=f"{split} {i}", split=split)
        one["prompt"] = [{"content": m["content"], "role": m["role"]} for m in one["prompt"]]
        one["extra_info"] |= {"instruction": "Tools", "input": f"{split} {i}", "output": TOOL}
        rows.append(one)
    return parquet_bytes(rows)


def pin(monkeypatch, contents, **more):
    """Take these contents for the pinned ones."""
    pinned = {
        split: (path, prepared_files.git_blob_id(contents[split]))
        for split, (path, _) in SOURCES.files.items()
    }
    monkeypatch.setattr(tool_rl, "SOURCES", replace(SOURCES, files=pinned, **more))


def mirror(folder, **contents):
    for split, content in contents.items():
        path = folder / SOURCES.files[split][0]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


CONTENTS = {split: upstream_bytes(split, count) for split, count in (("train", 3), ("test", 2))}


def test_upstream_is_the_default_source(tmp_path, upstream, monkeypatch, capsys):
    url, folder = upstream
    pin(monkeypatch, CONTENTS, base_url=f"{url}/m")
    mirror(folder / "m", **CONTENTS)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    for _ in range(2):
        assert run(capsys, "--out", tmp_path / "out")[0] == 0
        shutil.rmtree(folder / "m", ignore_errors=True)  # the second time, both copies are there
    for split, count in (("train", 3), ("test", 2)):
        expected = [row(i, user=f"{split} {i}", split=split) for i in range(count)]
        assert [*parquet_rows(tmp_path / "out" / f"{split}.parquet")] == expected


def test_a_wrong_checksum_of_the_second_file_writes_neither(tmp_path, monkeypatch, capsys):
    pin(monkeypatch, CONTENTS)
    mirror(tmp_path / "mirror", train=CONTENTS["train"], test=CONTENTS["train"])
    base_url = (tmp_path / "mirror").as_uri()
    given = ("--out", tmp_path / "out", "--base-url", base_url, "--cache", tmp_path / "cache")
    code, output, errors = run(capsys, *given)
    assert (code, output) == (1, "")
    assert f"{base_url}/dataset/rlla_4k/test.parquet: got git blob id" in errors.splitlines()[-1]
    assert "--from FILE or --synthetic N" in errors.splitlines()[-1]
    assert not (tmp_path / "out").exists()
    assert list(files_in(tmp_path / "cache" / "tool_rl")) == ["train.parquet"]


# ---- local files


# int(0.02 n): 49 -> 0, 50 -> 1, 149 -> 2, 150 -> 3
@pytest.mark.parametrize(("count", "test_count"), [(50, 1), (149, 2), (150, 3), (1030, 20)])
def test_json_is_split_by_upstreams_rule(tmp_path, count, test_count):
    path = write_json(tmp_path / "rlla_rl.json", items(count))
    splits = loading._from_files(SOURCES, path, None)
    questions = [f"question {i}" for i in range(count)]
    np.random.RandomState(31415).shuffle(questions)
    for split, expected in (
        ("train", questions[: count - test_count]),
        ("test", questions[count - test_count :]),
    ):
        assert [one["prompt"][1]["content"] for one in splits[split]] == expected
        places = [one["extra_info"] for one in splits[split]]
        assert places == [{"index": i, "split": split} for i in range(len(expected))]


def test_json_lines_under_the_suffix_of_a_list(tmp_path):
    """As `datasets`, and so verl and check, read them."""
    path = write_json(tmp_path / "list.json", items(3))
    lines = tmp_path / "lines.json"
    lines.write_text("\n".join(json.dumps(item) for item in items(3)))
    assert [*read_rows(lines, "train")] == [*read_rows(path, "train")]
    lines.write_text(json.dumps(items(1)[0]) + "\n{no\n")
    with pytest.raises(DataError, match=r"row 1.*in line 2"):
        read_rows(lines, "train")


def test_parquet_is_split_as_json_is_and_has_the_rows_of_upstream(tmp_path):
    content = [{"instruction": "Tools: é", "input": "What is new?", "output": TOOL}]
    assert read_rows(write_json(tmp_path / "a.json", content), "train") == [row()]
    write_json(tmp_path / "a.json", items(60))
    write_parquets({tmp_path / "a.parquet": read_rows(tmp_path / "a.json", "train")})
    of_json, of_parquet = (
        {split: [*rows] for split, rows in loading._from_files(SOURCES, path, None).items()}
        for path in (tmp_path / "a.json", tmp_path / "a.parquet")
    )
    assert of_json == of_parquet and len(of_json["train"]) == 59


def test_a_task_that_has_neither_upstream_nor_made_rows(monkeypatch, capsys):
    task = add_task(monkeypatch, "mine", lambda response, truth, **_: {}, system_prompt=None)
    monkeypatch.setitem(TASKS, "mine", task)
    assert main(["mine", "--out", "nowhere"]) == 2
    assert "mine has no rows to download; expected --from FILE\n" in capsys.readouterr().err


def lines_of(error):
    first, *others = error.splitlines()
    assert all(other.startswith("  ") for other in others)
    return [first, *(other.strip() for other in others)]


def test_bad_rows_are_counted_and_the_first_ten_are_named(tmp_path, capsys):
    """Of each kind: no JSON, no row, no ground truth, none of this task's."""
    good = json.dumps(items(1)[0])
    bad = ["{", "[]", good.replace("<response>", "").replace("<tool_call>", "<tool_call> x"), "3"]
    path = tmp_path / "a.jsonl"
    for count, end in ((4, ":"), (10, ":"), (12, ", of which the first 10 are:")):
        lines = [line for number in range(count) for line in (good, bad[number % 4])]
        path.write_text("\n".join(lines))
        code, _, errors = run(capsys, "--out", tmp_path / "out", "--from", path, "--test", path)
        head, *named = lines_of(errors)
        assert code == 1 and head == f"verl-gdpo data: {path} has {count} bad rows{end}"
        assert [name.split(",")[0] for name in named] == [f"row {n}" for n in range(1, 21, 2)][
            :count
        ]
        assert "got no readable JSON (Expecting property name" in named[0]
        assert named[0].endswith("in line 2)")
        assert named[1].startswith("row 3, the whole row: got []; expected an object")
        assert named[2].startswith("row 5, field reward_model.ground_truth: ")
    assert not (tmp_path / "out").exists()


def test_bad_rows_of_every_stage_are_counted(tmp_path):
    def mend(truth):
        if truth.count("Get News") == 2:
            raise ValueError("got two\ncalls")
        return truth, ""

    source = replace(SOURCES, mend=mend)
    rows = [row(n, user=f"question {n}", ground_truth=[TOOL, BOTH][n % 2]) for n in range(26)]
    write_parquets({tmp_path / "a.parquet": rows})
    with pytest.raises(DataError, match=r"a\.parquet has 13 bad rows, of which") as caught:
        local_files.read_rows(tmp_path / "a.parquet", "train", source)
    assert [line.split(",")[0] for line in lines_of(str(caught.value))[1:]] == [
        f"row {number}" for number in range(1, 20, 2)
    ]
    with pytest.raises(DataError, match=r"b\.parquet has 2 bad rows:\n  row 0, .*\n  row 2, "):
        write_parquets({tmp_path / "b.parquet": [{}, row(), "x"]})
    assert not (tmp_path / "b.parquet").exists()


def test_a_row_behind_one_that_is_left_out_is_called_by_its_place_in_the_file(tmp_path, capsys):
    def row_of(item, *_):
        if item == "skip":
            raise LeftOut("no use")
        return {**row(), "prompt": item}

    path = write_json(tmp_path / "a.json", [row()["prompt"], "skip", row(1)["prompt"], "bad"])
    with pytest.raises(DataError, match=r"a\.json, row 3, field prompt: got 'bad'"):
        local_files.read_rows(path, "train", replace(SOURCES, row_of=row_of))
    assert capsys.readouterr().err == f"{path}: 1 x left out (no use): row 1\n"


def test_two_files_are_not_split(tmp_path, capsys):
    train = write_json(tmp_path / "a.json", items(3))
    test = tmp_path / "b.parquet"
    write_parquets({test: [row(7, split="validation")]})
    assert run(capsys, "--out", tmp_path / "out", "--from", train, "--test", test)[0] == 0
    assert len([*parquet_rows(tmp_path / "out" / "train.parquet")]) == 3
    assert [*parquet_rows(tmp_path / "out" / "test.parquet")] == [row(0, split="test")]


def test_a_parquet_file_without_extra_info_gets_one(tmp_path):
    without = {key: value for key, value in row().items() if key != "extra_info"}
    pq.write_table(pa.Table.from_pylist([without]), tmp_path / "a.parquet")
    assert read_rows(tmp_path / "a.parquet", "train") == [row()]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.json", items(49), "got 49 rows, .* Expected at least 50"),
        ("a.json", {"rows": []}, "got a JSON dict; expected a list"),
        ("a.json", [], "got no rows"),
        ("a.json", [{"instruction": "s", "output": TOOL}], "row 0, field input: got nothing"),
        ("a.json", [{**items(1)[0], "output": "x <response>"}], "row 0, field reward_model.ground"),
        ("a.json", b"[{", "got no readable JSON"),
        ("a.json", b"[" * 100_000, "got no readable JSON"),
        ("a.parquet", b"PAR1 and no more", "got no readable parquet"),
        ("a.parquet", OTHER_COLUMNS, "row 0, field instruction: got nothing; expected a str"),
        ("a.csv", b"a,b", "got suffix '.csv'; expected '.json', '.jsonl' or '.parquet'"),
    ],
)
def test_bad_local_files_are_refused_with_one_line(tmp_path, capsys, name, content, words):
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        write_json(path, content)
    code, output, errors = run(capsys, "--out", tmp_path / "out", "--from", path)
    assert (code, output) == (1, "")
    (error,) = errors.splitlines()
    assert re.match(f"verl-gdpo data: {re.escape(str(path))}[:,] {words}", error)
    assert not (tmp_path / "out").exists()


def test_rows_of_another_task_are_refused(tmp_path, monkeypatch):
    add_task(monkeypatch, "other", lambda response, truth, **_: {})
    write_parquets({tmp_path / "a.parquet": [row(), {**row(1), "data_source": "other"}]})
    with pytest.raises(DataError, match="row 1, field data_source: got 'other'; expected 'rlla'"):
        read_rows(tmp_path / "a.parquet", "train")


# ---- one row for each problem


@pytest.fixture
def prepared(tmp_path, monkeypatch):
    """A function that prepares questions and numbers, and returns what each file asks."""

    def score(response, truth, **_):
        return {"right": float(bool(response) and float(response) == float(truth))}

    task = add_task(monkeypatch, "mine", score)
    monkeypatch.setitem(TASKS, "mine", task)

    def prepare(pairs, test=None):
        source = {"--from": pairs, "--test": test} if test else {"--from": pairs}
        arguments = ["mine", "--out", str(tmp_path / "out")]
        for option, content in source.items():
            items = [{"question": question, "answer": answer} for question, answer in content]
            arguments += [option, str(write_json(tmp_path / f"{option[2:]}.json", items))]
        assert main(arguments) == 0
        files = [tmp_path / "out" / f"{split}.parquet" for split in ("train", "test")]
        return [[r["prompt"][0]["content"] for r in [*parquet_rows(file)]] for file in files]

    return prepare


def test_a_split_shares_no_problem(prepared, tmp_path, capsys):
    """Each problem four times, with other white space and another spelling of the answer."""
    variants = [("{} + 1?", "{}"), (" {} +  1?", "{}.0"), ("{}\n+\t1?", "{}"), ("{} + 1? ", "{}")]
    pairs = [(ask.format(n), say.format(n + 1)) for ask, say in variants for n in range(60)]
    train, test = prepared(pairs)
    # the first of each: int(0.02 * 60) = 1 test row
    assert (len(train), len(test)) == (59, 1)
    assert {*train, *test} == {f"{n} + 1?" for n in range(60)}
    printed = capsys.readouterr()
    left_out = "180 x left out (an earlier row asks the same): row 60, 61, 62, 63,"
    assert f"{tmp_path / 'from.json'}: {left_out}" in printed.err
    assert re.search(r"repeated problems +0 +0\ntest problems in train +0\n", printed.out)


def test_a_planted_leak_is_found(prepared, capsys):
    problems = [(f"{n} + 1?", f"{n + 1}") for n in range(8)]
    test = [(f"What is  {n} + 1?", f"{n}") for n in range(3)]
    leak = [(f" {question}", f"{answer}.0") for question, answer in problems[5:]]
    assert prepared(problems, test + leak) == [
        [question for question, _ in problems],
        [question for question, _ in test + leak],  # the user's own files keep their problems
    ]
    printed = capsys.readouterr()
    assert re.search(r"test problems in train +3\n", printed.out)
    said = "3 of 6 validation rows have the prompt of a training row: row 3 of test.parquet has"
    assert f"WARNING: {said} that of row 5 of train.parquet. A score" in printed.err


def test_rows_that_disagree_on_the_answer_are_left_out_and_named(prepared, tmp_path, capsys):
    conflict = [("How many?", f"{n}") for n in range(100)]
    pairs = [("1 + 1?", "2"), *conflict, ("1 + 1?", "2.0"), ("2 + 1?", "3")]
    train, _ = prepared(pairs, pairs[:1])
    assert train == ["1 + 1?", "2 + 1?"]
    said = capsys.readouterr().err
    disagree = "100 x left out (rows that ask the same and disagree on the answer): row 1, 2, 3,"
    assert f"{tmp_path / 'from.json'}: {disagree}" in said
    assert "1 x left out (an earlier row asks the same): row 101\n" in said


def test_what_is_one_problem():
    one = row(user="Print x.")
    same = [row(user="  Print\n\u2009x. ", ground_truth=RESPONSE), {**one, "extra_info": {}}]
    others = [row(user="Print X."), row(user="Print x"), row(user="Printx."), row(user="Print x².")]
    asked = [copy.deepcopy(one), copy.deepcopy(one)]
    asked[0]["prompt"][0]["content"] = "Tools: b"
    asked[1]["prompt"] = [*one["prompt"], {"role": "user", "content": ""}]
    questions = [schema.question_of(r) for r in (one, *same, *others, *asked)]
    assert len({*questions[:3]}) == 1
    assert len({*questions[2:]}) == 1 + len(others) + len(asked)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
@pytest.mark.parametrize("between", ["\n", "\r\n", "\n\n \n", "\r\n\r\n"])
def test_a_mark_at_the_start_and_blank_lines(tmp_path, encoding, between):
    lines = [json.dumps(item, ensure_ascii=False) for item in items(3)]
    lines[0] = lines[0].replace("question 0", "question é")
    (tmp_path / "a.jsonl").write_bytes(f"\n{between.join(lines)}\n\n".encode(encoding))
    (tmp_path / "a.json").write_bytes(f"[{','.join(lines)}]".encode(encoding))
    expected = ["question é", "question 1", "question 2"]
    for name in ("a.jsonl", "a.json"):
        rows = read_rows(tmp_path / name, "train")
        assert [one["prompt"][1]["content"] for one in rows] == expected
    (tmp_path / "a.jsonl").write_text(f"{lines[0]}\n\n{{\n")
    with pytest.raises(DataError, match="line 3"):
        read_rows(tmp_path / "a.jsonl", "train")


# ---- synthetic


def test_synthetic_arguments_reach_the_generator(tmp_path, capsys, monkeypatch):
    asked = []

    def make_rows(count, *, split, seed):
        asked.append((count, split, seed))
        return [row(i, user=f"{split} {i}", split=split) for i in range(count)]

    monkeypatch.setattr(tool_rl, "SOURCES", replace(SOURCES, make_rows=make_rows))
    run(capsys, "--out", tmp_path, "--synthetic", 5, "--synthetic-test", 2, "--seed", 9)
    run(capsys, "--out", tmp_path, "--synthetic", 5)
    assert asked == [(5, "train", 9), (2, "test", 9), (5, "train", 0), (1, "test", 0)]


# ---- report


def test_report_of_prompt_lengths():
    # system content "Tools: é" has 8 characters; user contents have 1 to 20
    rows = [row(user="x" * length) for length in range(20, 0, -1)]
    # lower median of 20 values: the 10th; 95 % of 20 = 19 values: the 19th
    for some, expected in ((rows, [9, 18, 27, 28]), (rows[:1], [28] * 4)):
        assert [schema.numbers_of(some)[name] for name in schema.CHARS] == expected


def test_table_has_a_column_per_file():
    splits = {"train": [row(), row(1)], "test": [row(ground_truth=RESPONSE)]}
    shared = schema.overlap(splits)
    lines = [line.split() for line in schema.table(splits, shared).splitlines()]
    assert lines[:2] == [["train", "test"], ["rows", "2", "1"]]
    assert ["prompt", "chars,", "high", "20", "20"] in lines  # 8 + len("What is new?")
    ends = ("repeated problems 1 0", "test problems in train 1", "nearly in train 0")
    assert lines[-3:] == [end.split() for end in ends]


# ---- command line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "the following arguments are required: --out"),
        (("--out", "x", "--seed", "1"), "--seed does not go with"),
        (("--out", "x", "--test", "a.parquet"), "--test does not go with"),
        (("--out", "x", "--from", "a.json", "--base-url", "u"), "--base-url does not go with"),
        (("--out", "x", "--synthetic", "5", "--cache", "c"), "--cache does not go with"),
        (("--out", "x", "--from", "a.json", "--synthetic", "5"), "not allowed with"),
        (("--out", "x", "--synthetic", "0"), "got '0'; expected a whole number >= 1"),
    ],
)
def test_usage_errors_write_nothing(tmp_path, monkeypatch, capsys, arguments, words):
    monkeypatch.chdir(tmp_path)
    code, output, errors = run(capsys, *arguments)
    assert (code, output) == (2, "")
    assert words in " ".join(errors.split())
    assert files_in(tmp_path) == {}


def test_an_unusable_out_or_source_is_said_in_one_line(tmp_path, capsys):
    (tmp_path / "file").write_text("x")
    (tmp_path / "taken" / "test.parquet").mkdir(parents=True)
    missing = tmp_path / "missing.json"
    for arguments, words in (
        (("file", "--synthetic", 5), "got a file; expected a folder"),
        (("taken", "--synthetic", 5), "test.parquet: got a folder"),
        (("out", "--from", missing), str(missing)),
    ):
        code, _, errors = run(capsys, "--out", tmp_path / arguments[0], *arguments[1:])
        assert code == 1 and words in errors.splitlines()[-1]
    assert [path.name for path in (tmp_path / "taken").iterdir()] == ["test.parquet"]


def test_long_work_shows_progress_on_stderr(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(preparation, "SECONDS_BETWEEN_LINES", 0.0)
    path = write_json(tmp_path / "a.json", items(3))
    _, output, errors = run(capsys, "--out", tmp_path / "out", "--from", path, "--test", path)
    written = tmp_path / "out" / "train.parquet"
    for what in (f"reading {path}", "comparing prompts", f"checking {written}"):
        assert re.search(rf"^{re.escape(what)}: 2 of 3 rows, about \d+ s left$", errors, re.M)
    assert f"writing {written}: 0 of 3 rows\n" in errors
    assert "checking" not in output


def test_progress_says_how_much_time_is_left_and_becomes_rarer(capsys, monkeypatch):
    clock = iter([0.0, *map(float, range(1, 10_000))])  # a second an item
    monkeypatch.setattr(preparation.time, "monotonic", lambda: next(clock))
    items = (number for number in range(1000))
    assert len([*preparation.progress(items, "trying", total=1000)]) == 1000
    lines = capsys.readouterr().err.splitlines()
    # the first item is taken after a second; after 2 s, one of 1,000 is done
    assert lines[0] == "trying: 1 of 1,000 rows, about 33 min left"
    # 2, 4, 6, 8, and then a quarter more each time up to 1,000: ln(125) / ln(1.25) = 21.6
    assert 22 <= len(lines) <= 28


def test_rows_of_other_options_are_replaced_with_a_line(tmp_path, capsys):
    out = tmp_path / "out"
    assert run(capsys, "--out", out, "--synthetic", 5)[0] == 0
    assert "replaces" not in run(capsys, "--out", out, "--synthetic", 5)[2]
    code, _, errors = run(capsys, "--out", out, "--synthetic", 6)
    assert code == 0
    assert f"{out}: replaces what `verl-gdpo data tool_rl --synthetic 5` made\n" in errors


def test_the_command_of_other_rows_can_be_pasted():
    options = {"source": Path("a b.json"), "test": None, "weak_sandbox": True, "seed": 3}
    assert as_typed(options) == "--from 'a b.json' --weak-sandbox --seed 3"


def test_what_a_scorer_needs_is_asked_for_before_the_rows(tmp_path, capsys, monkeypatch):
    path = write_json(tmp_path / "a.json", [{"problem": "1 + 1", "answer": "2"}] * 3)

    def no_library(**options):
        raise OSError("the task math_length needs math-verify")

    sources = replace(
        math_length.SOURCES, task=replace(math_length.SOURCES.task, missing=no_library)
    )
    monkeypatch.setattr(math_length, "SOURCES", sources)
    given = ("--out", tmp_path / "out", "--from", path, "--test", path)
    for arguments in (given, (*given[:2], "--synthetic", 5)):
        code, output, errors = run(capsys, *arguments, task="math_length")
        assert (code, output) == (1, "")
        assert errors.splitlines() == ["verl-gdpo data: the task math_length needs math-verify"]


def test_the_module_runs_without_verl_or_torch(tmp_path):
    code = (
        "import sys, verl_gdpo.tools.data as m; code = m.main(sys.argv[1:]);"
        "sys.exit(code or ' '.join({'verl', 'torch', 'transformers'} & set(sys.modules)) or None)"
    )
    arguments = ["tool_rl", "--out", str(tmp_path), "--synthetic", "5"]
    assert completed("-c", code, *arguments, cwd=REPO).returncode == 0
    ended = completed("-m", "data_prep", cwd=REPO)
    assert ended.returncode == 2
    assert ended.stderr.endswith("the following arguments are required: TASK\n")

"""A YAML file of a run that is cut off, damaged, or made to fill the memory."""

import pytest

from verl_gdpo.tools.run_folder import yaml_files
from verl_gdpo.tools.run_folder.yaml_files import MOST_BYTES, read_mapping, read_text


def bomb(levels):
    """Ten lines whose aliases stand for 10 to the power of `levels` values."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    for level in range(1, levels):
        aliases = ", ".join([f"*a{level - 1}"] * 10)
        lines.append(f"a{level}: &a{level} [{aliases}]")
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "expected"),
        ("a: {b: 1\n", "expected"),
        ("- 1", "got list; expected a mapping"),
        # 10 lists of 10, each level ten times the last one: 1,111,111,110 texts and more lists
        (bomb(9), r"its aliases stand for 1,\d{3},\d{3},\d{3} values; expected at most 200,000"),
        ("a: &a [*a]", "a value holds itself"),
        ("[" * 1_000_000, "nested in more than 100 levels"),
        ("a: 1\n" + "#" * MOST_BYTES, "bytes; expected at most"),
    ],
)
def test_what_is_no_configuration_is_refused(tmp_path, text, message):
    file = tmp_path / "end.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_mapping(file)


def test_bytes_that_are_no_text_are_refused(tmp_path):
    file = tmp_path / "end.yaml"
    file.write_bytes(b"why: \xff\xfe")
    with pytest.raises(ValueError, match="utf-8"):
        read_text(file)


def test_aliases_of_a_configuration_are_read(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("base: &base {lr: 1}\nactor: *base\ncritic: *base\n")
    assert read_mapping(file) == {"base": {"lr": 1}, "actor": {"lr": 1}, "critic": {"lr": 1}}


def test_the_number_of_values_decides_and_not_that_of_aliases(tmp_path, monkeypatch):
    monkeypatch.setattr(yaml_files, "MOST_NODES", 2000)  # of 200,000, PyYAML needs seconds
    file = tmp_path / "config.yaml"
    # a mapping, its two keys, two lists, and the ones in them
    for ones, is_read in ((1995, True), (1996, False)):
        half, rest = divmod(ones, 2)
        file.write_text(f"a: [{'1,' * half}]\nb: [{'1,' * (half + rest)}]\n")
        if is_read:
            assert len(read_mapping(file)["a"]) == half
        else:
            with pytest.raises(ValueError, match="stand for 2,001 values"):
                read_mapping(file)


def test_an_empty_file_has_no_keys(tmp_path):
    file = tmp_path / "end.yaml"
    file.write_text("")
    assert read_mapping(file) == {}

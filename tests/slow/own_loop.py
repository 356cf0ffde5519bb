"""The whole of examples/own_loop.py, whose result is in docs/without_verl.md."""

from examples import own_loop


def test_gdpo_learns_the_format_that_grpo_drowns(capsys):
    own_loop.main(100)
    last = [float(number) for number in capsys.readouterr().out.splitlines()[-1].split()]
    _, grpo_format, grpo_judge, gdpo_format, gdpo_judge = last
    assert gdpo_format > 0.9 and grpo_format < 0.3
    assert gdpo_judge > 80 and grpo_judge > 80

"""Which lines count as code."""

from workshop.count_lines import code_lines

SOURCE = '''"""A docstring
of two lines."""

import os  # counts


# does not
def f(x):
    """Nor does this."""
    text = """but this
    does"""
    return (
        x,
        text,
    )
'''


def test_docstrings_comments_and_blank_lines_are_no_code():
    # import, def, text over two lines, return over four
    assert code_lines(SOURCE) == 8

"""workshop/turns.md has the numbers of the simulation."""

from pages import PAGES

from workshop import turns


def test_the_table_in_the_document():
    assert turns.table() in PAGES["workshop/turns.md"]

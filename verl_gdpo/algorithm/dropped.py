"""Takes samples out of a batch whose reward function failed with `on_error: drop`."""

from collections import Counter
from dataclasses import replace

import numpy as np

from verl_gdpo.algorithm.samples import ABSENT, DROPPED, NOTES_KEY, BatchRows, group_of


def drop_failed(rows: BatchRows, smallest: int) -> BatchRows:
    """Return the rows with the notes of all samples, of which those that are `DROPPED` are padding.

    A group leaves as a whole, and gets the note, if they leave fewer than `smallest` samples of it.
    """
    column = rows.columns[NOTES_KEY]
    samples = np.flatnonzero(rows.counted_B).tolist()
    group_of_row = {row: group_of(rows.label(row)) for row in samples}
    notes = {row: column[row] for row in group_of_row if column[row] is not ABSENT}
    failed = {row for row, note in notes.items() if note.get(DROPPED)}
    left = Counter(group for row, group in group_of_row.items() if row not in failed)
    small = {group_of_row[row] for row in failed if left[group_of_row[row]] < smallest}
    dropped = failed.union(row for row, group in group_of_row.items() if group in small)
    for row in dropped & notes.keys():
        notes[row] = {**notes[row], DROPPED: 1.0}
    is_padding_B = rows.is_padding_B | np.isin(rows.session_B, [*dropped])
    return replace(rows, is_padding_B=is_padding_B, notes=[*notes.values()])

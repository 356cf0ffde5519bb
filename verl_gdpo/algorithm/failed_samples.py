"""Samples whose reward function failed, of which `on_error: drop` takes those out of the batch."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from verl_gdpo.algorithm.rows import ABSENT, BatchRows
from verl_gdpo.algorithm.values import DROPPED, FAILED, NOTES_KEY, RewardError


def drop_failed(rows: BatchRows, smallest: int) -> BatchRows:
    """Return the rows with the notes of all samples, of which those that are `DROPPED` are padding.

    A group leaves as a whole, and gets the note, if they leave fewer than `smallest` samples of it.
    """
    column = rows.columns[NOTES_KEY]
    uid_of = {row: rows.keys[row].uid for row in np.flatnonzero(rows.counted_B).tolist()}
    notes = {row: column[row] for row in uid_of if column[row] is not ABSENT}
    failed = {row for row, note in notes.items() if note.get(DROPPED)}
    left = Counter(uid for row, uid in uid_of.items() if row not in failed)
    too_small = {uid_of[row] for row in failed if left[uid_of[row]] < smallest}
    dropped = failed | {row for row, uid in uid_of.items() if uid in too_small}
    for row in dropped & notes.keys():
        notes[row] = {**notes[row], DROPPED: 1.0}
    is_padding_B = rows.is_padding_B | np.isin(rows.session_B, list(dropped))
    return replace(rows, is_padding_B=is_padding_B, notes=list(notes.values()))


def refuse_failures(notes: Sequence[Mapping[str, float]], most: float, where: str) -> None:
    """Raise RewardError if more than `most` of the samples have failed, or are dropped.

    Args:
        notes: of each sample.
        where: says which samples these are.
    """
    for key in notes[0] if notes else ():
        share = sum(each[key] for each in notes) / len(notes)
        if key.startswith((FAILED, DROPPED)) and share > most:
            raise RewardError(
                f"reward.reward_functions: {key.replace('_', ' ')}: {share:.0%} of the samples "
                f"{where}, and algorithm.gdpo.max_failed={most:g}. The log of the reward workers "
                "has each error"
            )


def empty_dropped(infos: Mapping[str, list[Any]]) -> None:
    """Set all values of dropped samples to None, with which they count nowhere in validation."""
    for row, notes in enumerate(infos.get(NOTES_KEY, ())):
        for column in infos.values() if notes and notes.get(DROPPED) else ():
            column[row] = None

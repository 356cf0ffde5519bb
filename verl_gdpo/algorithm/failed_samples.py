"""Samples whose reward function failed, of which `on_error: drop` takes those out of the batch."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from verl_gdpo.algorithm.rows import ABSENT, BatchRows
from verl_gdpo.algorithm.values import DROPPED, FAILED, NOTES_KEY, RewardError

# The columns of a validation that hold the weighted sum of a sample: our manager's, and verl's.
SUMS = ("score", "reward")


def drop_failed(rows: BatchRows, smallest: int) -> BatchRows:
    """Return the rows with the notes of all samples, of which those that are `DROPPED` are padding.

    A group leaves as a whole, and gets the note, if they leave fewer than `smallest` samples of it.
    """
    notes = _notes_of_samples(rows)
    failed = {row for row, note in notes.items() if note.get(DROPPED)}
    dropped = failed | _samples_of_small_groups(rows, failed, smallest)
    for row, note in notes.items():
        if row in dropped:
            notes[row] = {**note, DROPPED: 1.0}
    # All rows of a session leave with the last one, which stands for them.
    is_dropped_B = np.isin(rows.session_B, list(dropped))
    is_padding_B = rows.is_padding_B | is_dropped_B
    return replace(rows, is_padding_B=is_padding_B, notes=list(notes.values()))


def _notes_of_samples(rows: BatchRows) -> dict[int, Mapping[str, float]]:
    """Return {row: its notes} of the samples that have some."""
    column = rows.columns[NOTES_KEY]
    notes = {}
    for row in rows.samples:
        # A sample that an agent loop scored itself has no notes.
        if column[row] is not ABSENT:
            notes[row] = column[row]
    return notes


def _samples_of_small_groups(rows: BatchRows, failed: set[int], smallest: int) -> set[int]:
    """Return the samples of each group that has failed ones, and fewer than `smallest` others."""
    left: Counter[str] = Counter()  # {prompt: its samples that have not failed}
    for row in rows.samples:
        if row not in failed:
            left[rows.keys[row].uid] += 1
    # A group that was small before anything failed stays, as it does without `on_error: drop`.
    uids_of_failed = {rows.keys[row].uid for row in failed}
    too_small = {uid for uid in uids_of_failed if left[uid] < smallest}
    return {row for row in rows.samples if rows.keys[row].uid in too_small}


def refuse_failures(notes: Sequence[Mapping[str, float]], most: float, where: str) -> None:
    """Raise RewardError if more than `most` of the samples have failed, or are dropped.

    Args:
        notes: of each sample; all have the same keys.
        where: says which samples these are.
    """
    if not notes:
        return
    for key in notes[0]:
        # The other notes are durations and counts, which are logged alone.
        if not key.startswith((FAILED, DROPPED)):
            continue
        share = sum(note[key] for note in notes) / len(notes)
        if share > most:
            what = key.replace(FAILED, "failed ", 1)
            raise RewardError(
                f"reward.reward_functions: {what}: {share:.0%} of the samples "
                f"{where}, and algorithm.gdpo.max_failed={most:g}. The log of the reward workers "
                "has each error"
            )


def empty_dropped(infos: Mapping[str, list[Any]]) -> None:
    """Set all values of dropped samples to None, with which they count nowhere in validation."""
    for row, notes in enumerate(infos.get(NOTES_KEY, ())):
        if not notes or not notes.get(DROPPED):
            continue
        # This empties the notes as well, which are one of the columns.
        for column in infos.values():
            column[row] = None


def empty_sums_of_failed(infos: Mapping[str, list[Any]]) -> None:
    """Set the summed rewards of each sample that a function could not score to None.

    Such a sum lacks a part, so that it would count as a low score in validation.
    """
    for row, notes in enumerate(infos.get(NOTES_KEY, ())):
        has_failed = any(value for key, value in (notes or {}).items() if key.startswith(FAILED))
        if not has_failed:
            continue
        for name in SUMS:
            if name in infos:
                infos[name][row] = None

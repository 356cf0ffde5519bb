"""Faults that no test found once, each with the test that finds it now.

`nox -s mutants` tries all of them; `test_mutants.py` checks the table. The files that
`nox -s mutmut` changes are not in it.
"""

from typing import NamedTuple


class Mutant(NamedTuple):
    file: str  # in verl_gdpo/
    before: str
    after: str
    test: str  # in tests/


# {file: {before: (after, test)}}
TABLE = {
    "hooks/trainer.py": {
        "self.sources.update(step.rows.sources)": (
            "pass",
            "hooks/test_dump_writer.py::test_data_sources_that_only_the_batches_tell",
        ),
        "has_manager = runs_gdpo_manager(config)": (
            "has_manager = False",
            "hooks/test_legacy_trainer.py"
            "::test_the_rewards_of_the_grpo_arm_are_looked_at_where_the_manager_is_ours",
        ),
    },
    "run/console.py": {
        "            if earlier < step:": (
            "            if True:",
            "run/test_console.py::test_the_log_finds_what_the_summary_finds",
        ),
    },
    "run/finding_rules.py": {
        "if len(self.window) == USUAL:": (
            "if len(self.window) >= USUAL:",
            "run/test_findings.py::test_a_level_stays_what_it_was_while_it_is_broken",
        ),
    },
    "tools/report/tables.py": {
        "set.intersection(*of_each)": (
            "of_each[-1]",
            "tools/test_intervals.py::test_arms_of_unequal_length_are_compared_where_both_are",
        ),
        "return float(np.clip(2 * stats.t.sf(t, N - 1), risk / K, risk))": (
            "return risk",
            "tools/test_intervals.py::test_the_room_of_a_comparison_follows_from_the_correlations",
        ),
    },
    "tasks/math_length/score.py": {
        "if percents[0] != percents[1] and": (
            "if False and",
            "tasks/test_math_length.py::test_marks_that_make_another_answer",
        ),
    },
    "algorithm/metrics.py": {
        "        if scalars is None:\n": (
            "        if True:\n",
            "algorithm/test_metrics.py::test_the_estimators_own_result_gives_the_same_metrics",
        ),
        "source_G[self.group_B] = self._sources[1]": (
            "source_G = self._sources[1][: len(source_G)]",
            "algorithm/test_metrics.py::test_two_tasks_in_a_batch",
        ),
    },
    "tools/advice.py": {
        "        square_K = (apart_GK**2).sum(0) + mean_K**2 + (1 - mean_K) ** 2\n": (
            "        square_K = (apart_GK**2).sum(0)\n",
            "tools/test_advice.py::test_an_interval_by_hand",
        ),
        "np.exp(solution.x if is_kept else start_K)": (
            "np.exp(start_K)",
            "tools/test_advice.py::test_with_the_weights_gdpo_has_the_shares_of_grpo",
        ),
        "(GRPO, by_range_K)": (
            "(GRPO, 1.0)",
            "tools/test_advice.py::test_shares_beside_a_naive_loop",
        ),
    },
    "sandbox/lock.py": {
        "    _call(_libc.prctl, 22, 2, program, 0, 0)": (
            "    pass",
            "sandbox/test_hostile_programs.py::test_each_program_does_what_its_table_says",
        ),
        "        _lock_files(readable, folder, landlock)": (
            "        pass",
            "sandbox/test_hostile_programs.py::test_the_expected_results_in_the_training_data",
        ),
        "CLONE_THREAD | CLONE_NEWS, (CLONE_THREAD,)": (
            "CLONE_THREAD, (CLONE_THREAD,)",
            "sandbox/test_lock.py::test_what_is_allowed_of_a_call",
        ),
        "how = os.O_ACCMODE | os.O_TRUNC if": (
            "how = os.O_WRONLY | os.O_RDWR if",
            "sandbox/test_lock.py::test_what_may_be_read_cannot_be_emptied",
        ),
    },
    "sandbox/machine.py": {
        '"--perms", "0755", "--dir", "/usr", ': ("", "sandbox/test_lock.py::test_honest_programs"),
        "    if allow_weak and can_change_user():": (
            "    if can_change_user():",
            "sandbox/test_sandbox.py::test_the_weak_kind_has_to_be_allowed",
        ),
        "flags | os.O_NOFOLLOW | os.O_CLOEXEC": (
            "flags | os.O_CLOEXEC",
            "sandbox/test_sandbox.py::test_the_folder_of_the_places_has_to_be_ours",
        ),
    },
    "sandbox/inside.py": {
        "random.seed(0)  # the same": (
            "pass  # the same",
            "sandbox/test_sandbox.py::test_the_same_program_gives_the_same_output",
        ),
        "is_method = hasattr(": (
            "is_method = name not in namespace and hasattr(",
            "sandbox/test_sandbox.py::test_a_function",
        ),
        "return  # a program that never ends": (
            "continue  # a program that never ends",
            "sandbox/test_sandbox.py::test_the_first_test_that_a_signal_ends_is_the_last",
        ),
    },
    "sandbox/__init__.py": {
        "poll.poll(wall_seconds * 1000)": (
            "poll.poll(2 * wall_seconds * 1000)",
            "sandbox/test_sandbox.py::test_the_tests_share_the_wall_time",
        ),
    },
    "tasks/coding/score.py": {
        "says_something and all(": ("all(", "tasks/test_coding.py::test_scores"),
        "[*map(len, lines)] == [*map(len, expected)]": (
            "sum(map(len, lines)) == sum(map(len, expected))",
            "tasks/test_coding.py::test_printed_text",
        ),
        "<= ABSOLUTE + RELATIVE": (
            "<= RELATIVE + RELATIVE",
            "tasks/test_coding.py::test_printed_text",
        ),
        'for key in ("input", "args", "kwargs") if key in test': (
            "for key in test",
            "tasks/test_coding.py::test_a_program_sees_its_inputs_and_no_expected_results",
        ),
        '"length_needs_pass": False,': (
            '"length_needs_pass": True,',
            "evaluation/test_tasks.py::test_coding",
        ),
        "if not (number.is_finite() and wanted.is_finite())": (
            "if not number.is_finite()",
            "tasks/test_coding.py::test_what_is_no_finite_number_is_a_word",
        ),
    },
    "tasks/preparation/overlap.py": {
        "max(SHARED, ALIKE * (len(triples) + sizes[number] - count))": (
            "ALIKE * (len(triples) + sizes[number] - count)",
            "tasks/test_overlap.py::test_nearly_equal_prompts_share_five_triples",
        ),
    },
    "tasks/preparation/local_files.py": {
        "self._first = self._first or text": (
            "pass",
            "tasks/test_local_files.py::test_a_row_more_takes_few_bytes",
        ),
    },
    "atomic.py": {
        "        _remove_leftovers(path)\n": (
            "",
            "tasks/test_sources.py"
            "::test_a_new_start_removes_what_a_killed_writer_left_and_nothing_else",
        ),
    },
    "tasks/coding/test_cases.py": {
        "if not all(isinstance(result, list) and len(result) == 1": (
            "if not any(isinstance(result, list) and len(result) == 1",
            "tasks/test_coding_rows.py::test_forms",
        ),
    },
    "hooks/scorer_calls.py": {
        "return_exceptions=True)\n        raise\n": (
            "return_exceptions=True)\n",
            "hooks/test_reward_manager.py::test_who_waits_for_a_scorer_is_cancelled_with_it",
        ),
    },
    "hooks/extend.py": {
        "record is None or name in record.busy": (
            "record is None",
            "hooks/test_extend.py::test_ours_acts_once_a_call_whatever_a_subclass_does",
        ),
        "    if inspect.iscoroutinefunction(original):": (
            "    if False:",
            "hooks/test_extend.py::test_what_is_put_in_the_place_of_verls",
        ),
    },
    "tools/replay/comparison.py": {
        " * np.sqrt(share)": (
            "",
            "tools/test_replay.py::test_silent_groups_bring_no_group_further_apart",
        ),
    },
    "tools/report/charts.py": {
        "int(places[low[places].argmin()]), ": (
            "",
            "tools/test_charts.py::test_extremes_and_ends_survive_thinning",
        ),
    },
    "evaluation/results.py": {
        "mean: Floats = np.average(": (
            "mean: Floats = np.nanmean(parts, axis=0) if parts else np.average(",
            "evaluation/test_numbers.py::test_a_part_that_was_not_run_gives_no_number_and_no_zero",
        ),
        "values - draws.values(column, less)": (
            "values - Draws(less[::-1]).values(column, less[::-1])",
            "evaluation/test_numbers.py::test_the_intervals_of_differences_are_paired_by_problem",
        ),
    },
    "evaluation/dialogues.py": {
        'f"{seed} {dialogue.sample} {': (
            'f"{seed} {',
            "evaluation/test_dialogues.py"
            "::test_samples_have_streams_of_their_own_that_depend_on_nothing_else",
        ),
        "if len(prompt.ids) <= longest]": (
            "]",
            "evaluation/test_dialogues.py::test_a_prompt_that_leaves_no_room_counts_as_wrong",
        ),
        "ThreadPoolExecutor(os.cpu_count())": (
            "ThreadPoolExecutor(1)",
            "evaluation/test_dialogues.py::test_answers_of_a_batch_are_scored_at_once",
        ),
    },
    "evaluation/policy.py": {
        "    if _text_of(target / MADE_FROM) == times:\n        return target\n    print": (
            "    if target.is_dir():\n        return target\n    print",
            "evaluation/test_policy.py::test_shards_are_merged_once_and_again_when_they_change",
        ),
        "        fcntl.flock(lock, fcntl.LOCK_EX)\n": (
            "",
            "evaluation/test_policy.py::test_two_evaluations_merge_a_checkpoint_once",
        ),
        "        rmtree(temporary, ignore_errors=True)\n        try:": (
            "        try:",
            "evaluation/test_policy.py::test_what_a_killed_merge_has_left_goes_away",
        ),
    },
    "run/end_conditions.py": {
        "min(now - self._last, most)": (
            "now - self._last",
            "run/test_hang_watch.py::test_time_in_which_the_launcher_stood_still_does_not_count",
        ),
        "if code in CHECK_REFUSES": (
            "if code",
            "run/test_launch_check.py::test_a_check_that_dies_says_so_and_leaves_the_log",
        ),
    },
    "evaluation/bfcl/__init__.py": {
        'parts=_leaves("live", score), by_questions=True)': (
            'parts=_leaves("live", score))',
            "evaluation/bfcl/test_columns.py::test_the_numbers_of_the_leaderboard",
        ),
        "right if later == calls else _is_right(row, later)": (
            "right",
            "evaluation/bfcl/test_episodes.py::test_an_answer_in_a_single_turn",
        ),
        "partial(_score, row), WRONG)": (
            "partial(_score, row))",
            "evaluation/bfcl/test_episodes.py::test_a_prompt_that_is_too_long_is_a_wrong_answer",
        ),
        'return bool(calls) is (row["category"] == "live_relevance")': (
            "return not calls",
            "evaluation/bfcl/test_episodes.py"
            "::test_without_a_ground_truth_it_counts_whether_there_is_a_call",
        ),
        "range(form.MAX_STEPS + 1)": (
            "range(form.MAX_STEPS)",
            "evaluation/bfcl/test_episodes.py::test_the_accuracy_of_a_dialogue",
        ),
        "    if not reply:\n        return None": (
            "    if not reply:\n        reply = [steps]",
            "evaluation/bfcl/test_episodes.py"
            "::test_a_dialogue_that_once_needed_too_much_stays_wrong",
        ),
    },
    "evaluation/bfcl/form.py": {
        "answer.rpartition(TOOL_CALL_OPEN)[2]": (
            "answer.partition(TOOL_CALL_OPEN)[2]",
            "evaluation/bfcl/test_form.py::test_the_calls_of_an_answer",
        ),
        "if PARAMETERS_KEY in read or multi_turn:": (
            "if True:",
            "evaluation/bfcl/test_form.py::test_a_call_may_lack_parameters_in_a_dialogue_only",
        ),
    },
    "sandbox/limited_process.py": {
        "self._idle.put(process if is_whole else None)": (
            "self._idle.put(process)",
            "sandbox/test_limited_process.py"
            "::test_what_needs_too_much_ends_its_process_and_the_next_request_has_another",
        ),
        "        limit(0, 0)\n": (
            "",
            "sandbox/test_limited_process.py::test_no_clock_runs_between_requests",
        ),
        "            with self._turn:\n                process = self._idle.get()\n": (
            "            process = self._idle.get()\n",
            "sandbox/test_limited_process.py::test_no_thread_waits_while_others_take_their_turns",
        ),
    },
    "hooks/merge.py": {
        '    with patch.object(torch.Tensor, "bfloat16", lambda tensor: tensor):\n    ': (
            "    if True:\n    ",
            "hooks/test_merge.py::test_a_merged_model_has_the_logits_of_the_trainer",
        ),
        '    _name_dtype(target / "config.json", dtype)\n': (
            "",
            "hooks/test_merge.py::test_a_merged_model_has_the_logits_of_the_trainer",
        ),
    },
    "tools/evaluate.py": {
        "(q.key, q.category, q.ground_truth, asks)": (
            "(q.key, q.category, asks)",
            "tools/test_evaluate.py::test_results_of_other_questions_are_not_compared",
        ),
    },
}
MUTANTS = [
    Mutant(file, before, after, test)
    for file, faults in TABLE.items()
    for before, (after, test) in faults.items()
]

"""Two rewards for GSM8K: the answer is right, and it stands in the form that verl asks for."""

from verl.utils.reward_score.gsm8k import extract_solution


def compute_score(data_source, solution_str, ground_truth, extra_info):
    """{"correct", "form"}: each 0 or 1."""
    return {
        "correct": float(extract_solution(solution_str, method="flexible") == ground_truth),
        "form": float(extract_solution(solution_str, method="strict") is not None),
    }

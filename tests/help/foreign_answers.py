"""What the servers of examples/ answer to RESPONSE for their second row."""

RESPONSE = "It is 11"
REWARDS = {"brief": 1.0, "correct": 1.0}
SCORES = {"rewards": REWARDS, "weights": {"brief": 0.2, "correct": 1.0}}
OF_RUBRICS = {"rewards": {"correct": 1.0, "brief": 1.0}, "weights": {"brief": 0.2, "correct": 0.8}}
# function: (JSON of the answer, the rewards that it returns)
ANSWERS = {
    "verifiers": ({**SCORES, "metrics": {"words": 3.0}}, {**REWARDS, "words": 3.0}),
    "openenv": ({"metadata": OF_RUBRICS}, REWARDS),
    "nemo_gym": ({"reward": 2.0, "reward_components": REWARDS}, REWARDS),
}

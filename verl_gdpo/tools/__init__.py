"""What a user starts beside a training: check, replay, report, summary."""

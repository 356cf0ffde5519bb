"""A run on disk and its processes: launcher, folder, rollout dumps."""

"""BFCL-v3, the Berkeley Function Calling Leaderboard, in ToolRL's form."""

"""ToolRL's tool calls: format and correctness."""

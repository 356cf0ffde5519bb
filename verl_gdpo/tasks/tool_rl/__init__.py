"""ToolRL's tool calls: format and correctness."""

DATA_SOURCES = ("rlla",)

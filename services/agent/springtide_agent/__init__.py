"""The agent: runs one attempt's program, keeps its checkpoints, proves its success."""

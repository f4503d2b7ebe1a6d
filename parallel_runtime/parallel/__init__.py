"""Ways to share the tokens of a sequence over ranks. Each takes its axis; none knows a model."""

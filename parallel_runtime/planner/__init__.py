"""The planner: predicts time and memory of plans and chooses one. Pure arithmetic; starts and measures nothing."""

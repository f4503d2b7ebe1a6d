"""The planner: what a model and a machine can do, the time and memory of plans, and the plan that auto takes."""

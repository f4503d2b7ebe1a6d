"""Trials of a model and of devices: its calls by a plan and by a reference, and how fast devices are."""

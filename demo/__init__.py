"""`make demo`: see run.py."""

"""A test a promise: faults are injected for real, and what is promised must hold."""

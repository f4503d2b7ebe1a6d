"""Plausible mistakes, one at a time, and the tests that must fail on each: `make mutants`."""

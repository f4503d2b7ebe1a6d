"""Fuzzers of everything that reads bytes it did not write."""

"""Tests of the demo's model: its words, its training, its pictures."""

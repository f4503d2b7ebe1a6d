"""Workflows as users saved them from released versions, kept as they are; every later version has to run them."""

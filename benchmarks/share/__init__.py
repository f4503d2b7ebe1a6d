"""`python -m benchmarks.share`: what one rank of several computes, measured in one process; the link, modelled."""

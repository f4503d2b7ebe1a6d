"""The command line: doctor, verify and bench, one file each, shared by users, tests and benchmarks."""

"""The command line: doctor, plan, verify and join, a file each."""

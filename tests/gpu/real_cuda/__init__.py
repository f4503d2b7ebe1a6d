"""Plans on real GPUs: as many as the machine has, or several ranks on one."""

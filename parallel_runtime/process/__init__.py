"""What a rank is to the system: its start, environment and pulse, its end with ours, what NCCL reads and leaves."""

"""GPUs on machines without one: stand-ins that keep the rules NCCL and CUDA document, and what they find."""

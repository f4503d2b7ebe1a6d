"""A pretend CUDA device: tensors that say `cuda:N`, computed by the CPU, with torch's CUDA sanitizer watching."""

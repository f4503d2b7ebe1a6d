"""`make gpu`: a programme of experiments for one GPU, each under eight minutes; docs/gpu.md says what each decides."""

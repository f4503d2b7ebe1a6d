"""`make peers`: this engine, diffusers' context parallel and xfuser on one model, side by side in one run."""

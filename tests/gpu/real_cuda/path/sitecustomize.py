"""Read by the interpreter of a rank before anything else: the rank is a host of its own for NCCL."""

import os
import sys

for word in sys.orig_argv:
    if word.startswith("--rank="):
        os.environ["NCCL_HOSTID"] = f"host-of-{word[2:]}"

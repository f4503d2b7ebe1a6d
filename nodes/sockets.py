"""The two sockets of our own: what travels on them is fixed here, because other packs' nodes may take them.

`SP_CONFIG` carries a `choice.ParallelChoice`. `TIMING` carries a report: a plain dict as `report` describes it.
"""

from comfy_api.latest import io

CATEGORY = "parallel"
SpConfigSocket = io.Custom("SP_CONFIG")
TimingSocket = io.Custom("TIMING")

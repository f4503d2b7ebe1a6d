"""Which module inside a block runs: the name by which a plan says what its attention is over.

A name is on the switch of attention (attention.py) while the module runs. What puts it there knows nothing of a call,
and is the same code for all modules, so a graph of torch's compiler that was made of one block serves all of its kind.
"""

from collections.abc import Callable
from typing import Any, Protocol

from torch import nn

SITE = "site_of_plan"  # an attribute of what stands for a method


class Named(Protocol):
    """What knows which module runs."""

    site: str


def name_site(switch: Named, module: nn.Module, method: str, name: str) -> bool:
    """Have `switch.site` be `name` while the module's method runs. Returns whether it is new there."""
    there = vars(module).get(method)
    if there is not None and SITE in vars(there):
        return False
    if there is None:
        forward = _at_site(switch, name, getattr(type(module), method), module)
    else:  # another function on this instance
        forward = _at_site(switch, name, there)
    vars(forward)[SITE] = name
    setattr(module, method, forward)
    return True


def _at_site(switch: Named, name: str, inner: Callable[..., Any], *first: object) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        around, switch.site = switch.site, name
        try:
            return inner(*first, *args, **kwargs)
        finally:
            switch.site = around

    return forward

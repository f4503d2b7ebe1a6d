"""Which module inside a block runs: the name by which a spec says what its attention is over."""

from typing import TYPE_CHECKING, Any

from torch import nn

from ..block_chain import Forward, chain_at

if TYPE_CHECKING:
    from .attention import AttentionSwitch

SITE = "site_of_plan"  # an attribute of what stands for a method of such a module


def name_site(switch: "AttentionSwitch", module: nn.Module, method: str, name: str) -> bool:
    """Have `switch.site` be `name` while the module's method runs. Returns whether it is new there.

    What does so knows nothing of a call, and is the same code for all modules, so a graph of torch's compiler that was
    made of one block serves all of its kind.
    """
    chain = chain_at(module, method)
    there = chain.inner
    if there is not None and SITE in vars(there):
        return False
    if there is None:
        forward = at_site(switch, name, getattr(type(module), method), module)
    else:  # another function on this instance
        forward = at_site(switch, name, there)
    vars(forward)[SITE] = name
    chain.inner = forward
    return True


def at_site(switch: "AttentionSwitch", name: str, inner: Forward, *first: object) -> Forward:
    """A module's method, `inner`, that has `switch.site` be this name while it runs."""

    def forward(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        around, switch.site = switch.site, name
        try:
            return inner(*first, *args, **kwargs)
        finally:
            switch.site = around

    return forward

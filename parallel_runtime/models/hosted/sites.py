"""Which module inside a block runs: the name by which a spec says what its attention is over."""

from torch import nn

from ..block_chain import Named, at_site, chain_at

SITE = "site_of_plan"  # an attribute of what stands for a method of such a module


def name_site(switch: Named, module: nn.Module, method: str, name: str) -> bool:
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

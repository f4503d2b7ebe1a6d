"""The chain of functions around a block of a model: each part of the pack puts its own there, in one declared order.

    chain_at(block, "forward").put(SHARE, around)      # around(inner) -> the function that stands for inner
    chain_at(block, "forward").take_off(around)

The order of the links does not depend on which was put first. A model may call a block by other methods than `forward`;
each has a chain. Owns the order. Does not own what a link does.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

Forward = Callable[..., Any]
Around = Callable[[Forward], Forward]
Call = Callable[[], object]

BEAT, GATHER, SHARE, CACHE, STAGE = "beat", "gather", "share", "cache", "stage"
SKIP, LORA, GRAPH = "skip", "lora", "graph"
# From the outermost to the innermost. A sign of life comes when all else is done. Weights are there before anything
# reads them. Tokens are cut before a step cache, a stage or a LoRA looks at what the block is given, and gathered
# after. A stage, a cache or a node's wish hands on, or skips, what a graph would run. A side branch of a block that is
# one layer is not in the block's graph.
ORDER = (BEAT, GATHER, SHARE, CACHE, STAGE, SKIP, LORA, GRAPH)
CHAINS = "chains_of_blocks"  # an attribute of a module: method -> its chain


class Chain:
    """The functions around one method of a module. Without any the module is as it was."""

    def __init__(self, module: nn.Module, method: str) -> None:
        self._module, self._method = module, method
        self._before: Forward | None = vars(module).get(method)  # None: the class's
        self._built = self._before  # what the module has now
        self._links: list[tuple[str, Around]] = []

    @property
    def inner(self) -> Forward | None:
        """What the links are around, where it is not the class's method."""
        return self._before

    @inner.setter
    def inner(self, function: Forward | None) -> None:
        self._before = function
        self._build()

    def put(self, name: str, around: Around) -> None:
        """Put a link where `ORDER` has its name; of several of one name the last is the outermost."""
        self._links.append((name, around))
        self._build()

    def take_off(self, around: Around) -> None:
        """Take a link off."""
        self._links = [link for link in self._links if link[1] is not around]
        self._build()

    def _build(self) -> None:
        if vars(self._module).get(self._method) is not self._built:
            raise RuntimeError(
                f"{type(self._module).__name__}.{self._method} was set past its chain, which would lose that function; "
                "put a link into the chain"
            )
        vars(self._module).pop(self._method, None)
        if self._before is not None:
            setattr(self._module, self._method, self._before)
        for name in reversed(ORDER):
            for _, around in (link for link in self._links if link[0] == name):
                setattr(self._module, self._method, around(getattr(self._module, self._method)))
        self._built = vars(self._module).get(self._method)


def chain_at(module: nn.Module, method: str = "forward") -> Chain:
    """The chain of a module's method."""
    chains: dict[str, Chain] = vars(module).setdefault(CHAINS, {})
    if method not in chains:
        chains[method] = Chain(module, method)
    return chains[method]


@contextmanager
def around_another(module: nn.Module, function: Forward) -> Iterator[None]:
    """Inside, the links of a module's `forward` are around this function."""
    chain = chain_at(module)
    before, chain.inner = chain.inner, function
    try:
        yield
    finally:
        chain.inner = before


def entries_of(block: nn.Module) -> tuple[str, ...]:
    """The methods by which an unknown model may call a block, by ComfyUI's names: `forward`, `forward_pose`."""
    return tuple(name for name in dir(type(block)) if name == "forward" or name.startswith("forward_"))


def hook_entries(
    block: nn.Module, methods: Iterable[str], name: str, *, before: Call | None = None, after: Call | None = None
) -> None:
    """Have `before` and `after` called around each of a block's methods, as links `name`; `after` also where it raises.

    Once, where one of the methods calls another.
    """
    inside = [0]

    def around(inner: Forward) -> Forward:
        def method(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            inside[0] += 1
            try:
                if inside[0] == 1 and before is not None:
                    before()
                return inner(*args, **kwargs)
            finally:
                inside[0] -= 1
                if inside[0] == 0 and after is not None:
                    after()

        return method

    for method in methods:
        chain_at(block, method).put(name, around)


class Entrance:
    """The link of a graph: while `instead` is set, that is called in place of the block's forward."""

    def __init__(self, block: nn.Module) -> None:
        self.inner: Forward = block.forward
        self.instead: Forward | None = None
        chain_at(block).put(GRAPH, self._around)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        return (self.instead or self.inner)(*args, **kwargs)

    def _around(self, inner: Forward) -> Forward:
        self.inner = inner
        return self

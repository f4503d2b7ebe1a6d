"""Which node of the graph put something into a MODEL or a conditioning, for messages that name it.

Two things say it: a parallel MODEL notes which node executed when it was changed (`Written`), and a function says in
which file it is defined, as a node's class does. The second finds what was written while a sampler runs, and what a
MODEL of a stock loader carries. Owns that search. Does not own what is refused (refusals.py).
"""

import functools
import inspect
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, TypeAlias

from .comfyui import comfy_nodes, get_executing_context, get_progress_state
from .foreign_code import is_trusted
from .version import off

SAYS = not (off("texts") or off("panel"))  # this ComfyUI which node executes
PACKAGE = __name__.rpartition(".host.")[0]  # that of the node classes of this pack
# Links that hand on results: what is before the node that made them changed another MODEL, or a run that is over.
RESULTS = frozenset(("AUDIO", "IMAGE", "LATENT", "MASK", "VIDEO"))
# How surely code is a node's: in its class, in its file, in a file of which its own has something, in its pack.
CLASS, FILE, USES, PACK = 4, 3, 2, 1
Code: TypeAlias = tuple[str, str]  # the module and the name that something is defined under
DEPTH = 8  # of containers in a MODEL's options; ComfyUI has four


@dataclass(frozen=True, kw_only=True)
class GraphNode:
    """A node of the prompt that executes. `node_id` is "" for one that is known by its class alone.

    `settings`: its inputs that are no links, as text.
    """

    node_id: str
    class_type: str
    settings: str = ""

    def __str__(self) -> str:
        """As a user knows it: `Load LoRA (node 7)`; a node that another one made is known by that one's number."""
        title = comfy_nodes.NODE_DISPLAY_NAME_MAPPINGS.get(self.class_type) or self.class_type
        if not self.node_id:
            return title
        return f"{title} (node {get_progress_state().dynprompt.get_display_node_id(self.node_id)})"

    @property
    def kind(self) -> type:
        """Its class; `object` where ComfyUI has none of its name."""
        return comfy_nodes.NODE_CLASS_MAPPINGS.get(self.class_type, object)

    @property
    def ours(self) -> bool:
        """Whether it is a node of this pack."""
        return self.kind.__module__.startswith(f"{PACKAGE}.")

    @property
    def stock(self) -> bool:
        """Whether it is a node of ComfyUI."""
        return self.kind.__module__ == "nodes" or is_trusted(self.kind.__module__)


def executing() -> Any:  # noqa: ANN401  ComfyUI's context
    """What ComfyUI says of the node that executes now; None outside of one, and where it does not say."""
    return get_executing_context() if SAYS else None


def executing_node() -> GraphNode | None:
    """The node that executes now; None outside of a prompt."""
    context = executing()
    return None if context is None else _node(context.node_id)


def nodes_before() -> list[GraphNode]:
    """The nodes that what executes now depends on, the nearest first; none outside of a prompt.

    Those behind a finished result, as the first of two samplers, are left out.
    """
    first = executing_node()
    found = {} if first is None else {first.node_id: first}
    for node in (due := list(found.values())):  # grows meanwhile
        for source, slot in _links(node):
            if source not in found and (before := _node(source)) is not None:
                if output_type(before, slot) not in RESULTS:
                    found[source] = before
                    due.append(before)
    return due[1:]


def nodes_with_this() -> list[GraphNode]:
    """As `nodes_before`, after the node that executes now."""
    return [*filter(None, [executing_node()]), *nodes_before()]


class Written:
    """What nodes wrote into a parallel MODEL, by identity, with the node that did; values stay alive in it."""

    def __init__(self, known: Mapping[int, tuple[object, GraphNode | None]] | None = None) -> None:
        self._known = dict(known or {})

    def after(self, values: Iterable[object], by: GraphNode | None) -> "Written":
        """The same for these values alone; `by` wrote those that are not known yet."""
        return Written({id(value): self._known.get(id(value), (value, by)) for value in values})

    def by(self, value: object) -> GraphNode | None:
        """The node that was seen to write it. Not one of this pack: those hand on what others wrote."""
        _, node = self._known.get(id(value), (value, None))
        return None if node is None or node.ours else node

    def nodes(self) -> list[GraphNode]:
        """All nodes that wrote something."""
        return [node for _, node in self._known.values() if node is not None]

    def values(self) -> list[object]:
        """All that is known."""
        return [value for value, _ in self._known.values()]


def values_in(tree: object, depth: int = 0) -> Iterator[object]:
    """What dicts and lists hold that can tell which node wrote it: no numbers and texts."""
    if isinstance(tree, dict | list | tuple) and depth < DEPTH:
        for each in tree.values() if isinstance(tree, dict) else tree:
            yield from values_in(each, depth + 1)
    elif tree is not None and not isinstance(tree, bool | int | float | str):
        yield tree


def writers_of(value: object, written: Written | None = None, *, surely: int = PACK) -> list[GraphNode]:
    """The node that wrote `value`, or those of which one did; [] where nothing tells.

    `written`: what the MODEL that carries it has noted. Where the value's own code is another node's, that one changed
    a MODEL that it should have copied. `surely`: how surely code has to be a node's.
    """
    written = written or Written()
    nodes = nodes_with_this()
    coded = defining([code_of(value)], nodes, surely)
    seen = _in_graph(written.by(value), nodes)
    if seen is not None and (seen in coded or not coded):
        return [seen]
    coded = coded or defining([code_of(each) for each in _used_by(value)], nodes, surely)
    wrote = [node for node in coded if node in written.nodes()]
    return wrote or coded or _known_classes(value)


def is_of_a_node(value: object) -> bool:
    """Whether a function, or the class of an object, is the code of a pack of nodes."""
    code = code_of(value)
    return any(_defines(kind, *code) for kind in comfy_nodes.NODE_CLASS_MAPPINGS.values())


def nodes_of(*class_types: str) -> list[GraphNode]:
    """The nodes before of these classes; the classes alone where there are none, which ComfyUI has."""
    found = [node for node in nodes_before() if node.class_type in class_types]
    known = [name for name in class_types if name in comfy_nodes.NODE_CLASS_MAPPINGS]
    return found or [GraphNode(node_id="", class_type=name) for name in known]


def nodes_like(word: str) -> list[GraphNode]:
    """The node that executes, if it is of a class with this word and not of this pack; else those before that hand on
    a MODEL, and if no class has the word, all of them that take one, too."""
    now, wanted = executing_node(), lambda node: not node.ours and word in node.class_type.lower()
    if now is not None and wanted(now):
        return [now]
    return [node for node in nodes_before() if wanted(node) and "MODEL" in _outputs(node)] or changers_of_models()


def changers_of_models() -> list[GraphNode]:
    """The nodes before, not of this pack, that take a MODEL and hand one on."""
    return _between("MODEL", "MODEL")


def packs_with_models() -> list[GraphNode]:
    """The nodes of packs that take a MODEL, the one that executes among them: of what has no code, one did it."""
    return [node for node in nodes_with_this() if not node.ours and not node.stock and "MODEL" in _taken(node)]


def naming(nodes: Sequence[GraphNode], attribute: str, *, pack: bool = True) -> list[GraphNode]:
    """Those of the nodes whose class's file has this name in its source; with `pack`, else those whose pack has it."""
    word = re.compile(rf"\b{re.escape(attribute)}\b")
    for whole in (False, True)[: 1 + pack]:
        if found := [node for node in nodes if any(map(word.search, _sources(node.kind.__module__, pack=whole)))]:
            return found
    return []


def loader_of_model() -> GraphNode | None:
    """The nearest node before that makes a MODEL of something else; None outside of a prompt."""
    made = (node for node in nodes_before() if "MODEL" in _outputs(node) and "MODEL" not in _taken(node))
    return next(made, None)


def appliers_of_controlnets() -> list[GraphNode]:
    """The nodes before that put a ControlNet into a conditioning."""
    return _between("CONTROL_NET", "CONDITIONING")


def still_there(node: GraphNode) -> bool:
    """Whether what executes now depends on this node, set as it was; True where the graph is unknown."""
    there = nodes_with_this()
    return not there or any(alike(node, each) for each in there)


def defining_class(value: object) -> str:
    """The outermost name that a function or an object's class is defined under: of a node's code, the node's class."""
    return code_of(value)[1].partition(".")[0]


def defining(codes: Collection[Code], nodes: Sequence[GraphNode], least: int) -> list[GraphNode]:
    """Those of the nodes that are most surely whose code it is, `least` so surely."""
    for surely in range(CLASS, least - 1, -1):
        if found := [node for node in nodes if any(_defines(node.kind, *code) >= surely for code in codes)]:
            return found
    return []


def now_in_graph(node: GraphNode) -> GraphNode:
    """The node by its number now."""
    return _in_graph(node, nodes_with_this()) or node


def links_in(values: Iterable[object]) -> list[tuple[str, int]]:
    """Those of a node's inputs that are links: the id of the other node, and which of its outputs."""
    given = [value for value in values if isinstance(value, list) and len(value) == 2]
    return [(source, slot) for source, slot in given if isinstance(source, str) and isinstance(slot, int)]


def output_type(node: GraphNode, slot: int) -> str:
    """The type of a node's output; "" where that is not known."""
    kinds = _outputs(node)
    return kinds[slot] if slot < len(kinds) else ""


def around(value: object) -> dict[str, Any]:
    """The variables that a function has around it, by name; of any other value none."""
    function = getattr(value, "__func__", value)
    if not inspect.isfunction(function):
        return {}
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # it has none yet
            found[name] = cell.cell_contents
    return found


def _defines(kind: type, module: str, name: str) -> int:
    """How surely code of this name in this module is a class's own, or one's that it is derived from."""
    sure = 0
    for base in kind.__mro__[:-1]:
        if base.__module__ == module or _file(base.__module__) == _file(module) is not None:
            sure = max(sure, CLASS if f"{name}.".startswith(f"{base.__qualname__}.") else FILE)
        elif base.__module__.partition(".")[0] == module.partition(".")[0] and not _is_comfys(base.__module__):
            sure = max(sure, USES if _has_of(base.__module__, module) else PACK)
    return sure


def _has_of(module: str, other: str) -> bool:
    """Whether a module has another one, or something that is defined there, among its names."""
    values = list(vars(sys.modules[module]).values()) if module in sys.modules else []
    places = [each.__module__ for each in values if isinstance(each, type | FunctionType)]
    return other in (*places, *(each.__name__ for each in values if isinstance(each, ModuleType)))


def _sources(module: str, *, pack: bool) -> Iterator[str]:
    """The source of a module, or of all modules of its pack."""
    top = module.partition(".")[0]
    files = {_file(name) for name in list(sys.modules) if name == module or (pack and f"{name}.".startswith(f"{top}."))}
    for file in filter(None, files):
        with suppress(OSError):
            yield Path(file).read_text(encoding="utf-8", errors="replace")


def _is_comfys(module: str) -> bool:
    return module.partition(".")[0] in ("comfy", "comfy_api", "comfy_api_nodes", "comfy_extras", "nodes")


def code_of(value: object) -> Code:
    """The module and the name that a function, or the class of an object, is defined under."""
    while isinstance(value, functools.partial):
        value = value.func
    value = getattr(value, "__func__", value)
    kind: Any = value if inspect.isfunction(value) or isinstance(value, type) else type(value)
    return str(kind.__module__), str(kind.__qualname__)


def _used_by(value: object) -> list[object]:
    """The functions that a function has around it, or an object as its attributes."""
    used = around(value) or ({} if inspect.isroutine(value) else getattr(value, "__dict__", {}))
    return [each for each in used.values() if callable(each)]


def _known_classes(value: object) -> list[GraphNode]:
    """The class of nodes whose code a value is, where no graph is known: a script runs nodes."""
    if executing_node() is not None:
        return []
    code = code_of(value)
    kinds = comfy_nodes.NODE_CLASS_MAPPINGS.items()
    return [GraphNode(node_id="", class_type=name) for name, kind in kinds if _defines(kind, *code) == CLASS]


def _in_graph(node: GraphNode | None, nodes: Iterable[GraphNode]) -> GraphNode | None:
    """The node by its number now, as ComfyUI keeps results by their inputs, and another graph numbers them anew."""
    if node is None:
        return None
    like = [each for each in nodes if alike(node, each)]
    return node if node in like else like[0] if len(like) == 1 else None


def alike(one: GraphNode, other: GraphNode) -> bool:
    """Whether two nodes are the same by their class and settings."""
    return (one.class_type, one.settings) == (other.class_type, other.settings)


def _node(node_id: str) -> GraphNode | None:
    prompt = get_progress_state().dynprompt
    if not prompt.has_node(node_id):
        return None
    node = prompt.get_node(node_id)
    settings = {name: value for name, value in _inputs(node).items() if not isinstance(value, list)}
    return GraphNode(node_id=node_id, class_type=node["class_type"], settings=repr(sorted(settings.items())))


def _links(node: GraphNode) -> list[tuple[str, int]]:
    return links_in(_inputs(get_progress_state().dynprompt.get_node(node.node_id)).values())


def _between(taken: str, given: str) -> list[GraphNode]:
    return [node for node in nodes_before() if not node.ours and taken in _taken(node) and given in _outputs(node)]


def _inputs(node: Mapping[str, Any]) -> Mapping[str, Any]:
    inputs: Mapping[str, Any] = node.get("inputs", {})
    return inputs


def _taken(node: GraphNode) -> list[str]:
    return [output_type(source, slot) for name, slot in _links(node) if (source := _node(name)) is not None]


def _outputs(node: GraphNode) -> list[str]:
    return list(map(str, getattr(node.kind, "RETURN_TYPES", None) or ()))


def _file(module: str) -> str | None:
    """The file of a module: ComfyUI imports those of its nodes under names of their own, others under theirs."""
    return getattr(sys.modules.get(module), "__file__", None)

"""The prompt that ComfyUI validates now, for nodes that refuse values before anything is queued, and the one that runs.

Owns what is known of the former while its request is answered. ComfyUI gives `validate_inputs` the inputs that it
names, and repeats what it says once for each of them; so a node names one input, and finds the others here.
"""

from collections.abc import Callable, Mapping
from contextvars import ContextVar

from .comfyui import PromptServer
from .version import off
from .writers import executing, links_in

_PROMPT: ContextVar[Mapping[str, object]] = ContextVar("parallel_dit_queued_prompt")


def watch_prompts(before_first: Callable[[], None]) -> None:
    """Have ComfyUI's server tell of each prompt before it validates it, in the task that then does. `before_first` is
    called once all packs are loaded, and before any node runs."""
    due = [before_first]

    def remember(request: dict) -> dict:
        prompt = request.get("prompt")
        _PROMPT.set(prompt if isinstance(prompt, dict) else {})
        while due:
            due.pop()()
        return request

    PromptServer.instance.add_on_prompt_handler(remember)


def prompt_runs() -> bool:
    """Whether ComfyUI executes a prompt now."""
    return bool(PromptServer.instance.prompt_queue.currently_running)


def validated_inputs() -> dict[str, object]:
    """The inputs of the node that is validated now: values, and links as lists. Empty where that is not known."""
    inputs = inputs_of(_PROMPT.get({}).get(_node_id()))
    return {name: _value(given) for name, given in inputs.items()}


def running_values(kind: str, name: str, *, absent: object) -> list[object]:
    """An input of each node of a class in the prompt that runs: values, links as lists, `absent` where it has none.

    One None without a server: nodes are run by a script then, and the graph is unknown.
    """
    if _server() is None:
        return [None]
    nodes = [node for node in running_nodes().values() if node.get("class_type") == kind]
    return [_value(inputs_of(node).get(name, absent)) for node in nodes]


def running_nodes(*, needed: bool = False) -> dict[str, Mapping]:
    """The nodes of the prompt that runs, by id, as they were queued; none without a server. `needed`: those alone that
    what is to be made depends on."""
    server = _server()
    running = [] if server is None else list(server.prompt_queue.currently_running.values())
    nodes = {node_id: node for _, _, prompt, *_ in running for node_id, node in prompt.items()}
    if not needed:
        return nodes
    due = [node_id for _, _, _, _, outputs, *_ in running for node_id in outputs if node_id in nodes]
    for node_id in due:  # grows meanwhile
        sources = {source for source, _ in links_in(inputs_of(nodes[node_id]).values())}
        due += (sources & nodes.keys()).difference(due)
    return {node_id: nodes[node_id] for node_id in due}


def inputs_of(node: object) -> Mapping:
    """The inputs of a queued node by name: values, and links as lists."""
    inputs = node.get("inputs") if isinstance(node, dict) else None
    return inputs if isinstance(inputs, dict) else {}


def _server() -> PromptServer | None:
    return None if off("panel") else getattr(PromptServer, "instance", None)


def _value(given: object) -> object:
    return given.get("__value__", given) if isinstance(given, dict) else given


def _node_id() -> str:
    context = executing()
    return "" if context is None else context.node_id

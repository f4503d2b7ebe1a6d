"""A node of a test host as a function: its arguments are the node's inputs."""

import inspect
import typing
from collections.abc import Callable, Sequence
from typing import Any

from comfy_api.latest import io

NODES: list[type[io.ComfyNode]] = []
PLAIN: dict[Any, Any] = {int: io.Int, float: io.Float, str: io.String, bool: io.Boolean}
Execute = Callable[..., io.NodeOutput]


def node(
    name: str,
    *,
    gives: Sequence[Any] = (),
    shows: bool = False,
    anew: bool = False,
    schema: dict[str, Any] | None = None,
    **choices: Sequence[str],
) -> Callable[[Execute], Execute]:
    """Makes a node of a function: an argument with a default is optional, one named in `choices` is one of those.

    `shows`: it may end a graph. `anew`: what comes after it always runs, even if the graph was just queued. `schema`
    says more, as ComfyUI's Schema does.
    """

    def input_of(argument: inspect.Parameter, kind: Any) -> Any:
        told: dict[str, Any] = {}
        if argument.default is not argument.empty:
            told = {"optional": True} | ({} if argument.default is None else {"default": argument.default})
        if argument.name in choices:
            return io.Combo.Input(argument.name, options=list(choices[argument.name]), **told)
        return PLAIN.get(kind, kind).Input(argument.name, **told)

    def make(function: Execute) -> Execute:
        def define_schema(cls: type[io.ComfyNode]) -> io.Schema:
            kinds = typing.get_type_hints(function)
            arguments = inspect.signature(function).parameters.values()
            inputs = [input_of(each, kinds[each.name]) for each in arguments if each.kind is not each.VAR_KEYWORD]
            said = {"inputs": inputs, "outputs": [kind.Output() for kind in gives]}
            return io.Schema(node_id=name, category="tests", is_output_node=shows, **said | (schema or {}))

        def execute(cls: type[io.ComfyNode], **given: Any) -> io.NodeOutput:
            return function(**given)

        methods: dict[str, Any] = {"define_schema": define_schema, "execute": execute}
        if anew:
            methods["fingerprint_inputs"] = lambda cls, **_: float("nan")
        told = {"__module__": function.__module__, "__doc__": function.__doc__}
        NODES.append(type(name, (io.ComfyNode,), told | {key: classmethod(each) for key, each in methods.items()}))
        return function

    return make

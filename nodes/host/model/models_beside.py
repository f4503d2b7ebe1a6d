"""The other models that a prompt samples with on the same devices, as Wan 2.2's of high and low noise, for auto.

Owns how they are told from the graph, which names them before they are loaded.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeAlias

from ..contract.comfyui import folder_paths
from ..contract.queued_prompt import inputs_of, running_nodes
from ..contract.writers import GraphNode, executing, links_in, output_type
from .files import FOLDER

Nodes: TypeAlias = Mapping[str, Mapping]
OURS = ("ParallelModelLoader", "ParallelFluxLoader", "ParallelizeModel")
FILES = {"unet_name": FOLDER, "ckpt_name": "checkpoints"}  # an input that names a file, and its folder
WHERE = ("devices", "machines")  # what SP Config names the workers by


def models_beside(path: str) -> float:
    """How many models as large as the file at `path` the prompt has on the devices of the node that executes, besides.

    They are compared by their files' sizes; one whose file the graph does not name counts as one. 0 outside of a
    prompt.
    """
    context, nodes = executing(), running_nodes(needed=True)
    here = None if context is None else nodes.get(context.node_id)
    if here is None:
        return 0.0
    where = _workers(here, nodes)
    ours = (node for node in nodes.values() if node.get("class_type") in OURS)
    others = {_file(node, nodes) for node in ours if _workers(node, nodes) == where}
    return times_as_large(path, others - {_file(here, nodes)})


def times_as_large(path: str, others: Iterable[str]) -> float:
    """The size of other files, by their paths, in that of the file at `path`."""
    size = max(1, os.path.getsize(path))
    return sum(os.path.getsize(each) / size if os.path.isfile(each) else 1.0 for each in others)


def _workers(node: Mapping, nodes: Nodes) -> object:
    """What the SP Config of a node names its workers by; the link to what else it has."""
    link = inputs_of(node).get("sp_config")
    config = inputs_of(next((nodes.get(source) for source, _ in links_in([link])), None))
    return [config.get(name, "") for name in WHERE] if WHERE[0] in config else link


def _file(node: Mapping, nodes: Nodes) -> str:
    """The path of the file that a node's MODEL is of; the inputs of the node that made it where no file is named."""
    seen = list[Mapping]()
    while not any(node is each for each in seen):
        seen.append(node)
        for name, folder in FILES.items():
            if isinstance(given := inputs_of(node).get(name), str):
                return folder_paths.get_full_path(folder, given) or given
        node = next(_models_of(node, nodes), node)
    return repr(inputs_of(node))


def _models_of(node: Mapping, nodes: Nodes) -> Iterator[Mapping]:
    """The nodes whose MODEL a node takes."""
    for source, slot in links_in(inputs_of(node).values()):
        kind = str(nodes.get(source, {}).get("class_type"))
        if output_type(GraphNode(node_id=source, class_type=kind), slot) == "MODEL":
            yield nodes[source]

"""The other models that a prompt samples with on the same devices, as Wan 2.2's of high and low noise, for auto.

Owns how they are told from the graph, which names them before they are loaded.
"""

import os
from collections.abc import Iterable, Iterator, Mapping

from ..contract.comfyui import folder_paths
from ..contract.queued_prompt import inputs_of, running_nodes
from ..contract.writers import executing

OURS = ("ParallelModelLoader", "ParallelFluxLoader", "ParallelizeModel")
NAMES = {"unet_name": "diffusion_models", "ckpt_name": "checkpoints"}  # an input that names a file, and its folder


def models_beside(path: str) -> float:
    """How many models as large as the file at `path` the prompt has on the devices of the node that executes, besides.

    They are compared by their files' sizes; one whose file the graph does not name counts as one. 0 outside of a
    prompt.
    """
    context, nodes = executing(), running_nodes()
    here = None if context is None else nodes.get(context.node_id)
    if here is None:
        return 0.0
    devices = _devices(here, nodes)
    ours = (node for node in nodes.values() if node.get("class_type") in OURS)
    others = {_file(node, nodes) for node in ours if _devices(node, nodes) == devices}
    return times_as_large(path, others - {_file(here, nodes)})


def times_as_large(path: str, others: Iterable[str]) -> float:
    """The size of other files, by their paths, in that of the file at `path`."""
    size = os.path.getsize(path)
    return sum(os.path.getsize(each) / size if os.path.isfile(each) else 1.0 for each in others)


def _devices(node: Mapping, nodes: Mapping[str, Mapping]) -> object:
    """What the SP Config of a node names as devices; its link where that is no value."""
    link = inputs_of(node).get("sp_config")
    config = next(_linked({"sp_config": link}, nodes), {})
    return inputs_of(config).get("devices", link)


def _file(node: Mapping, nodes: Mapping[str, Mapping]) -> str:
    """The path of the file that a node's MODEL is of; the inputs of the node that made it where no file is named."""
    seen = list[Mapping]()
    while not any(node is each for each in seen):
        seen.append(node)
        inputs = inputs_of(node)
        for name, folder in NAMES.items():
            if isinstance(inputs.get(name), str):
                return folder_paths.get_full_path(folder, inputs[name]) or inputs[name]
        node = next(_linked({name: given for name, given in inputs.items() if "model" in name}, nodes), node)
    return repr(inputs_of(node))


def _linked(inputs: Mapping[str, object], nodes: Mapping[str, Mapping]) -> Iterator[Mapping]:
    """The nodes that inputs are linked to."""
    for given in inputs.values():
        if isinstance(given, list) and given and given[0] in nodes:
            yield nodes[given[0]]

"""Loads the pack as it is; then, if asked, without each line of the host contract in turn; prints what came of it.

Run by test_contract.py with ComfyUI's folder, the pack's and "each"; a line of JSON and a fork for each line of the
contract, so that none knows of another.
"""

import asyncio
import enum
import importlib.util
import json
import logging
import os
import sys
import traceback
import types

tree, pack, *each = sys.argv[1:]
sys.path[:0] = [tree]
sys.argv = ["main.py", "--cpu"]
NAME = "deleted_in_turn"


def start_comfyui():
    """What main.py does before packs are loaded."""
    import comfy.options

    comfy.options.enable_args_parsing()
    importlib.import_module("utils.extra_config")  # as main.py does, before nodes puts comfy/utils.py first
    import execution
    import nodes  # noqa: F401
    import server

    made = server.PromptServer(asyncio.new_event_loop())
    made.prompt_queue = execution.PromptQueue(made)


def part_of_pack(name):
    """A module of the pack, imported as ComfyUI imports it."""
    if NAME not in sys.modules:
        spec = importlib.util.spec_from_file_location(NAME, f"{pack}/__init__.py")
        sys.modules[NAME] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[NAME])
    return importlib.import_module(f"{NAME}.{name}") if name else sys.modules[NAME]


def found(name):
    """The object of a full name."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        if ".".join(parts[:length]) in sys.modules:
            value = sys.modules[".".join(parts[:length])]
            for part in parts[length:]:
                value = getattr(value, part)
            return value
    raise LookupError(name)


def is_there(name):
    """Whether this ComfyUI has it."""
    try:
        return found(name) is not None
    except (AttributeError, LookupError):
        return False


def delete(line, *, arguments):
    """Take from ComfyUI what the line says; with `arguments` only those that it has to take."""
    if line.attribute:
        for base in found(line.name).__mro__[:-1]:
            forget_name(base, line.attribute)
        return
    owner, _, name = line.name.rpartition(".")
    owner = found(owner)
    if isinstance(owner, type) and name not in vars(owner):
        owner = next(base for base in owner.__mro__ if name in vars(base))
    if not arguments:
        type.__delattr__(owner, name) if isinstance(owner, type) else delattr(owner, name)
        if isinstance(owner, enum.EnumMeta):
            owner._member_map_.pop(name)
        elif hasattr(owner, name) and not line.arguments:  # as a base has it
            above, _, kind = line.name.rpartition(".")[0].rpartition(".")
            delattr(found(above), kind)
    elif isinstance(getattr(owner, name), type):
        getattr(owner, name).__init__ = lambda self: None
    else:
        setattr(owner, name, lambda self: None)


def forget_name(kind, attribute):
    """Have a class without the attribute, and its methods name another one."""
    if attribute in vars(kind):
        delattr(kind, attribute)
    for function in [getattr(each, "__func__", each) for each in vars(kind).values()]:
        if isinstance(function, types.FunctionType):
            function.__code__ = renamed(function.__code__, attribute)


def renamed(code, attribute):
    """The code with another name for an attribute."""
    names = tuple(f"{each}_of_later" if each == attribute else each for each in code.co_names)
    consts = tuple(renamed(each, attribute) if isinstance(each, types.CodeType) else each for each in code.co_consts)
    return code.replace(co_names=names, co_consts=consts)


def loaded():
    """What ComfyUI does with a pack: the ids of its nodes, and whether they only say why they do not run."""
    root = part_of_pack("")
    if hasattr(root, "NODE_CLASS_MAPPINGS"):
        classes = root.NODE_CLASS_MAPPINGS
        said = set()
        for each in classes.values():
            each.INPUT_TYPES()
            try:
                getattr(each(), each.FUNCTION)()
            except ValueError as error:
                said.add(str(error))
        return {"ids": sorted(classes), "said": sorted(said)}

    async def load():
        extension = await root.comfy_entrypoint()
        await extension.on_load()
        return [each.define_schema().node_id for each in await extension.get_node_list()]

    return {"ids": sorted(asyncio.run(load())), "said": []}


def tried(line, arguments):
    """Delete it, load the pack; all that is to be known of that."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger().addHandler(handler)
    try:
        if line is not None:
            delete(line, arguments=arguments)
        result = loaded()
        result["off"] = part_of_pack("nodes.host.contract.version").features_off()
    except Exception:  # noqa: BLE001  whatever it is, it is what the test is to see
        result = {"error": traceback.format_exc()}
    return result | {"line": None if line is None else line.text, "log": lines}


def main():
    start_comfyui()
    import torch  # noqa: F401  the slow part, before forks

    contract = part_of_pack("parallel_runtime.models.hosted.contract")
    lines = contract.LINES if each else ()
    cases = [(None, False), *((line, False) for line in lines), *((line, True) for line in lines if line.arguments)]
    used = [contract.Line(feature="", since="", name=name) for name in contract.WHERE_THERE] if each else []
    cases += [(line, False) for line in used if is_there(line.name)]
    for line, arguments in cases:
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            sys.stdout.write(json.dumps(tried(line, arguments)) + "\n")
            sys.stdout.flush()
            os._exit(0)
        os.waitpid(pid, 0)


main()

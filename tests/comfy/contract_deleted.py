"""Deletes each line of the host contract in turn and looks; loads the pack as it is, and without each feature's lines.

Run in a ComfyUI that is loaded, with its folder and the pack's. A line of JSON for each look, and for each load, which
has a fork of its own, so that none knows of another.
"""

import asyncio
import contextlib
import enum
import functools
import importlib.util
import inspect
import json
import logging
import os
import sys
import traceback
import types

_, _, pack = sys.argv
NAME = "deleted_in_turn"
# Of the pack, and nothing of ComfyUI: imported once, before each load.
ALONE = ("machines.machine", "models.specs", "planner.automatic", "planner.counting", "pool.pool", "report.build")


def part_of_pack(name):
    """A module of the pack, imported as ComfyUI imports it."""
    if NAME not in sys.modules:
        spec = importlib.util.spec_from_file_location(NAME, f"{pack}/__init__.py")
        sys.modules[NAME] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[NAME])
    return importlib.import_module(f"{NAME}.{name}") if name else sys.modules[NAME]


def found(name):
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        if ".".join(parts[:length]) in sys.modules:
            value = sys.modules[".".join(parts[:length])]
            for part in parts[length:]:
                value = getattr(value, part)
            return value
    raise LookupError(name)


def is_there(name):
    try:
        return found(name) is not None
    except (AttributeError, LookupError):
        return False


def delete(line, *, arguments):
    """Take from ComfyUI what the line says; with `arguments` only those that it has to take. What undoes it."""
    if line.attribute and not isinstance(found(line.name), type):
        return [forget_option(inspect.unwrap(found(line.name)), line.attribute)]
    if line.attribute:
        return [undo for base in found(line.name).__mro__[:-1] for undo in forget_name(base, line.attribute)]
    owner, _, name = line.name.rpartition(".")
    owner = found(owner)
    if isinstance(owner, type) and name not in vars(owner):
        owner = next(base for base in owner.__mro__ if name in vars(base))
    if arguments:
        value = getattr(owner, name)
        return [change(*((value, "__init__") if isinstance(value, type) else (owner, name)), lambda self: None)]
    undo = [change(owner, name)]
    if isinstance(owner, enum.EnumMeta):
        member = owner._member_map_.pop(name)
        undo.append(lambda: owner._member_map_.update({name: member}))
    elif hasattr(owner, name) and not line.arguments:  # as a base has it
        above, _, kind = line.name.rpartition(".")[0].rpartition(".")
        undo.append(change(found(above), kind))
    return undo


def change(owner, name, *value):
    """Delete an attribute, or put a value in its place; returns what undoes that."""
    kind = type if isinstance(owner, type) else object
    had, before = name in vars(owner), vars(owner).get(name)
    kind.__setattr__(owner, name, *value) if value else kind.__delattr__(owner, name)
    return lambda: kind.__setattr__(owner, name, before) if had else kind.__delattr__(owner, name)


def forget_name(kind, attribute):
    """Have a class without the attribute, and its methods name another one; what undoes each of that."""
    undo = [change(kind, attribute)] if attribute in vars(kind) else []
    for function in [getattr(each, "__func__", each) for each in vars(kind).values()]:
        if isinstance(function, types.FunctionType):
            undo.append(functools.partial(setattr, function, "__code__", function.__code__))
            function.__code__ = renamed(function.__code__, attribute)
    return undo


def forget_option(function, option):
    """Have a function know the option by another name; what undoes that."""
    later = {option: f"{option}_of_later"}
    code = function.__code__

    def known_later(value):
        return tuple(map(known_later, value)) if isinstance(value, tuple) else later.get(value, value)

    undo = functools.partial(setattr, function, "__code__", code)
    names, consts = known_later(code.co_varnames), known_later(code.co_consts)
    function.__code__ = code.replace(co_varnames=names, co_consts=consts)
    return undo


def renamed(code, attribute):
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


def said_without(line, arguments, lines):
    """The sentences of the features that are off where this line is deleted, by a look at these lines."""
    check = part_of_pack("parallel_runtime.models.hosted.contract_check")
    undo = delete(line, arguments=arguments)
    try:
        return check.off_by_feature(check.look(lines), "0")
    finally:
        for each in reversed(undo):
            each()


def loaded_without(lines, arguments):
    """Delete these lines, load the pack; all that is to be known of that."""
    told = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger().addHandler(handler)
    try:
        for line in lines:
            with contextlib.suppress(AttributeError, LookupError, StopIteration):  # gone with one before
                delete(line, arguments=arguments)
        result = loaded()
        result["off"] = part_of_pack("nodes.host.contract.version").features_off()
    except Exception:  # noqa: BLE001  whatever it is, it is what the test is to see
        result = {"error": traceback.format_exc()}
    return result | {"log": told}


def main():
    contract = part_of_pack("parallel_runtime.models.hosted.contract")
    by_feature = {name: [line for line in contract.LINES if line.feature == name] for name in contract.FEATURES}
    for line in contract.LINES:
        for arguments in (False, True) if line.arguments else (False,):
            off = said_without(line, arguments, by_feature[line.feature])
            say({"feature": line.feature, "line": line.text, "arguments": arguments, "off": off})
    used = [contract.Line(feature="", name=name) for name in contract.WHERE_THERE]
    used = [line for line in used if is_there(line.name)]
    for line in used:
        off = said_without(line, False, contract.LINES)
        say({"feature": "", "line": line.text, "arguments": False, "off": off})
    groups = [("", [], False), ("used where there", used, False)]
    for feature, lines in by_feature.items():
        groups += [(feature, lines, False), (feature, [line for line in lines if line.arguments], True)]
    for name in ALONE:
        part_of_pack(f"parallel_runtime.{name}")
    for name, lines, arguments in groups:
        if arguments and not lines:
            continue
        pid = os.fork()
        if pid == 0:
            say({"group": name, "arguments": arguments, **loaded_without(lines, arguments)})
            os._exit(0)
        os.waitpid(pid, 0)


def say(found):
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


main()

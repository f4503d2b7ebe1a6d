"""Which options of a command line ranks get, how they travel, and what a rank makes of them; parsers made up here.

The parser of the ComfyUI at hand is tests/comfy/test_ranks_are_what_the_host_is.py's.
"""

import argparse
import enum
import json
from pathlib import Path

import pytest

from parallel_runtime.checkpoint import ComfyUI
from parallel_runtime.models.hosted.options import ALWAYS, KEPT, MEANT, apply_options, read_options
from parallel_runtime.wire.records import from_body, to_body


class Feature(enum.Enum):
    Fast = "fast"
    Faster = "faster"


class MemberAction(argparse.Action):
    """As ComfyUI's: takes the type away from argparse, and keeps it under a name of its own."""

    def __init__(self, **settings: object) -> None:
        self._members = settings.pop("type")
        super().__init__(**settings)

    def __call__(self, parser, namespace, values, option_string=None) -> None:
        setattr(namespace, self.dest, self._members(values))


class PairsAction(argparse.Action):
    """Each use of it adds a pair."""

    def __call__(self, parser, namespace, values, option_string=None) -> None:
        setattr(namespace, self.dest, [*getattr(namespace, self.dest), tuple(values)])


def a_parser() -> argparse.ArgumentParser:
    """An option of every kind."""
    parser = argparse.ArgumentParser()
    attention = parser.add_mutually_exclusive_group()
    attention.add_argument("--use-one", action="store_true")
    attention.add_argument("--use-other", action="store_true")
    parser.add_argument("--keep", action="store_true", default=True)
    parser.add_argument("--no-keep", dest="keep", action="store_false")
    parser.add_argument("--tiled", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--level", action="store_const", const=9, default=3)
    parser.add_argument("--streams", nargs="?", const=2, type=int, default=None)
    parser.add_argument("--number", type=float, default=0.5)
    parser.add_argument("--text", type=str, default=None)
    parser.add_argument("--folder", nargs="+", action="append")
    parser.add_argument("--fast", nargs="*", type=Feature)
    parser.add_argument("--method", type=Feature, action=MemberAction, default=Feature.Fast)
    parser.add_argument("--pairs", nargs=2, action=PairsAction, default=[])
    parser.add_argument("--listen", type=str, default="127.0.0.1")
    return parser


def in_a_rank(told: tuple[str, ...], parser: argparse.ArgumentParser | None = None) -> tuple[dict, tuple[str, ...]]:
    """The values that a rank has of these options, which have travelled there, and the names that it left out."""
    there = from_body(ComfyUI, json.loads(json.dumps(to_body(ComfyUI("/comfyui", told)))), "spec")
    parser = parser or a_parser()
    args = parser.parse_args([])
    left_out = apply_options(parser, args, there.options, cpu=False)
    return vars(args), left_out


@pytest.mark.parametrize(
    "given",
    [
        [],
        ["--use-other", "--no-keep", "--no-tiled", "--level"],
        ["--number", "-1.5", "--streams"],
        ["--streams", "-1"],
        ["--text", ""],
        ["--text", "/a folder/with = and --dashes"],
        ["--text=--use-one"],
        ["--folder", "/a b", "/c", "--folder", "/d"],
        ["--fast"],
        ["--fast", "faster"],
        ["--method", "faster"],
        ["--pairs", "DEBUG", "/a log", "--pairs", "INFO", ""],
    ],
    ids=" ".join,
)
def test_a_rank_has_the_value_of_an_option_of_any_kind(given: list[str]) -> None:
    parser = a_parser()
    args = parser.parse_args(given)
    options = read_options(parser, args)
    assert in_a_rank(options.told) == (vars(args), ())
    assert (options.told == ()) == (given == []), "what is not given is not sent"
    assert not options.kept
    assert not options.untold


def test_values_are_what_code_has_made_of_them_since() -> None:
    """Both of a group that the command line would refuse together, and a set where the parser made a list."""
    parser = a_parser()
    args = parser.parse_args(["--use-one"])
    args.use_other, args.fast, args.number = True, {Feature.Faster}, float("inf")
    options = read_options(parser, args)
    found, left_out = in_a_rank(options.told)
    assert (found, left_out) == (vars(args), ())
    assert isinstance(found["fast"], set)


def test_an_option_of_unknown_type_is_left_out_and_named() -> None:
    parser = a_parser()
    parser.add_argument("--thing", type=lambda _: object())
    args = parser.parse_args(["--thing", "x", "--use-one"])
    options = read_options(parser, args)
    assert (options.told, options.untold) == (("--use-one",), ("--thing",))


def test_what_the_ranks_parser_does_not_know_is_left_out_and_named() -> None:
    """An option that a pack added, one that is of another kind there, one whose members are others, and no JSON."""
    parser = a_parser()
    parser.add_argument("--of-a-pack", type=int, default=0)
    args = parser.parse_args(["--of-a-pack", "7", "--use-one", "--method", "faster"])
    args.method = enum.Enum("Other", {"New": "new"})["New"]
    told = (*read_options(parser, args).told, "--number", "--text={", "--unheard-of", '--fast={"list": 1}')
    found, left_out = in_a_rank(told)
    assert left_out == ("--method", "--of-a-pack", "--number", "--text", "--unheard-of", "--fast")
    assert found == vars(a_parser().parse_args(["--use-one"])), "what it knows it has, and nothing else changed"


def test_what_is_on_the_list_stays() -> None:
    parser = a_parser()
    options = read_options(parser, parser.parse_args(["--listen", "0.0.0.0", "--use-one"]))  # noqa: S104
    assert (options.told, options.kept) == (("--use-one",), ("--listen",))


def test_a_rank_has_no_graphs_of_comfyui_and_its_own_device() -> None:
    parser = a_parser()
    for name in (*ALWAYS, "--cpu"):
        parser.add_argument(name, action="store_true")
    args = parser.parse_args([])
    assert apply_options(parser, args, (), cpu=True) == ()
    assert args.disable_comfy_compiler
    assert args.disable_dynamic_vram
    assert args.cpu
    assert not in_a_rank((), parser)[0]["cpu"]


def test_the_page_has_the_list_on_which_each_option_stands_once() -> None:
    names = [name for names in KEPT.values() for name in names]
    assert len(names) == len(set(names))
    assert set(ALWAYS) <= set(names), "a rank must not be told what it has anyway"
    page = (Path(__file__).resolve().parents[2] / "docs" / "commands.md").read_text(encoding="utf-8")
    for reason, names in KEPT.items():
        assert f"| {reason} | {', '.join(f'`{name}`' for name in names)} |\n" in page, reason
    assert all(text in page for text in MEANT)

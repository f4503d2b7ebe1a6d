"""What installing the pack does to a user's ComfyUI, and that its metadata agrees with itself.

pip only plans here (`--dry-run`); nothing is installed.
"""

import ast
import json
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from parallel_runtime import VERSION, installed_version
from parallel_runtime.trials.reference_model import REMEDY
from tools.address import INSTALL, PICTURES, READMES, address, why_not, with_address, with_pictures

ROOT = Path(__file__).resolve().parents[1]
TORCH_FAMILY = {"torch", "torchvision", "torchaudio", "triton"}


def requirement_names(text: str) -> dict[str, str]:
    """The requirements of a requirements file: name to the whole requirement, without spaces."""
    lines = (line.split("#")[0].strip() for line in text.splitlines())
    return {re.split(r"[^A-Za-z0-9_-]", line)[0]: line.replace(" ", "") for line in lines if line}


def project_dependencies() -> dict[str, str]:
    """`[project] dependencies` of pyproject.toml, read by pattern since Python 3.10 has no TOML reader."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (block,) = re.findall(r"^dependencies = \[\n(.*?)^\]", text, flags=re.MULTILINE | re.DOTALL)
    return requirement_names("\n".join(re.findall(r'^\s*"([^"]+)"', block, flags=re.MULTILINE)))


def bench_modules() -> set[str]:
    """What `[project.optional-dependencies] bench` brings, as it is imported."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (line,) = re.findall(r"^bench = \[(.*)\]$", text, flags=re.MULTILINE)
    names = requirement_names("\n".join(re.findall(r'"([^"]+)"', line)))
    return {{"nvidia-ml-py": "pynvml"}.get(name, name) for name in names}


@pytest.fixture(scope="module")
def users_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty environment; it needs no pip of its own, which takes 5 s to install."""
    folder = tmp_path_factory.mktemp("user") / "venv"
    venv.create(folder)
    return folder


def pretend_installed(environment: Path, name: str, version: str) -> None:
    """Writes the metadata by which pip knows a package as installed; pip looks at nothing else of it."""
    (site,) = environment.glob("lib/python*/site-packages")
    for other in site.glob(f"{name}-*.dist-info"):
        shutil.rmtree(other)
    folder = site / f"{name}-{version}.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (folder / "INSTALLER").write_text("pip\n")
    (folder / "RECORD").write_text("")


def planned_installs(environment: Path, *arguments: str) -> dict[str, str]:
    """What pip would install into an environment: name to version."""
    command = [sys.executable, "-m", "pip", "--python", str(environment), "install", "--dry-run", "--quiet"]
    command += ["--report", "-", *arguments]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert result.returncode == 0, result.stderr
    installs = json.loads(result.stdout)["install"]
    return {each["metadata"]["name"].lower(): each["metadata"]["version"] for each in installs}


def torch_family(installs: dict[str, str]) -> set[str]:
    """What of a plan would change how torch runs on the user's GPU."""
    return {name for name in installs if name in TORCH_FAMILY or name.startswith("nvidia")}


@pytest.mark.slow
def test_installing_the_requirements_leaves_the_users_torch_and_transformers_alone(users_folder: Path) -> None:
    oldest = {"torch": "2.6.0", "torchvision": "0.21.0", "torchaudio": "2.6.0"}
    for name, version in {**oldest, "transformers": "4.57.1", "huggingface_hub": "0.36.0"}.items():
        pretend_installed(users_folder, name, version)
    installs = planned_installs(users_folder, "-r", "requirements.txt")
    assert "psutil" in installs, "nothing was planned, so nothing was shown"
    of_models = {"diffusers", "huggingface_hub", "tokenizers", "transformers"}  # other nodes of the user need them
    assert torch_family(installs) | ({name.replace("-", "_") for name in installs} & of_models) == set()


@pytest.mark.slow
def test_a_requirement_that_names_a_newer_torch_would_be_seen(users_folder: Path) -> None:
    pretend_installed(users_folder, "torch", "2.6.0")
    assert torch_family(planned_installs(users_folder, "--no-deps", "torch==2.13.0")) == {"torch"}


def test_requirements_name_everything_of_the_project_but_torch_and_the_judge() -> None:
    required = requirement_names((ROOT / "requirements.txt").read_text(encoding="utf-8"))
    declared = project_dependencies()
    assert declared.pop("torch") == "torch>=2.6"
    assert declared.pop("diffusers") == "diffusers>=0.35.0"
    assert 'pip install "diffusers>=0.35"' in REMEDY
    assert required == declared


def test_every_third_party_import_of_the_pack_is_declared() -> None:
    provided_by_comfyui = {"comfy", "comfy_api", "comfy_execution", "comfyui_version", "folder_paths", "latent_preview"}
    provided_by_comfyui |= {"nodes", "server"}
    imported = set()
    for folder in ("nodes", "parallel_runtime"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
                if isinstance(node, ast.ImportFrom) and node.level == 0:
                    names = [node.module]
                imported |= {name.partition(".")[0] for name in names}
    outside = imported - set(sys.stdlib_module_names) - provided_by_comfyui - {"parallel_runtime"}
    declared = project_dependencies().keys() | bench_modules()
    assert outside <= declared | {"numpy", "aiohttp"}, "declare it in pyproject.toml"


def test_what_only_the_bench_extra_brings_is_imported_when_it_is_needed() -> None:
    """In a function, or for the type checker alone: a user's ComfyUI may do without."""
    extra = "|".join(sorted(bench_modules()))
    assert extra == "matplotlib|pynvml"
    for folder in ("nodes", "parallel_runtime"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            assert not re.findall(rf"^(?:import|from) (?:{extra})\b", text, flags=re.MULTILINE), path.name


def test_the_version_is_the_same_wherever_it_stands() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert re.findall(r'^version = "(.+)"$', text, flags=re.MULTILINE) == [VERSION]
    assert installed_version() == VERSION


def test_the_registry_finds_what_it_asks_for() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert re.search(r'^name = "parallel-dit"$', text, flags=re.MULTILINE)
    assert re.search(r'^\[tool\.comfy\]\nPublisherId = "\S+"\nDisplayName = "Parallel DiT"$', text, flags=re.MULTILINE)
    assert re.search(r'^requires-comfyui = ">=[\d.]+"', text, flags=re.MULTILINE), "a lower bound alone"
    assert text.count("[project.urls]\n") == 1
    assert with_pictures(text, address(text)) == text, "run make address"
    there = with_pictures(text, "https://host.example/owner/pack")
    for field, path in PICTURES.items():
        assert f'{field} = "https://host.example/owner/pack/raw/HEAD/{path}"' in there
        assert (ROOT / path).read_text(encoding="utf-8").startswith("<svg ")
    licence = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert licence.split()[:6] == ["GNU", "GENERAL", "PUBLIC", "LICENSE", "Version", "3,"]


WITH = '[project.urls]\n# why\nRepository = "https://host.example/owner/pack"\n'


@pytest.mark.parametrize(
    ("text", "known", "said"),
    [
        ("[project.urls]\n", "", "pyproject.toml has no address"),
        ('[project.urls]\nRepository = ""\n', "", "pyproject.toml has no address"),
        ('[project.urls]\nRepository = "owner/pack"\n', "owner/pack", "is no https address"),
        (WITH, "https://host.example/owner/pack", ""),
    ],
)
def test_a_pack_without_an_address_is_not_published(text: str, known: str, said: str) -> None:
    assert address(text) == known
    assert said in why_not(text) if said else why_not(text) == ""


@pytest.mark.parametrize("name", READMES)
def test_a_readme_has_the_address_that_pyproject_has(name: str) -> None:
    known = address((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    readme = (ROOT / name).read_text(encoding="utf-8")
    assert with_address(name, readme, known) == readme, "run make address"
    changed = with_address(name, readme, address(WITH))
    assert "git clone https://host.example/owner/pack ComfyUI/" in changed
    assert INSTALL[name][1] not in changed

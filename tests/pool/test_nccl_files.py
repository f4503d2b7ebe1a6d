"""NCCL's configuration files set what an environment may not: the pool refuses to start, and the doctor says which."""

import os
import pwd
from collections.abc import Callable
from pathlib import Path

import pytest

from parallel_runtime.cli.gpu_checks import check_nccl_files
from parallel_runtime.devices import parse_devices
from parallel_runtime.errors import PoolError
from parallel_runtime.pool.pool import Pool
from parallel_runtime.process import nccl_files
from parallel_runtime.process.environment import LISTEN_HERE, NEVER_PASSED_ON, RankSettings, rank_environment
from parallel_runtime.process.nccl_files import NcclFile, refusal

# As the user guide writes them, with what people add: comments, empty lines, lines that NCCL takes for something else.
PLAIN = (
    "# by hand\nNCCL_DEBUG=WARN\n\nNCCL_P2P_LEVEL=NVL\n#NCCL_COMM_ID=10.0.0.1:1\n NCCL_COMM_ID=10.0.0.1:1\nNCCL_COMM_ID"
)
ELSEWHERE = "NCCL_DEBUG=WARN\nNCCL_COMM_ID=10.0.0.1:1234"
INTERFACES = "NCCL_SOCKET_IFNAME==ens1f0\nNCCL_RAS_ADDR=0.0.0.0:28028\nNCCL_OOB_NET_IFNAME=mlx5_1\n"
FILES = {
    "NCCL_CONF_FILE": "mine.conf",
    "~/.nccl.conf": "home/.nccl.conf",
    "~/.rccl.conf": "home/.rccl.conf",
    "/etc/nccl.conf": "etc/nccl.conf",
    "/etc/rccl.conf": "etc/rccl.conf",
}
Read = Callable[[dict[str, str]], list[NcclFile]]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """Writes files, by the names that people know them as, and reads them as ranks would."""

    def read(texts: dict[str, str]) -> list[NcclFile]:
        for name, text in texts.items():
            path = tmp_path / FILES[name]
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        mine = {"NCCL_CONF_FILE": str(tmp_path / FILES["NCCL_CONF_FILE"])} if "NCCL_CONF_FILE" in texts else {}
        return nccl_files.nccl_files(mine, home=tmp_path / "home", system=tmp_path / "etc")

    return read


def test_without_files_there_is_nothing_to_say(read: Read) -> None:
    assert read({}) == []
    assert refusal([]) is None
    assert (check_nccl_files([]).ok, check_nccl_files([]).seen) == (True, "none set anything")


def test_a_file_that_is_a_folder_or_may_not_be_read_is_passed_over_as_nccl_does(tmp_path: Path) -> None:
    assert nccl_files.nccl_files({"NCCL_CONF_FILE": str(tmp_path)}, home=tmp_path, system=tmp_path) == []
    assert nccl_files.nccl_files({"NCCL_CONF_FILE": ""}, home=None, system=tmp_path) == nccl_files.nccl_files(
        {}, home=None, system=tmp_path
    )


@pytest.mark.parametrize("name", FILES)
def test_lines_are_split_as_nccl_splits_them(read: Read, name: str) -> None:
    (file,) = read({name: PLAIN})
    assert file.name == name
    assert file.settings == ("NCCL_DEBUG", "NCCL_P2P_LEVEL", " NCCL_COMM_ID")
    assert refusal([file]) is None
    check = check_nccl_files([file])
    assert check.ok
    assert check.seen.startswith(f"{name} sets NCCL_DEBUG, NCCL_P2P_LEVEL")


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_has_ranks_meet_elsewhere_is_named_and_refused(read: Read, name: str) -> None:
    check = check_nccl_files(read({name: ELSEWHERE}))
    assert not check.ok
    assert check.needed
    assert check.seen.startswith(f"{name} sets NCCL_COMM_ID, with which NCCL would meet ranks elsewhere")
    assert "take that line out" in check.remedy


def test_interfaces_of_a_file_have_no_effect_and_that_is_said(read: Read) -> None:
    files = read({"/etc/nccl.conf": INTERFACES, "NCCL_CONF_FILE": "NCCL_DEBUG=INFO\n"})
    assert [file.name for file in files] == ["NCCL_CONF_FILE", "/etc/nccl.conf"]
    assert refusal(files) is None
    check = check_nccl_files(files)
    assert (check.ok, check.needed) == (False, False)
    assert "so NCCL_OOB_NET_IFNAME, NCCL_RAS_ADDR, NCCL_SOCKET_IFNAME has no effect here" in check.remedy


def test_what_the_environment_may_not_say_a_file_may_not_say_either() -> None:
    """Each variable that ranks do not get is set to something of ours, which wins over files, or refused in them."""
    ours = dict.fromkeys(NEVER_PASSED_ON, "10.0.0.1:1")
    settings = RankSettings(devices=parse_devices("2", num_cuda=2).devices, threads=1, engine="a:B")
    found = rank_environment(ours, settings)
    for name in NEVER_PASSED_ON:
        assert (name in nccl_files.REFUSED) is (name not in found), name
        assert found.get(name) == LISTEN_HERE.get(name)


def test_a_pool_on_gpus_does_not_start_with_such_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parent says so before any rank is started; ranks on a CPU have no NCCL, and start."""
    (tmp_path / "mine.conf").write_text(ELSEWHERE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NCCL_CONF_FILE", "mine.conf")
    with Pool(parse_devices("2", num_cuda=2).devices) as pool, pytest.raises(PoolError) as caught:
        pool.start()
    assert str(caught.value).startswith("NCCL_CONF_FILE sets NCCL_COMM_ID, with which NCCL would meet ranks elsewhere")
    assert nccl_files.REMEDY in str(caught.value)
    assert pool.status()["pids"] == []
    with Pool(parse_devices("cpu:1").devices, engine="engines:Echo", python_path=(str(Path(__file__).parent),)) as pool:
        pool.start()


def test_a_rank_finds_the_file_that_its_parent_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path that is relative is relative to the folder that ComfyUI was started in; ranks run in the pack's."""
    monkeypatch.chdir(tmp_path)
    settings = RankSettings(devices=parse_devices("2", num_cuda=2).devices, threads=1, engine="a:B")
    assert rank_environment({"NCCL_CONF_FILE": "mine.conf"}, settings)["NCCL_CONF_FILE"] == str(tmp_path / "mine.conf")


def test_the_home_folder_is_the_systems_whatever_the_variable_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/nowhere")
    assert nccl_files._home() == Path(pwd.getpwuid(os.getuid()).pw_dir)

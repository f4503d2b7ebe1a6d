"""What the doctor says of GPUs: answers of torch and NVML for machines, and the verdicts that follow.

gpu_machines.py has both. The two stand-ins give the answers through the functions' documented names; nothing of the
doctor is replaced.
"""

import json
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch.distributed as dist

from parallel_runtime.cli import doctor, gpu_facts
from parallel_runtime.cli.gpu_checks import gpu_checks
from parallel_runtime.cli.machine_checks import check_leftovers, check_segment_room, has_memory_elsewhere
from parallel_runtime.cli.parser import make_parser
from parallel_runtime.cli.terminal import SILENT
from parallel_runtime.devices import Device, parse_devices
from parallel_runtime.pool.known_errors import NEW_DRIVER
from parallel_runtime.process.nccl_segments import Leftover
from runtime.gpu_machines import MACHINES, OVER_NVLINK, T4, card, machine

MIB, GIB = 2**20, 2**30


class AnsweringTorch:
    """torch of one machine."""

    def __init__(self, machine):
        self._machine = machine
        self.__version__ = machine["torch"]
        self.version = SimpleNamespace(cuda=machine["cuda"], hip=machine.get("hip"))
        self.distributed = SimpleNamespace(is_available=lambda: True, is_nccl_available=lambda: True)
        self.cuda = SimpleNamespace(
            init=self._init,
            device_count=lambda: len(machine["devices"]),
            get_device_properties=self._properties,
            get_arch_list=lambda: machine["kernels"],
            can_device_access_peer=lambda a, b: machine["peers"],
            mem_get_info=self._memory,
            nccl=SimpleNamespace(version=lambda: tuple(machine["nccl"])),
        )

    def _init(self):
        if self._machine["init_error"]:
            raise RuntimeError(self._machine["init_error"])

    def _properties(self, index):
        device = self._machine["devices"][index]
        told = {name: device[name] for name in ("name", "major", "minor", "total_memory")}
        own = {"gcnArchName": device["arch"]} if self.version.hip else {"uuid": f"0000-{index}"}
        return SimpleNamespace(**told, **own)

    def _memory(self, index):
        device = self._machine["devices"][index]
        if device["error"]:
            raise RuntimeError(device["error"])
        return device["free"], device["total_memory"]


class AnsweringNvml:
    """pynvml of one machine. A handle is the number of its device."""

    class NVMLError(Exception):
        pass

    def __init__(self, machine, known=range(8)):
        self._machine, self._known = machine, known
        self._answers, self._begun = machine["nvml"], False

    def nvmlInit(self):  # noqa: N802
        if self._answers["error"]:
            raise self.NVMLError(self._answers["error"])
        self._begun = True

    def nvmlSystemGetDriverVersion(self):  # noqa: N802
        if not self._begun:
            raise self.NVMLError("Uninitialized")
        return self._answers["driver"]

    def nvmlSystemGetCudaDriverVersion(self):  # noqa: N802
        return self._answers["cuda_driver"]

    def nvmlDeviceGetCount(self):  # noqa: N802
        return self._answers["count"]

    def nvmlDeviceGetHandleByUUID(self, uuid):  # noqa: N802
        prefix, _, index = uuid.split("-")
        if (prefix == "MIG") is not self._machine["devices"][int(index)]["slice"] or int(index) not in self._known:
            raise self.NVMLError("Not Found")
        return int(index)

    def nvmlDeviceIsMigDeviceHandle(self, handle):  # noqa: N802
        return self._machine["devices"][handle]["slice"]

    def nvmlDeviceGetComputeMode(self, handle):  # noqa: N802
        return self._machine["devices"][handle]["compute_mode"]

    def nvmlDeviceGetMigMode(self, handle):  # noqa: N802
        if self._machine["devices"][handle]["mig"] is None:
            raise self.NVMLError("Not Supported")
        return self._machine["devices"][handle]["mig"]

    def nvmlDeviceGetP2PStatus(self, first, second, what):  # noqa: N802
        assert first != second
        return self._answers[{0: "p2p_read", 2: "p2p_nvlink"}[what]]


def facts_of(name, *, nvml=True):
    machine = MACHINES[name][0]
    asked = gpu_facts.ask(AnsweringTorch(machine), AnsweringNvml(machine) if nvml else None, mps=machine["mps"])
    # As they travel from the process that asks.
    return gpu_facts.of_json(json.dumps(gpu_facts.asdict(asked)))


def checks_of(name, **kinds):
    facts = facts_of(name, **kinds)
    return {check.name: check for check in gpu_checks(facts, range(len(MACHINES[name][0]["devices"])))}


def failing(checks):
    return {name for name, check in checks.items() if not check.ok and check.needed}


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("nvml", [True, False], ids=["nvml", "no nvml"])
def test_every_no_has_a_remedy(name, nvml):
    assert all(check.ok or check.remedy for check in checks_of(name, nvml=nvml).values())


@pytest.mark.parametrize("name", MACHINES)
def test_each_machine_is_told_what_it_lacks_and_what_to_do(name):
    _, failed, told = MACHINES[name]
    checks = checks_of(name)
    assert failing(checks) == failed
    for check, texts in told.items():
        said = f"{checks[check].seen}; {checks[check].remedy}"
        assert [text for text in texts if text not in said] == [], said
    if told is OVER_NVLINK:
        assert all(check.ok for check in checks.values()), "nothing is to be mended"


def test_checks_that_say_nothing_of_a_machine_are_left_out():
    assert "peer access" not in checks_of("1x T4") | checks_of("1x RX 6600 with torch for ROCm 6.3")
    amd = checks_of("4x MI210 with ROCm 6.2")
    assert amd["capability"].ok, "what is below 8.0 on CUDA says nothing of AMD"
    assert not {"driver", "compute mode", "mig", "mps"} & set(amd), "nvidia-smi's, which is not there"


@pytest.mark.parametrize(
    ("capability", "slow", "untried"),
    [((8, 0), False, False), ((7, 9), True, False), ((7, 5), True, False), ((7, 4), True, True)],
)
def test_what_a_card_lacks_is_told_by_its_capability(capability, slow, untried):
    check = told("capability", capability=capability)
    assert (check.ok, "below 8.0" in check.remedy, "below 7.5" in check.remedy) == (not slow, slow, untried)


def test_a_torch_without_distributed_has_no_backends_and_no_nccl(monkeypatch):
    monkeypatch.setattr(dist, "is_available", lambda: False)
    for name in ("is_gloo_available", "is_nccl_available"):
        monkeypatch.delattr(dist, name)
    assert doctor._backends() == {"gloo": False, "nccl": False}
    answering = AnsweringTorch(machine(card("A", (8, 0), GIB)))
    answering.distributed = dist
    facts = gpu_facts.ask(answering, None, mps=False)
    assert (facts.nccl, facts.error, len(facts.gpus)) == ("", "", 1)


def test_a_card_is_described_by_what_answers_under_its_number():
    of_any = {"capability": (8, 0), "total_bytes": GIB}
    facts = gpu_facts.GpuFacts(gpus=tuple(gpu_facts.Gpu(index=n, name=f"the card {n}", **of_any) for n in (2, 3)))
    said = [doctor._describe_device(Device("cuda", number), facts)["name"] for number in (3, 2, 0)]
    assert said == ["the card 3", "the card 2", "it does not answer"]


def told(name, *, capability=(8, 0), count=1, **facts):
    """A check of so many cards where torch and the driver say these."""
    gpus = [gpu_facts.Gpu(index=index, name="A", capability=capability, total_bytes=GIB) for index in range(count)]
    facts = gpu_facts.GpuFacts(**{"torch_cuda": "12.4", "gpus": tuple(gpus)} | facts)
    (check,) = (each for each in gpu_checks(facts, range(count)) if each.name == name)
    return check


@pytest.mark.parametrize(
    ("built", "speaks", "remedy"),
    [
        ("12.4.1", 12040, ""),
        ("12.4", 12030, "it works, but compiled blocks may not"),
        ("11.8", 10020, "install driver 450.80.02 or newer"),
        ("12.4", 11080, "install driver 525.60.13 or newer"),
        ("13.0", 12090, "install driver 580.65.06 or newer"),
        ("14.0", 13000, NEW_DRIVER),
    ],
)
def test_the_driver_that_is_to_be_installed_is_of_torchs_cuda(built, speaks, remedy):
    check = told("driver", torch_cuda=built, driver="1", driver_cuda=speaks)
    assert check.remedy.startswith(remedy) and (check.ok, check.needed) == (not remedy, "works" not in remedy)


@pytest.mark.parametrize(
    ("kernels", "capability", "ok"),
    [
        ((), (8, 0), False),
        (("sm_80",), (8, 6), True),
        (("sm_86",), (8, 0), False),
        (("sm_80",), (9, 0), False),
        (("unheard of", "compute_80"), (9, 0), True),
        (("sm_120a",), (12, 0), True),
    ],
)
def test_kernels_are_for_a_major_version_and_code_to_compile_for_all_later(kernels, capability, ok):
    assert told("kernels", kernels=kernels, capability=capability).ok == ok


@pytest.mark.parametrize(
    ("linked", "over"),
    [((), ", over PCIe"), (("0-1",), ", some over NVLink"), (("0-1", "0-2", "1-2"), ", over NVLink")],
)
def test_over_what_devices_reach_each_other_is_told(linked, over):
    check = told("peer access", count=3, peer_access=dict.fromkeys(("0-1", "0-2", "1-2"), True), nvlink=linked)
    assert check.seen == f"every device reaches every other{over}"


@pytest.mark.parametrize(
    ("facts", "seen", "remedy"),
    [
        ({"gpus": ()}, "torch sees no device", "look at nvidia-smi"),
        ({"error": "something new", "driver_gpus": 2}, "something new; the driver sees 2", "look at nvidia-smi"),
        ({"error": "something new", "torch_hip": "6.3"}, "something new", "look at rocm-smi"),
    ],
)
def test_why_torch_sees_no_device_is_told(facts, seen, remedy):
    check = told("cuda", **facts)
    assert (check.ok, check.seen, check.remedy) == (False, seen, remedy)


def test_gpus_that_an_option_hides_are_told_of_and_slices_are_none():
    check = told("cuda", torch="2.9", driver_gpus=2)
    assert (check.ok, check.needed, check.seen) == (False, False, "torch 2.9 sees 1 device(s); the driver sees 2")
    assert check.remedy.startswith("CUDA_VISIBLE_DEVICES, or --cuda-device among ComfyUI's options, hides the others")
    assert told("cuda", driver_gpus=2, count=2).ok
    part = gpu_facts.Gpu(index=0, name="A", capability=(8, 0), total_bytes=GIB, mig="slice")
    assert told("cuda", driver_gpus=2, gpus=(part,)).ok


def test_a_gpu_without_kernels_is_to_be_left_out_where_others_have_them():
    old = gpu_facts.Gpu(index=2, name="B", capability=(6, 1), total_bytes=GIB)
    two = tuple(gpu_facts.Gpu(index=index, name="A", capability=(8, 0), total_bytes=GIB) for index in range(2))
    check = told("kernels", count=3, gpus=(*two, old), kernels=("sm_80",))
    assert not check.ok and check.remedy.startswith("name cuda:0,cuda:1 in devices, or install a torch built for")
    assert told("kernels", capability=(6, 1), kernels=("sm_80",)).remedy.startswith("install a torch")


def test_a_device_without_comfyui_may_be_exclusive():
    facts = facts_of("2x RTX 4090 in exclusive process mode")
    mode = next(check for check in gpu_checks(facts, [1]) if check.name == "compute mode")
    assert not mode.ok
    assert not mode.needed


@pytest.mark.parametrize("name", [name for name, (machine, *_) in MACHINES.items() if machine["hip"]])
@pytest.mark.parametrize("devices", [True, False], ids=["devices", "no device answers"])
def test_nobody_with_an_amd_gpu_is_sent_to_nvidias_tools(name, devices):
    facts = facts_of(name)
    if not devices:
        silent = tuple(gpu_facts.replace(gpu, error="HIP error: something new") for gpu in facts.gpus)
        facts = gpu_facts.replace(facts, gpus=silent)
    for check in gpu_checks(facts, range(len(facts.gpus)) or [0]):
        words = f"{check.seen} {check.remedy}"
        assert not re.search(r"nvidia|nvml|CUDA|RTX", words), words


@pytest.mark.parametrize(
    ("version", "asked"),
    [
        ({"cuda": "12.4", "hip": None}, True),
        ({"cuda": None, "hip": "6.3.42131-fa1d09cbd"}, True),
        ({"cuda": None, "hip": None}, False),
    ],
)
def test_the_doctor_asks_where_torch_is_built_for_gpus(monkeypatch, version, asked):
    looked = []
    monkeypatch.setattr(doctor, "look", lambda: looked.append(1) or gpu_facts.GpuFacts(error="asked"))
    monkeypatch.setattr(doctor.torch, "version", SimpleNamespace(**version))
    monkeypatch.setattr(doctor, "_live_checks", lambda *_: [])
    report = doctor.run(make_parser().parse_args(["doctor", "--devices", "cpu:1"]))
    assert bool(looked) is asked
    (devices,) = (check for check in report["checks"] if check["name"] == "devices")
    wanted = "look at rocm-smi" if version["hip"] else "look at nvidia-smi" if version["cuda"] else "install a torch"
    assert f" a GPU, {wanted}" in devices["remedy"]


@pytest.mark.parametrize(
    ("off", "seen", "remedy"),
    [
        ((), "this ComfyUI has all of `comfy` that the pack relies on", ""),
        (("a is off; update",), "a is off", "update"),
        (("a is off; update", "b, c; is off; write"), "a is off; b, c; is off", "update"),
    ],
)
def test_what_the_contract_lacks_is_seen_with_the_first_remedy(monkeypatch, off, seen, remedy):
    process = SimpleNamespace(ask={"contract": {"off": list(off)}}.__getitem__)
    monkeypatch.setattr(doctor, "find_comfyui", lambda told: told)
    monkeypatch.setattr(doctor, "ComfyUIProcess", lambda *_: nullcontext(process))
    monkeypatch.setattr(doctor, "version_of_comfyui", lambda _: "0.30")
    monkeypatch.setattr(doctor, "newer_than_tested", lambda *_: "")
    found = {check.name: check for check in doctor._check_comfyui("there")}
    contract = found.pop("host contract")
    assert (contract.ok, contract.seen, contract.remedy) == (not off, seen, remedy)
    assert [check.seen for check in found.values()] == ["0.30 can be imported"]


@pytest.mark.parametrize(("ranks", "sent"), [(1, []), (2, ["byte pattern"])])
def test_bytes_are_sent_where_there_is_a_rank_to_send_them_to(monkeypatch, ranks, sent):
    pool = SimpleNamespace(start=int, close=int, broken_copies="", exchange_pattern=lambda plan: [0] * plan.ranks)
    monkeypatch.setattr(doctor, "Pool", lambda *_, **__: pool)
    monkeypatch.setattr(doctor, "_check_parity", lambda *_: doctor.Check(name="parity", ok=True, seen=""))
    found = doctor._live_checks(parse_devices(f"cpu:{ranks}").devices, None, SILENT)
    assert [check.name for check in found] == ["workers", *sent, "parity"]


@pytest.mark.parametrize(
    ("number", "mode"), list(enumerate(("default", "exclusive thread", "prohibited", "exclusive process")))
)
def test_the_modes_of_a_device_are_nvmls(number, mode):
    cut = {(1, 0): "on", (0, 1): "", None: ""}
    devices = [card("A", (8, 0), GIB, compute_mode=number, mig=each) for each in cut]
    asked = machine(*devices)
    for known in (range(8), ()):  # NVML may not know a device that torch has
        gpus = gpu_facts.ask(AnsweringTorch(asked), AnsweringNvml(asked, known), mps=False).gpus
        assert [(gpu.compute_mode, gpu.mig) for gpu in gpus] == [
            (mode, on) if known else ("", "") for on in cut.values()
        ]


@pytest.mark.parametrize(
    ("read", "why"),
    [
        *((0, None), (1, "the chipset"), (2, "the GPU or its driver"), (3, "they are on different")),
        *((4, "it is switched off"), (5, "not supported")),
    ],
)
def test_why_devices_do_not_reach_each_other_is_nvmls(read, why):
    asked = machine(T4, T4, nvlink=0, read=read)
    torch = AnsweringTorch(asked)
    torch.cuda.can_device_access_peer = lambda a, b: a < b
    facts = gpu_facts.ask(torch, AnsweringNvml(asked), mps=False)
    assert facts.peer_access == {"0-1": False}, "both ways are needed"
    assert facts.nvlink == ("0-1",) and str(facts.p2p_reason.get("0-1")).startswith(str(why))
    hidden = gpu_facts.ask(torch, AnsweringNvml(asked, known=(0,)), mps=False)
    assert (hidden.nvlink, hidden.p2p_reason) == ((), {})


@pytest.mark.parametrize(
    ("program", "error"),
    [
        ("import sys; sys.exit('first\\nlast')", "last"),
        ("import os; os._exit(3)", "ended with status 3"),
        ("import time; time.sleep(60)", "CUDA gave no answer for 1 s"),
        ("print('noise'); print(open('facts.json').read())", ""),
    ],
)
def test_how_the_process_that_asks_ended_is_told(program, error, tmp_path, monkeypatch):
    folder = tmp_path / "parallel_runtime" / "cli"
    folder.mkdir(parents=True)
    (folder / "gpu_facts.py").write_text(program)
    (tmp_path / "facts.json").write_text(json.dumps(gpu_facts.asdict(gpu_facts.GpuFacts(torch="9"))))
    monkeypatch.setattr(gpu_facts, "PACK_ROOT", tmp_path)
    monkeypatch.setattr(gpu_facts, "LIMIT_S", 0.6 if "sleep" in program else 60.0)
    assert gpu_facts.look() == gpu_facts.GpuFacts(error=error, torch="" if error else "9")


def test_mps_is_there_by_its_pipe_or_its_process(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    for names, there in (((None, "a"), False), ((None, "a", "nvidia-cuda-mps-control"), True)):
        running = [SimpleNamespace(info={"name": name}) for name in names]
        monkeypatch.setattr(psutil, "process_iter", lambda _, running=running: running)
        assert gpu_facts._mps_runs() == there
    monkeypatch.setattr(psutil, "process_iter", lambda _: [])
    (tmp_path / "control").write_text("")
    assert gpu_facts._mps_runs()


def test_without_nvml_torch_alone_answers():
    facts = facts_of("2x RTX 4090 without peer access", nvml=False)
    assert (facts.driver, facts.driver_cuda, facts.driver_gpus) == ("", 0, 0)
    checks = checks_of("2x RTX 4090 without peer access", nvml=False)
    assert not failing(checks)
    assert checks["driver"].seen == "not checked: pynvml is not installed"
    assert checks["peer access"].seen == "none between 0-1"
    assert checks["compute mode"].ok and checks["compute mode"].seen.startswith("not told")
    assert checks_of("1x T4")["compute mode"].seen == "several processes may use each device"


@pytest.mark.slow
def test_a_process_of_its_own_asks_the_real_torch():
    facts = gpu_facts.look()
    import torch

    assert facts.torch == torch.__version__
    if torch.version.cuda is None:
        (cuda,) = gpu_checks(facts, [0])
        assert "built for the CPU alone" in cuda.seen


@pytest.mark.parametrize(
    ("errors", "needed"), [((), True), (("out of memory",), False), (("out of memory", "something new"), True)]
)
def test_devices_that_other_programs_fill_do_not_keep_workers_from_running(errors, needed):
    said = [f"CUDA error: {error}" for error in errors] + [""] * (2 - len(errors))
    of_any = {"name": "A", "capability": (8, 0), "total_bytes": GIB}
    gpus = tuple(gpu_facts.Gpu(index=index, error=error, **of_any) for index, error in enumerate(said))
    check = told("devices answer", count=2, gpus=gpus)
    assert (check.ok, check.needed) == (not errors, needed)


@pytest.mark.parametrize(
    ("free", "ranks", "over_host", "ok", "needed"),
    [
        (64 * MIB, 2, True, False, False),  # Docker's: two ranks fit, with little to spare
        (64 * MIB, 4, True, False, True),  # and four do not, as users found
        (2 * GIB, 4, True, True, False),
        (4 * 2 * 9_637_888, 4, True, False, False),  # each of a ring sends to the next
        (4 * 2 * 9_637_888 - 1, 4, True, False, True),
        (GIB, 4, True, True, False),
        (GIB - 1, 4, True, False, False),
        (8 * 7 * 2 * 9_637_888, 8, True, True, False),  # each sends to each, which is more than 1 GiB
        (8 * 7 * 2 * 9_637_888 - 1, 8, True, False, False),
    ],
)
def test_the_room_that_nccl_needs_in_dev_shm(free, ranks, over_host, ok, needed):
    check = check_segment_room((free, free), ranks=ranks, over_host=over_host)
    assert (check.ok, check.needed) == (ok, needed)
    assert ok or "--shm-size=1g" in check.remedy
    assert not check_segment_room(None, ranks=ranks, over_host=over_host).ok
    elsewhere = check_segment_room((free, free), ranks=ranks, over_host=over_host, elsewhere=True)
    assert elsewhere == replace(check, needed=False), "a start shows whether the container lets NCCL do without"
    assert not check_segment_room(None, ranks=ranks, over_host=over_host, elsewhere=True).needed


def test_from_which_nccl_and_driver_on_host_memory_is_not_in_dev_shm():
    known = [("2.24.3", 12060), ("2.27.3", 12080), ("3.0", 13000), ("2.23.4", 13000), ("2.24.3", 12050), ("", 0)]
    assert [has_memory_elsewhere(*each) for each in known] == [True, True, True, False, False, False]


TWO_RANKS = 2 * (2 * 7_340_384 + 2 * 2 * 2 * 9_637_888)  # communicators: proxies, and rings of two channels


@pytest.mark.parametrize(
    ("free", "ranks", "linked", "ok"),
    [(TWO_RANKS, 2, False, True), (TWO_RANKS - 1, 2, False, False), (MIB, 8, True, True), (MIB, 1, False, True)],
)
def test_without_nvlink_nccl_may_copy_through_dev_shm_though_devices_reach_each_other(free, ranks, linked, ok):
    check = check_segment_room((free, free), ranks=ranks, over_host=False, linked=linked)
    assert (check.ok, check.needed) == (ok, False)
    assert ok or "which takes 175 MiB" in check.seen and "--cap-add SYS_NICE" in check.remedy


@pytest.mark.parametrize(
    ("name", "ok"),
    [("2x RTX 3090 with an NVLink bridge", True), ("2x RTX 3090 over PCIe", False), ("4x MI210 with ROCm 6.2", True)],
)
def test_devices_with_nvlink_between_all_need_little_of_dev_shm(name, ok, monkeypatch):
    """AMD's own links are not asked for."""
    monkeypatch.setattr(doctor, "segment_room_bytes", lambda: (64 * MIB, 64 * MIB))
    over_pcie = gpu_facts.replace(facts_of("2x RTX 3090 with an NVLink bridge"), nvlink=())
    facts = facts_of(name) if name in MACHINES else over_pcie
    checks = doctor._device_checks(parse_devices("all", num_cuda=len(facts.gpus)), facts)
    (room,) = (check for check in checks if check.name == "shared memory of NCCL")
    assert room.ok is ok


def test_the_report_names_devices_and_pairs_as_the_panel_reads_them():
    facts = facts_of("2x RTX 4090 without peer access")
    selection = parse_devices("all", num_cuda=2)
    assert doctor._peer_access(facts, selection) == {"cuda:0-cuda:1": False, "cuda:1-cuda:0": False}
    described = doctor._describe_device(selection.devices[1], facts)
    assert described["name"] == "NVIDIA GeForce RTX 4090"
    assert described["free_bytes"] < described["total_bytes"]
    names = [check.name for check in doctor._device_checks(selection, facts)]
    assert names[-2:] == ["shared memory of NCCL", "NCCL leftovers"]
    text = doctor.describe({"warnings": [], "versions": {}, "devices": [described], "checks": [], "can_run": True})
    assert facts.gpus[1].uuid
    assert not any(gpu.uuid for gpu in facts.nameless().gpus)
    assert "cuda:1: NVIDIA GeForce RTX 4090, 23.3 GiB free of 23.6" in text


def test_leftovers_are_named_with_the_command_that_removes_them():
    path = Path("/dev/shm/nccl-a1B2c3")  # noqa: S108
    check = check_leftovers([Leftover(path, 9_637_888)])
    assert check.seen == "1 in /dev/shm, 9 MiB"
    assert check.remedy.endswith(f"rm {path}")
    assert check_leftovers([]).ok

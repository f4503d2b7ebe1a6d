"""Whether a plan computes what one process does with this ComfyUI: the verdict, its measure, and where it is kept.

ComfyUI's own code runs in the ranks, and users have other versions of it than we test. So a call is computed shared and
whole once for each `ProofKey`, and compared; pool/proving.py asks for the calls. Plain data but for the comparison.

Owns the key, the tolerances, the verdict and the file `proofs.json` in the user's cache folder (user_files.py); delete
it to have everything proven again.

    {"version": 1, "proofs": {"2f1c...": {"key": {"comfyui": "0.30.0", ...}, "proof": {"verdict": "proven", ...}}}}
"""

import json
import math
from dataclasses import asdict, dataclass, fields, replace

import torch

from .user_files import Key, Store

KEPT = 1000  # entries; the oldest go first
PROVEN, REFUSED, NOT_PROVEN, NOT_NEEDED = VERDICTS = ("proven", "refused", "not proven", "not needed")
# Relative error of a shared call, by what it computes in: the kernels add in another order, and that is all. Families'
# tiny files have at most 3e-7, 8e-4 and 6.3e-3.
TOLERANCES = {"float64": 1e-5, "float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}
MISTAKES = TOLERANCES | {
    "float16": 6e-3,
    "bfloat16": 3e-2,
}  # above them no rounding explains it
CONTROL = 10.0  # times the tolerance: what a call without exchange must differ by, or nothing can be judged
INFINITE = 1e9  # stands for an error that is no number


@dataclass(frozen=True, kw_only=True)
class ProofKey(Key):
    """What a proof holds for; any other kind of call is proven by itself."""

    comfyui: str  # its version
    pack: str  # the version and a hash of what shares the tokens
    model_class: str
    source: str  # a hash of the files that the class and its modules are in
    plan: str  # the degrees that cut tokens, and how weights lie
    kernels: str  # the kind of device, and ComfyUI's options that choose how modules compute
    weights: str  # what is computed in, and the formats that the file has
    arguments: tuple[str, ...]  # of the call, without their sizes


@dataclass(frozen=True, kw_only=True)
class Proof:
    """A verdict and what it was found by: relative errors, the tokens of the call, calls of the model and seconds.

    `error` is that of the shared call, `control` that of a call whose ranks exchanged nothing; None: not computed.
    """

    verdict: str
    reason: str = ""
    error: float | None = None
    control: float | None = None
    tolerance: float | None = None
    tokens: int = 0
    calls: int = 0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.verdict not in VERDICTS:
            raise ValueError(f"verdict={self.verdict!r} is unknown; use one of {', '.join(VERDICTS)}")

    @property
    def text(self) -> str:
        """The verdict in a line, such as `proven: relative error 3.1e-07, at most 1.0e-05`."""
        if self.verdict == PROVEN:
            return f"{PROVEN}: relative error {self.error:.1e}, at most {self.tolerance:.1e}"
        return f"{self.verdict}: {self.reason}" if self.reason else self.verdict


def relative_error(result: torch.Tensor, reference: torch.Tensor) -> float:
    """Norm of the difference over the norm of the reference, in fp64. 0 for empty tensors, NaN never passes.

    Raises `ValueError` for tensors of different shapes.
    """
    if result.shape != reference.shape:
        raise ValueError(f"shapes differ: {tuple(result.shape)} and {tuple(reference.shape)}; compare equal ones")
    if reference.numel() == 0:
        return 0.0
    difference = (result.double() - reference.double()).norm() / reference.double().norm()
    return float(difference)


def judged(
    dtype: str, *, shared: torch.Tensor, whole: torch.Tensor, control: torch.Tensor, coarse: float = 0.0
) -> Proof:
    """The verdict on one call, computed three times in `dtype`: by the plan, whole, and without any exchange.

    `coarse`: the tolerance where layers round what they are given to few values, if that is more than the dtype's: a
    last digit then sends a number to the other side of a step.

    A control near the tolerance means that these weights and inputs would hide a mistake: then nothing is judged,
    unless the shared call is that far off by itself.
    """
    tolerance, mistake = max(TOLERANCES[dtype], coarse), max(MISTAKES[dtype], 3 * coarse)
    least = max(CONTROL * TOLERANCES[dtype], 3 * coarse)
    error, without = finite(relative_error(shared, whole)), finite(relative_error(control, whole))
    proof = Proof(verdict=PROVEN, error=error, control=without, tolerance=tolerance)
    if not whole.isfinite().all() or not whole.any():
        return replace(proof, verdict=NOT_PROVEN, reason="the whole call's output is zero or not finite")
    if error > mistake and max(error, without) > least:
        reason = f"relative error {error:.1e} of a shared call, at most {mistake:.1e} in {dtype}"
        return replace(proof, verdict=REFUSED, reason=reason)
    if without <= least:
        reason = (
            f"it cannot be judged: without any exchange the error is {without:.1e}, and has to be above {least:.1e} "
            f"in {dtype}"
        )
        return replace(proof, verdict=NOT_PROVEN, reason=reason)
    if error > tolerance:
        reason = f"relative error {error:.1e}, above {tolerance:.1e}, which rounding to {dtype} may explain"
        return replace(proof, verdict=NOT_PROVEN, reason=reason)
    return proof


def finite(error: float) -> float:
    """The error, `INFINITE` for one that is no number: NaN is neither more nor less than any other."""
    return min(error, INFINITE) if math.isfinite(error) else INFINITE


class ProofStore(Store):
    """The proofs in one file."""

    FILE, NAME, VERSION, MOST = "proofs.json", "proofs", 1, KEPT
    THEN = "each plan is proven again"

    def load(self, key: ProofKey) -> Proof | None:
        """The proof kept for this key; None when there is none that can be used."""
        entry = self.entries.of(key)
        return None if entry is None else _proof(entry.get("proof"))

    def of_any_call(self, key: ProofKey) -> list[Proof]:
        """The proofs kept for calls with any arguments, else of this key."""
        wanted = json.loads(json.dumps(asdict(key) | {"arguments": []}))
        entries = [each for each in self.entries.all().values() if isinstance(each, dict)]
        found = [each for each in entries if isinstance(each.get("key"), dict)]
        proofs = [_proof(each.get("proof")) for each in found if each["key"] | {"arguments": []} == wanted]
        return [proof for proof in proofs if proof is not None]

    def counted(self, comfyui: str) -> dict[str, int]:
        """How many kinds of calls have each verdict with a version of ComfyUI, for all classes and plans."""
        entries = [each for each in self.entries.all().values() if isinstance(each, dict)]
        found = [
            each for each in entries if isinstance(each.get("key"), dict) and each["key"].get("comfyui") == comfyui
        ]
        verdicts = [proof.verdict for proof in map(_proof, (each.get("proof") for each in found)) if proof is not None]
        return {each: verdicts.count(each) for each in VERDICTS if each in verdicts}

    def save(self, key: ProofKey, proof: Proof) -> None:
        """Keep it, where the folder can be written."""
        self.keep(key, {"proof": asdict(proof)})


def _proof(entry: object) -> Proof | None:
    """The entry as a proof; None when anything in it is missing, of the wrong kind or out of range."""
    if not isinstance(entry, dict) or entry.keys() != {field.name for field in fields(Proof)}:
        return None
    texts = [entry["verdict"], entry["reason"]]
    numbers = [entry[name] for name in ("error", "control", "tolerance") if entry[name] is not None]
    numbers += [entry[name] for name in ("tokens", "calls", "seconds")]
    good = all(type(text) is str for text in texts) and all(map(_is_number, numbers))
    if not good or entry["verdict"] not in VERDICTS or (entry["verdict"] == PROVEN and None in entry.values()):
        return None
    return Proof(**entry)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= INFINITE

"""Gets the reference model of `verify` and `doctor`, which needs diffusers; nothing else of the pack does.

diffusers is not in requirements.txt: its own requirements may replace packages that a user's other nodes rely on.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..models.family import Family, MakeReference

REMEDY = 'pip install "diffusers>=0.35", in an environment of its own when other packages need an older huggingface_hub'


class NoReferenceModelError(ValueError):
    """diffusers cannot be imported. `cause` says why, in a line; the text adds the remedy."""

    def __init__(self, cause: str) -> None:
        super().__init__(f"{cause}; {REMEDY}")
        self.cause = cause


def load_reference_model(family: "Family") -> "MakeReference":
    """The class of the reference model. Raises `NoReferenceModelError`."""
    try:
        return family.reference()
    except ModuleNotFoundError as error:
        if error.name != "diffusers":
            raise NoReferenceModelError(f"diffusers cannot be imported: {_first_line(error)}") from error
        raise NoReferenceModelError("diffusers is not installed") from error
    except (ImportError, RuntimeError) as error:  # the latter is how diffusers wraps what its parts could not import
        raise NoReferenceModelError(f"diffusers cannot be imported: {_first_line(error)}") from error


def reference_version() -> str:
    """Which diffusers it is. Only after `load_reference_model`, which says what to do where there is none."""
    import diffusers

    return str(diffusers.__version__)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]

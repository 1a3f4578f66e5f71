"""What can go wrong, as one tree.

::

    LocantError                   catch this to catch everything locant raises itself
    ├── AddressError              a string or a value that is no address (also a ValueError)
    │   └── UnknownCoordinate     a coordinate this version does not know, or not in that place
    ├── PointError                an address that is right, on a model that cannot serve it
    │   ├── UnknownPoint          no point has this name
    │   ├── LayerOutOfRange       the point exists, the model has fewer layers
    │   ├── PointUnavailable      this model, layer or backend has no such tensor, or its proof failed
    │   └── ModulePathError       the model has no module of this path
    ├── LocatorError              a locator that names no rows this model and prompt have (also a ValueError)
    ├── EditError                 a change that cannot be made: of a wrong shape, not finite (also a ValueError)
    ├── PromptError               a prompt that cannot be run: empty, too long, of unknown tokens
    ├── ModelError                a model that cannot be loaded, or whose structure is not supported
    └── CacheError                an address that was not captured, or a file that is no capture
                                  (also a KeyError, so that a cache behaves as a mapping)

Every one says three things, and keeps them as attributes: what was **asked**, what there is instead
(**has**), and what to do next (**instead**).
"""

from collections.abc import Iterable
from difflib import get_close_matches


class LocantError(Exception):
    """The base of every exception that locant raises.

    Args:
        asked: what was asked and why it cannot be, e.g. ``"resid_pots.3: no such point"``.
        has: what there is, e.g. ``"This model has 12 layers"``.
        instead: what to do next, e.g. ``"Did you mean resid_post?"``.

    The text of the exception is the three as sentences. Instances survive pickling.
    """

    asked: str
    has: str | None
    instead: str | None

    def __init__(self, asked: str, has: str | None = None, instead: str | None = None) -> None:
        super().__init__(asked, has, instead)
        self.asked = asked
        self.has = has
        self.instead = instead

    def __str__(self) -> str:
        return " ".join(_sentence(part) for part in (self.asked, self.has, self.instead) if part)


class AddressError(LocantError, ValueError):
    """A string or a value that is no address."""


class UnknownCoordinate(AddressError):
    """A coordinate that this version does not know, or that stands where it may not.

    A coordinate selects a tensor, so none is ever skipped. Catch this one to tell an address written by
    a newer version from a typing mistake.
    """


class PointError(LocantError):
    """An address in order, which this model or this backend cannot serve."""


class UnknownPoint(PointError):
    """No point has this name."""


class LayerOutOfRange(PointError):
    """The model has fewer layers than the address asks for."""


class PointUnavailable(PointError):
    """The point exists, but not here.

    The model or the layer lacks it, its proof failed, or the backend cannot serve it.
    """


class ModulePathError(PointError):
    """The loaded model has no module of this path."""


class LocatorError(LocantError, ValueError):
    """A locator, or a part of one, that names no rows: in itself, or on this model and this prompt."""


class EditError(LocantError, ValueError):
    """A change that cannot be made: in itself, or on this model and these prompts."""


class PromptError(LocantError):
    """A prompt that cannot be run.

    It is empty, longer than the context, of the wrong type, has token ids outside the vocabulary, or is
    text for a model without a tokenizer.
    """


class ModelError(LocantError):
    """A model that cannot be loaded, or whose structure is not one locant can name places in."""


class CacheError(LocantError, KeyError):
    """An address that was not captured, or a file that does not hold a capture."""


def did_you_mean(name: str, candidates: Iterable[str], limit: int = 3) -> str | None:
    """The ``instead`` sentence that offers the candidates closest to ``name``, or None if none is close."""
    close = get_close_matches(name, list(candidates), n=limit, cutoff=0.6)
    return f"Did you mean {' or '.join(close)}?" if close else None


def _sentence(text: str) -> str:
    return text if text.endswith((".", "?", "!")) else f"{text}."

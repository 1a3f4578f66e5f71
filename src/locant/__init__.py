"""locant names every tensor of a transformer's forward pass, reads it, and changes it.

Public names are loaded when they are first used, so that importing locant imports neither torch nor
transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from locant import points as points
    from locant.address import Address as Address
    from locant.address import format_address as format_address
    from locant.address import parse_address as parse_address
    from locant.address import to_address as to_address
    from locant.anatomy.facts import Facts as Facts
    from locant.engine.cache import Cache as Cache
    from locant.engine.eager.model import EagerModel as EagerModel
    from locant.engine.edits import Add as Add
    from locant.engine.edits import AddScaled as AddScaled
    from locant.engine.edits import Apply as Apply
    from locant.engine.edits import Cap as Cap
    from locant.engine.edits import Edit as Edit
    from locant.engine.edits import Operation as Operation
    from locant.engine.edits import Scale as Scale
    from locant.engine.edits import Set as Set
    from locant.engine.edits import Swap as Swap
    from locant.engine.edits import Where as Where
    from locant.engine.steering import AblateSpec as AblateSpec
    from locant.engine.steering import AddSpec as AddSpec
    from locant.engine.steering import LayerSteeringSpec as LayerSteeringSpec
    from locant.engine.steering import NormScaledAddSpec as NormScaledAddSpec
    from locant.engine.steering import OrthogonalDecompSpec as OrthogonalDecompSpec
    from locant.engine.steering import ProjectionCapSpec as ProjectionCapSpec
    from locant.engine.steering import SteeringSpec as SteeringSpec
    from locant.engine.steering import SwapSpec as SwapSpec
    from locant.errors import AddressError as AddressError
    from locant.errors import CacheError as CacheError
    from locant.errors import EditError as EditError
    from locant.errors import LayerOutOfRange as LayerOutOfRange
    from locant.errors import LocantError as LocantError
    from locant.errors import LocatorError as LocatorError
    from locant.errors import ModelError as ModelError
    from locant.errors import ModulePathError as ModulePathError
    from locant.errors import PointError as PointError
    from locant.errors import PointUnavailable as PointUnavailable
    from locant.errors import PromptError as PromptError
    from locant.errors import UnknownCoordinate as UnknownCoordinate
    from locant.errors import UnknownPoint as UnknownPoint
    from locant.load import load_model as load_model
    from locant.locators.axes import ModelAxis as ModelAxis
    from locant.locators.axes import ModelLayerLocation as ModelLayerLocation
    from locant.locators.index import Index as Index
    from locant.locators.locator import Combination as Combination
    from locant.locators.locator import Coordinates as Coordinates
    from locant.locators.locator import Filter as Filter
    from locant.locators.locator import Group as Group
    from locant.locators.locator import Incremental as Incremental
    from locant.locators.locator import ModelLocatorConfig as ModelLocatorConfig
    from locant.points import POINTS as POINTS
    from locant.points import Point as Point

__version__ = "0.1.0"

__all__ = [
    "POINTS",
    "AblateSpec",
    "Add",
    "AddScaled",
    "AddSpec",
    "Address",
    "AddressError",
    "Apply",
    "Cache",
    "CacheError",
    "Cap",
    "Combination",
    "Coordinates",
    "EagerModel",
    "Edit",
    "EditError",
    "Facts",
    "Filter",
    "Group",
    "Incremental",
    "Index",
    "LayerOutOfRange",
    "LayerSteeringSpec",
    "LocantError",
    "LocatorError",
    "ModelAxis",
    "ModelError",
    "ModelLayerLocation",
    "ModelLocatorConfig",
    "ModulePathError",
    "NormScaledAddSpec",
    "Operation",
    "OrthogonalDecompSpec",
    "Point",
    "PointError",
    "PointUnavailable",
    "ProjectionCapSpec",
    "PromptError",
    "Scale",
    "Set",
    "SteeringSpec",
    "Swap",
    "SwapSpec",
    "UnknownCoordinate",
    "UnknownPoint",
    "Where",
    "format_address",
    "load_model",
    "parse_address",
    "points",
    "to_address",
]

_SUBMODULES = frozenset({"points"})

_HOMES = {
    "POINTS": "points",
    "AblateSpec": "engine.steering",
    "Add": "engine.edits",
    "AddScaled": "engine.edits",
    "AddSpec": "engine.steering",
    "Address": "address",
    "AddressError": "errors",
    "Apply": "engine.edits",
    "Cache": "engine.cache",
    "CacheError": "errors",
    "Cap": "engine.edits",
    "Combination": "locators.locator",
    "Coordinates": "locators.locator",
    "EagerModel": "engine.eager.model",
    "Edit": "engine.edits",
    "EditError": "errors",
    "Facts": "anatomy.facts",
    "Filter": "locators.locator",
    "Group": "locators.locator",
    "Incremental": "locators.locator",
    "Index": "locators.index",
    "LayerOutOfRange": "errors",
    "LayerSteeringSpec": "engine.steering",
    "LocantError": "errors",
    "LocatorError": "errors",
    "ModelAxis": "locators.axes",
    "ModelError": "errors",
    "ModelLayerLocation": "locators.axes",
    "ModelLocatorConfig": "locators.locator",
    "ModulePathError": "errors",
    "NormScaledAddSpec": "engine.steering",
    "Operation": "engine.edits",
    "OrthogonalDecompSpec": "engine.steering",
    "Point": "points",
    "PointError": "errors",
    "PointUnavailable": "errors",
    "ProjectionCapSpec": "engine.steering",
    "PromptError": "errors",
    "Scale": "engine.edits",
    "Set": "engine.edits",
    "SteeringSpec": "engine.steering",
    "Swap": "engine.edits",
    "SwapSpec": "engine.steering",
    "UnknownCoordinate": "errors",
    "UnknownPoint": "errors",
    "Where": "engine.edits",
    "format_address": "address",
    "load_model": "load",
    "parse_address": "address",
    "to_address": "address",
}


def __getattr__(name: str) -> object:
    """Load a public name on first use, and let it say that it lives in ``locant``."""
    if name in _SUBMODULES:
        return import_module(f"{__name__}.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    if hasattr(value, "__qualname__"):
        value.__module__ = __name__
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])

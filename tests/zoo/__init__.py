"""Every family of causal language models that transformers knows, small and with weights that make a mistake visible.

A family is a key of transformers' own tables: those of ``AutoModelForCausalLM``, and the multimodal ones, whose text
tower reads plain token ids. A variant, written ``family:variant``, is another layout that the same code can have.
"""

import copy
import warnings
from dataclasses import MISSING, fields
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from zoo.sizes import ABSENT, FAMILIES, PAIRS, SIZES, TEXT, TOKENS, TOWER

CAUSAL: dict[str, str] = dict(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
_WITH_IMAGES = (
    modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES | modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
)
MULTIMODAL: dict[str, str] = {name: cls for name, cls in _WITH_IMAGES.items() if name not in CAUSAL}
VARIANTS = [name for name in FAMILIES if ":" in name]


def build(family: str, attention: str = "eager") -> PreTrainedModel:
    """A model of `family` in float32, the same weights each time."""
    key = family.partition(":")[0]
    cls = getattr(transformers, CAUSAL.get(key) or MULTIMODAL[key])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = _config(family)
        text = (type(config).sub_configs or {}).get("text_config")
        if text is not None and cls.config_class is text:
            config = config.get_text_config()
        elif isinstance(getattr(config, "decoder", None), cls.config_class):
            config = config.decoder
        model = cls._from_config(config, attn_implementation=attention, dtype=torch.float32).float().eval()
    fill(model, seed=sum(map(ord, family)))
    return model


def fill(model: nn.Module, seed: int) -> None:
    """Make every weight a random number that shows: norms, biases, gates and what is initialised to zero too."""
    generator = torch.Generator().manual_seed(seed)
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    trained = {n: b for n, b in model.named_buffers() if n.rpartition(".")[2].endswith(("_bias", "_biases", "_scalar"))}
    with torch.no_grad():
        learned = [(n, p) for n, p in model.named_parameters() if p.requires_grad]  # a table of sines stays one
        for name, weight in [*learned, *trained.items()]:
            if not weight.is_floating_point() or weight.numel() == 0:
                continue
            noise = torch.randn(weight.shape, generator=generator).to(weight.dtype)
            weight.nan_to_num_(0.0, 0.0, 0.0)
            if id(weight) in tables:
                weight.copy_(0.5 * noise)
            elif _decays(name):
                weight.add_(0.1 * noise)
            elif weight.dim() > 1 and max(weight.shape[1:]) > 1:
                fan_in = weight[0].numel() if weight.dim() != 3 or weight.shape[1] == 1 else max(weight.shape[1:])
                weight.copy_(noise * 0.7 / fan_in**0.5)
            else:
                weight.add_(0.3 * noise)


def _decays(name: str) -> bool:
    """A rate of a recurrent mixer, which explodes where it is any number at all."""
    leaf = name.rpartition(".")[2]
    return leaf in ("A", "D") or any(word in leaf for word in ("A_log", "dt_bias", "log_coeff", "time_", "running_"))


# ---- configs


def _config(family: str) -> PreTrainedConfig:
    key = family.partition(":")[0]
    own = _merged(FAMILIES.get(key, {}), FAMILIES.get(family, {}) if family != key else {})
    return CONFIG_MAPPING[own.pop("model_type", key)](**_sizes(CONFIG_MAPPING[key], own, SIZES))


def _sizes(cls: type[PreTrainedConfig], own: dict[str, Any], table: dict[str, Any]) -> dict[str, Any]:
    """What `cls` is told: the sizes of `table` it knows, no dropout, a layer of each kind, and `own` over that."""
    known = {f.name: None if f.default is MISSING else f.default for f in fields(cls)}
    lists = {f.name for f in fields(cls) if str(f.type).startswith(("list", "tuple"))}
    default = _default(cls)
    optional = {"q_lora_rank"}
    sizes = {
        name: size
        for name, size in (table | TOKENS).items()
        if name in known.keys() - lists
        and not isinstance(known[name], bool)
        and not (name in optional and known[name] is None)
    }
    sizes |= {name: type(value)(0) for name, value in known.items() if _drops(name) and type(value) in (int, float)}
    if table is SIZES and default is not None:
        sizes |= _pattern(default, known)
    for name, sub in (cls.sub_configs or {}).items():
        if own.get(name) is not ABSENT:
            sizes[name] = _part(name, sub, getattr(default, name, None), own.get(name, {}))
    rest = {name: size for name, size in own.items() if name not in (cls.sub_configs or {})}
    return {name: size for name, size in (sizes | rest).items() if size is not ABSENT and size is not None}


def _part(name: str, cls: Any, default: object, own: dict[str, Any]) -> dict[str, Any] | None:
    if "model_type" in own:
        cls = CONFIG_MAPPING[own["model_type"]]
    elif isinstance(default, PreTrainedConfig):
        cls = type(default)
    if not hasattr(cls, "__dataclass_fields__") or cls is PreTrainedConfig:
        return None
    family = getattr(cls, "model_type", "")
    text = name in TEXT
    whole = _merged(FAMILIES.get(family, {}) if text else {}, own)
    return _sizes(cls, whole, SIZES if text else TOWER) | {"model_type": family}


def _merged(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    return copy.deepcopy(under) | copy.deepcopy(over)


def _default(cls: type[PreTrainedConfig]) -> PreTrainedConfig | None:
    try:
        return cls()
    except Exception:  # noqa: BLE001 - a config that needs arguments has no default, whatever it raises
        return None


def _drops(name: str) -> bool:
    return "dropout" in name or name.endswith(("pdrop", "layerdrop"))


def _pattern(default: PreTrainedConfig, known: dict[str, Any]) -> dict[str, Any]:
    """One layer of each pair of attention and MLP that the full model has, and three layers at least."""
    columns = {name: getattr(default, name, None) for name in PAIRS if name in known}
    columns = {name: kinds for name, kinds in columns.items() if isinstance(kinds, list) and kinds}
    if not columns:
        return {}
    pairs = list(dict.fromkeys(zip(*columns.values(), strict=False)))
    pairs = [pairs[i % len(pairs)] for i in range(max(3, len(pairs)))]
    lengths = {n: len(pairs) for n in ("num_hidden_layers", "n_layer", "num_layers") if n in known}
    return dict(zip(columns, map(list, zip(*pairs, strict=True)), strict=True)) | lengths

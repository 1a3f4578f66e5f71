"""A model of transformers under names that mean nothing: the same source, every name of its own replaced.

Renamed are the classes, the functions, the methods, the modules and the parameters, the arguments of every forward of
a module and what the config is asked for. Left are names that torch or transformers itself looks up, which any model
that runs on them has: `forward`, the attributes that an attention kernel reads, those of the config that make a mask.
"""

import ast
import importlib.util
import inspect
import random
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import torch
from transformers import PreTrainedConfig, PreTrainedModel

_LOOKED_UP = {"config", "training", "gradient_checkpointing", "num_key_value_groups", "is_causal"}
_LOOKED_UP_IN_CONFIG = {"layer_types", "sliding_window", "pad_token_id", "_attn_implementation"}
_METHODS = {"__init__", "forward"}
_DROPPED_METHODS = {"_init_weights", "extra_repr"}

Function = ast.FunctionDef


class Names(dict[str, str]):
    """A word of random letters for each name asked for, the same each time."""

    def __init__(self) -> None:
        self._random = random.Random(0)

    def __missing__(self, name: str) -> str:
        self[name] = "".join(self._random.choices("bdfghjkpquvwxyz", k=6))
        return self[name]


def renamed(original: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """`original` with the same weights and none of its names; `folder` is where its source is written."""
    cls = type(original)
    names = Names()
    source, asked = _rewritten(ast.parse(inspect.getsource(inspect.getmodule(cls))), cls.__name__, names)
    path = folder / f"{names['the module']}.py"
    path.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made = getattr(module, names[cls.__name__])
    made.config_class = type(names["the config"], (PreTrainedConfig,), {"model_type": names["the model type"]})
    config = made.config_class()
    for name in asked:
        if hasattr(original.config, name):
            setattr(config, name if name in _LOOKED_UP_IN_CONFIG else names[name], getattr(original.config, name))
    attention = original.config._attn_implementation
    model = made._from_config(config, attn_implementation=attention, dtype=original.dtype).eval()
    _copy_weights(original, model)
    return model


def _copy_weights(source: PreTrainedModel, target: PreTrainedModel) -> None:
    """In the order in which the modules made them, which a name has no part in."""
    pairs = zip(chain(source.parameters(), source.buffers()), chain(target.parameters(), target.buffers()), strict=True)
    with torch.no_grad():
        for weight, copy in pairs:
            copy.copy_(weight)


def _rewritten(tree: ast.Module, wanted: str, names: Names) -> tuple[str, set[str]]:
    """The source of the class `wanted` and all it needs under other names, and what it asks its config for."""
    kept = _needed(tree, wanted)
    own = {node.name for node in kept if isinstance(node, Function | ast.ClassDef)}
    classes = {node.name: node for node in kept if isinstance(node, ast.ClassDef)}
    assigned = {name: set(_assigned(node)) for name, node in classes.items()}
    rewriter = _Rewriter(names, own, set().union(*assigned.values()) - _LOOKED_UP - {"weight"})
    body: list[ast.stmt] = []
    for node in kept:
        if isinstance(node, ast.ClassDef):
            whole = _is_pretrained(node, classes)
            _strip(node, whole)
            methods = {method.name for method in node.body if isinstance(method, Function)} - _METHODS
            rewriter.enter(assigned[node.name] - _LOOKED_UP | methods, arguments=not whole)
            for method in node.body:
                if isinstance(method, Function) and method.name not in _METHODS:
                    method.name = names[method.name]
        else:
            rewriter.enter(set(), arguments=False)
        body.append(rewriter.visit(node))
    source = ast.unparse(ast.fix_missing_locations(ast.Module(body, [])))
    base = names["model"], names["embed_tokens"]
    return source.replace("'the prefix'", repr(base[0])).replace("'the embedding'", repr(base[1])), rewriter.asked


def _needed(tree: ast.Module, wanted: str) -> list[ast.stmt]:
    """The statements that `wanted` needs, and no more, in their order."""
    defined = {node.name: node for node in tree.body if isinstance(node, Function | ast.ClassDef)}
    needed, todo = set(), [wanted]
    while todo:
        name = todo.pop()
        if name in defined and name not in needed:
            needed.add(name)
            todo += [n.id for n in ast.walk(_plain(defined[name])) if isinstance(n, ast.Name)]
    imports = [_absolute(node) for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    return [*(node for node in imports if node is not None), *(n for k, n in defined.items() if k in needed)]


def _plain(node: ast.stmt) -> ast.stmt:
    """Without what transformers wraps around it, how it is initialised, and annotations, which name the config."""
    for inner in ast.walk(node):
        if isinstance(inner, Function | ast.ClassDef):
            inner.decorator_list = [d for d in inner.decorator_list if _is_name(d, "staticmethod")]
        if isinstance(inner, ast.ClassDef):
            inner.body = [n for n in inner.body if not (isinstance(n, Function) and n.name in _DROPPED_METHODS)]
        if isinstance(inner, Function):
            inner.returns = None
        if isinstance(inner, ast.arg):
            inner.annotation = None
        for name in ("body", "orelse", "finalbody"):
            if isinstance(statements := getattr(inner, name, None), list):
                setattr(inner, name, [plain for s in statements if (plain := _unannotated(s)) is not None])
    return node


def _unannotated(node: ast.stmt) -> ast.stmt | None:
    if not isinstance(node, ast.AnnAssign):
        return node
    return None if node.value is None else ast.copy_location(ast.Assign([node.target], node.value), node)


def _absolute(node: ast.Import | ast.ImportFrom) -> ast.stmt | None:
    if isinstance(node, ast.ImportFrom) and node.level:
        if node.level < 3:
            return None
        node.module, node.level = "transformers" + (f".{node.module}" if node.module else ""), 0
    return node


def _strip(node: ast.ClassDef, whole: bool) -> None:
    """Without docstrings and declarations; a model says what it supports and where its embedding is."""
    supports = [n for n in node.body if isinstance(n, ast.Assign) and ast.unparse(n).startswith("_supports_")]
    methods = [n for n in node.body if isinstance(n, Function)]
    for method in methods:
        if ast.get_docstring(method) is not None:
            method.body = method.body[1:]
    said = ast.parse("base_model_prefix = 'the prefix'\n_input_embed_layer = 'the embedding'").body if whole else []
    node.body = [*supports, *said, *methods]


def _is_pretrained(node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> bool:
    bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
    return any(b == "PreTrainedModel" or (b in classes and _is_pretrained(classes[b], classes)) for b in bases)


def _assigned(node: ast.ClassDef) -> Iterator[str]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store) and _is_name(inner.value, "self"):
            yield inner.attr


def _is_name(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


class _Rewriter(ast.NodeTransformer):
    """Puts other names in place of a model's own.

    Attributes:
        asked: the attributes of the config that were read.
    """

    def __init__(self, names: Names, own: set[str], attributes: set[str]) -> None:
        self.names, self.own, self.attributes = names, own, attributes
        self.asked: set[str] = set(_LOOKED_UP_IN_CONFIG) - {"_attn_implementation"}
        self.of_self: set[str] = set()
        self.rename_arguments = False
        self.local: set[str] = set()

    def enter(self, of_self: set[str], arguments: bool) -> None:
        self.of_self, self.rename_arguments = of_self, arguments

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        node.name = self.names[node.name]
        self.generic_visit(node)
        return node

    def visit_FunctionDef(self, node: Function) -> Function:
        if node.name in self.own:
            node.name = self.names[node.name]
        arguments = [a.arg for a in (*node.args.args, *node.args.kwonlyargs)]
        takes_self = self.rename_arguments and arguments[:1] == ["self"] and node.name != "__init__"
        self.local = set(arguments[1:]) if takes_self else set()
        self.generic_visit(node)
        self.local = set()
        return node

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.arg = self.names[node.arg] if node.arg in self.local else node.arg
        return node

    def visit_Name(self, node: ast.Name) -> ast.Name:
        node.id = self.names[node.id] if node.id in self.own | self.local else node.id
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.Attribute:
        if _is_config(node.value):
            node.attr = self._of_config(node.attr)
        elif _is_name(node.value, "self"):
            node.attr = self.names[node.attr] if node.attr in self.of_self else node.attr
        elif _is_name(node.value, "module") or _is_name(node.value, "decoder_layer"):
            node.attr = self.names[node.attr] if node.attr in self.attributes else node.attr
        self.generic_visit(node)
        return node

    def visit_Call(self, node: ast.Call) -> ast.Call:
        called = node.func.attr if isinstance(node.func, ast.Attribute) and _is_name(node.func.value, "self") else ""
        # the trunk is a model of transformers itself, whose arguments keep their names
        if called in self.of_self - {"model"} or _is_name(node.func, "decoder_layer"):
            for keyword in node.keywords:
                keyword.arg = keyword.arg and self.names[keyword.arg]
        if isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr") and _is_config(node.args[0]):
            node.args[1] = ast.Constant(self._of_config(ast.literal_eval(node.args[1])))
        self.generic_visit(node)
        return node

    def _of_config(self, name: str) -> str:
        self.asked.add(name)
        return name if name in _LOOKED_UP_IN_CONFIG else self.names[name]


def _is_config(node: ast.expr) -> bool:
    return _is_name(node, "config") or (isinstance(node, ast.Attribute) and node.attr == "config")

"""A model whose modeling file has every name of its own replaced by a meaningless one.

Replaced are its classes and functions, and the attributes under which its modules keep modules and parameters. What
torch itself names stays: the ``weight`` of a linear map, ``forward``.
"""

import ast
import importlib
import inspect
import sys
from pathlib import Path
from types import ModuleType

import torch
from torch import nn
from transformers import PreTrainedModel

_KEPT = {"weight", "bias", "eager_attention_forward"}
"""What torch calls its parameters, and the function that locant and transformers may look for in any modeling file."""


def renamed(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """The same weights in a model made of a copy of the modeling file, which is written to `folder`."""
    file = inspect.getmodule(type(model))
    assert file is not None
    names = _Names(file, model)
    twin = getattr(_written(file, names, folder), names.defined[type(model).__name__])._from_config(
        model.config, attn_implementation=model.config._attn_implementation, dtype=torch.float32
    )
    twin.load_state_dict({names.path(path): value for path, value in model.state_dict().items()})
    return twin.eval()


class _Names:
    """The new name of each class and function, and of each attribute that holds a module or a parameter."""

    def __init__(self, file: ModuleType, model: nn.Module) -> None:
        self.tree = ast.parse(inspect.getsource(file))
        defined = [n.name for n in self.tree.body if isinstance(n, (ast.ClassDef, ast.FunctionDef))]
        own = [m for m in model.modules() if type(m).__module__ == file.__name__]
        held = [name for m in own for name in [*m._modules, *m._parameters] if not name.isdigit()]
        every = {name: f"q{index}" for index, name in enumerate(sorted({*defined, *held} - _KEPT))}
        self.defined = {name: every[name] for name in defined if name in every}
        self.held = {name: every[name] for name in held if name in every}

    def path(self, path: str) -> str:
        return ".".join(self.held.get(part, part) for part in path.split("."))


def _written(file: ModuleType, names: _Names, folder: Path) -> ModuleType:
    source = ast.unparse(_Renamer(names, file.__name__.rpartition(".")[0]).visit(names.tree))
    name = f"meaningless{abs(hash(source))}"
    (folder / f"{name}.py").write_text(source, encoding="utf-8")
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(folder))


class _Renamer(ast.NodeTransformer):
    """Replaces the names in a file, and makes its relative imports absolute."""

    def __init__(self, names: _Names, package: str) -> None:
        self.names, self.package = names, package

    def visit_Name(self, node: ast.Name) -> ast.Name:
        node.id = self.names.defined.get(node.id, node.id)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.Attribute:
        self.generic_visit(node)
        if ast.unparse(node.value).partition(".")[0] not in ("nn", "F", "torch", "config"):
            node.attr = self.names.held.get(node.attr, node.attr)
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        """A decorator that has transformers compute with parameters of certain names goes; the class can do it too."""
        node.decorator_list = [d for d in node.decorator_list if "experts_implementation" not in ast.unparse(d)]
        self.generic_visit(node)
        node.name = self.names.defined[node.name]
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        self.generic_visit(node)
        node.name = self.names.defined.get(node.name, node.name) if node in self.names.tree.body else node.name
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        """A path of attributes in a string, as that of the weights that are tied."""
        if isinstance(node.value, str) and " " not in node.value:
            node.value = self.names.path(node.value)
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.ImportFrom:
        if node.level:
            base = ".".join(self.package.split(".")[: 1 - node.level or None])
            node.module, node.level = f"{base}.{node.module}" if node.module else base, 0
        return node

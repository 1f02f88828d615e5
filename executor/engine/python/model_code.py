"""Whether the code of a `model.py` does nothing but compute.

Such a model may be called on any thread, the event loop's too, and nobody can tell: it opens and waits for nothing, has
no lock, no thread and no event loop of its own, and neither uses a library that asks on which thread it is called nor
changes what Python and numpy keep for each thread (digits of decimals, what numpy does with a division by 0). Whoever
imports anything beyond these modules, files beside it included, counts as a model that may. A model that wants to
deceive can; models are code that the operator trusts (docs/guides/security.md).
"""

from __future__ import annotations

import ast

MODULES = """
    __future__ abc array base64 binascii bisect collections copy dataclasses datetime decimal enum fractions functools
    hashlib heapq itertools json math numbers numpy operator random re statistics string struct
    triton_python_backend_utils typing unicodedata zlib
"""
"""What it may import."""
NAMES = """
    open input exec eval compile breakpoint __import__ load loadtxt genfromtxt fromfile memmap open_memmap DataSource
    save savez savez_compressed savetxt tofile dump ctypeslib f2py InferenceRequest async_exec is_model_ready
    get_response_sender getcontext setcontext DefaultContext seterr seterrcall setbufsize set_printoptions get_context
"""
"""Names in these modules, and among Python's own, that lead to files, to other code, to other models, to answers that
come later, to settings of a thread, or to a request's trace."""

_modules, _names = frozenset(MODULES.split()), frozenset(NAMES.split())


def only_computes(source: bytes) -> bool:
    """Whether the code does nothing but compute; False for code that Python cannot read."""
    try:
        return all(map(_computes, ast.walk(ast.parse(source))))
    except (SyntaxError, ValueError, RecursionError):
        return False


def _computes(node: ast.AST) -> bool:
    match node:
        case ast.Import(names=names):
            return all(_is_harmless(name.name) for name in names)
        case ast.ImportFrom(module=module, names=names, level=level):
            return level == 0 and all(_is_harmless(f"{module}.{name.name}") for name in names)
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name not in _names
        case ast.AsyncFunctionDef() | ast.AsyncFor() | ast.AsyncWith() | ast.Await():
            return False
        case _:
            return True


def _is_harmless(path: str) -> bool:
    """path: of a module, or of a name in one"""
    root, *parts = path.split(".")
    return root in _modules and _names.isdisjoint(parts)

"""Import this before anything of `engine.kernels.triton`: it makes Triton interpret kernels on the CPU.

Triton decides at decoration time, its own library included, by TRITON_INTERPRET. The variable is set for the
import of triton alone; afterwards a switch inside triton says the same, so that child processes of other tests
inherit nothing. On a machine with a GPU the importing module is skipped: tests/gpu runs the same checks compiled.
"""

from __future__ import annotations

import os
import sys

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("the kernels are checked on this GPU instead: pytest -m gpu", allow_module_level=True)

if "triton" not in sys.modules:
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        import triton  # noqa: F401
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before

from triton import knobs
from triton.language.standard import cdiv
from triton.runtime import interpreter

if not isinstance(cdiv, interpreter.InterpretedFunction):
    raise RuntimeError("triton was imported before interpreted_triton; import this module first")
knobs.runtime.interpret = True
# Checks of integer overflow double the time; they guard nothing here, tensors are tiny and compiled kernels have none.
interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)

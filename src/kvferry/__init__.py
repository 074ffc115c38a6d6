"""kvferry: carry an LLM server's KV cache blocks to a shared-memory store and back.

This file is the door: a name that is not in ``__all__`` is private. vLLM users need
``kvferry.vllm`` only; the parts below (``kvferry.kernels``, ``kvferry.kvops``) work without vLLM.

Public names:
    ``__version__``: the version of this package, a string.
"""

__all__ = ["__version__"]

__version__ = "0.1.0"

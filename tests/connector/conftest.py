"""Import vLLM once, outside the rule that a warning is an error: it and its dependencies warn while they load."""

import importlib.util
import warnings

if importlib.util.find_spec("vllm") is not None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector  # noqa: F401

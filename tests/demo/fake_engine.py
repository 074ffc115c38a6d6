"""An engine that is right, and the ways in which it may be wrong."""

from kvferry.demo.engine import Answer, EngineFailedError
from kvferry.demo.measure import (
    EXTERNAL_HITS,
    LOAD_FAILURES,
    LOADED_BYTES,
    LOADED_CHUNKS,
    OWN_HITS,
    STORED_BYTES,
    STORED_CHUNKS,
    VERIFIED_BLOBS,
)


class FakeEngine:
    """Answers with a digest of the prompt; keeps prompts in *store*, which outlives it."""

    def __init__(self, store, fault=""):
        self.start_seconds = 0.0
        self.fault = fault
        self.store = store
        self.own = set()
        self.counters = {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def generate(self, prompts, *, max_tokens):
        return [self._answer(tuple(prompt), max_tokens) for prompt in prompts]

    def settle(self):
        pass

    def reset(self):
        self.own.clear()

    def metrics(self):
        return dict(self.counters)

    def _count(self, name, amount):
        self.counters[name] = self.counters.get(name, 0) + amount

    def _answer(self, prompt, max_tokens):
        salt = 0
        cached = 0
        if self.fault == "crash" and len(self.store) > 2:
            raise EngineFailedError("the engine ended at generate with exit code -9")
        if prompt in self.own:
            cached = len(prompt)
            self._count(OWN_HITS, cached)
        elif prompt in self.store and self.fault != "nothing loaded":
            cached = len(prompt)
            self._count(EXTERNAL_HITS, cached)
            self._count(LOADED_CHUNKS, 1)
            self._count(LOADED_BYTES, 1000)
            self._count(VERIFIED_BLOBS, 1)
            if self.fault == "wrong tokens":
                salt = 1
            if self.fault == "failed load":
                self._count(LOAD_FAILURES, 1)
        else:
            self._count(STORED_CHUNKS, 1)
            self._count(STORED_BYTES, 1000)
        self.store.add(prompt)
        if self.fault != "no own cache":
            self.own.add(prompt)
        # deaf: the answer does not depend on the first token
        heard = prompt[1:] if self.fault == "deaf" else prompt
        tokens = tuple(hash((heard, salt, step)) % 1024 for step in range(max_tokens))
        ttft = 0.01 if cached else 0.1
        return Answer(tokens, ttft, 0.002, cached, "length")


def starter(fault=""):
    """Return what the demo's command takes to start engines, all on one store."""
    store = set()

    def start(log, spec):
        return FakeEngine(store, fault)

    return start

"""Checks whether a grammar can be enforced: compiles it once in a separate process, whose hangs and crashes do no harm.

One process is kept; while it works on a slow grammar, another process starts for the next.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from threading import Lock

from kvasir.errors import InvalidRequest, UnsupportedModel
from kvasir.guided.vocabulary import Vocabulary
from kvasir.text.sandbox import Sandbox, SandboxLimit

SCRIPT = Path(__file__).with_name("check_worker.py")
MAX_CHARS = 256 << 10
SECONDS = 5.0  # of processor time
MEMORY = 4 << 30  # bytes of address space; the largest vocabularies use several hundred MB of it
MAX_WORKERS = 2
REMEMBERED = 256


class GrammarCheck:
    """Thread-safe. The first worker starts with the first grammar, or with `warm`."""

    def __init__(self, vocabulary: Callable[[], Vocabulary]):
        """vocabulary: raises KvasirError for a model without a tokenizer."""

        def hello() -> dict[str, object]:
            found = vocabulary()
            assert found.spell  # the guides will need it
            tokens = [data.decode("latin-1") for data in found.tokens]
            return {"tokens": tokens, "special_ids": [*found.hidden.values()], "eos_ids": list(found.eos_ids)}

        self.sandbox = Sandbox(SCRIPT, "grammar", SECONDS, MEMORY, MAX_WORKERS, hello, kept=1)
        self._sound: OrderedDict[tuple[str, bool], str] = OrderedDict()
        self._lock, self._warming = Lock(), Lock()

    def check(self, grammar: str, convert: bool = False, param: str | None = None) -> str:
        """Returns the grammar in the form that guides take. convert: it may be in llama.cpp's GBNF.

        Raises InvalidRequest (with `param`) for what cannot be enforced, QueueFull if no worker is free.
        """
        if len(grammar) > MAX_CHARS:
            raise InvalidRequest(f"the grammar has {len(grammar)} characters", f"at most {MAX_CHARS}", param=param)
        with self._lock:
            known = self._sound.get((grammar, convert))
        if known is None:
            known = self._ask(grammar, convert, param)
            with self._lock:
                self._sound[grammar, convert] = known
                while len(self._sound) > REMEMBERED:
                    self._sound.popitem(last=False)
        return known

    def warm(self) -> None:
        """Starts a worker now. Raises KvasirError."""
        with self._warming:
            self.sandbox.prewarm()

    def close(self) -> None:
        self.sandbox.close()

    def _ask(self, grammar: str, convert: bool, param: str | None) -> str:
        with self._warming:
            pass  # a worker that is already starting is ready sooner than a new one
        try:
            reply = self.sandbox.run({"grammar": grammar, "convert": convert, "seconds": SECONDS})
        except SandboxLimit as error:
            raise InvalidRequest(error.message, "make it simpler", param=param) from error
        except UnsupportedModel as error:
            raise InvalidRequest(error.message, "leave it out", param=param) from error
        except ValueError as error:  # a lone surrogate, which only Python accepts as text
            raise InvalidRequest(f"the grammar is not plain text: {error}", param=param) from error
        if "error" in reply:
            raise InvalidRequest(
                f"the grammar cannot be enforced: {reply['error']}", "change or leave it out", param=param
            )
        return str(reply["grammar"])

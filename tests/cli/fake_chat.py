"""A chat over the fake engine, as a process: python -m tests.cli.fake_chat STEP_SECONDS CONTEXT MAX_TOKENS"""

from __future__ import annotations

import os
import sys

from kvasir.cli.chat import talk
from kvasir.cli.chat.conversation import ChatHistory
from kvasir.cli.chat.session import Settings
from kvasir.engine.async_llm import AsyncLLM
from kvasir.engine.fake import FakeEngine
from tests.cli.running import VOCABULARY


def main() -> None:
    step_seconds, context, max_tokens = float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    if "KVASIR_TEST_TTY" in os.environ:
        os.close(os.open(os.environ["KVASIR_TEST_TTY"], os.O_RDWR))  # becomes ours: Ctrl-C is for us
    engine = FakeEngine(vocab_size=VOCABULARY, max_model_len=context, step_seconds=step_seconds)
    llm = AsyncLLM("kvasir-mini", engine=engine)
    talk(llm, ChatHistory(), Settings(temperature=0.0, max_tokens=max_tokens))


if __name__ == "__main__":
    main()

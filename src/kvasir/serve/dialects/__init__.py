"""The protocols that clients speak. A dialect is built on the conversation and imports no other dialect."""

from kvasir.serve.dialects import anthropic, llamacpp, ollama, openai, sglang, tgi

# A request speaks the first that takes it; OpenAI's takes all.
DIALECTS = (anthropic.DIALECT, llamacpp.DIALECT, ollama.DIALECT, tgi.DIALECT, sglang.DIALECT, openai.DIALECT)

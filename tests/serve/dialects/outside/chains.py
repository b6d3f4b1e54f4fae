"""python chains.py URL MODEL: chats by litellm and langchain, whole and streamed. Prints the texts and the usage."""

from __future__ import annotations

import json
import sys

import litellm
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

ASK = [{"role": "user", "content": "What is 23 + 45?"}]
url, model = sys.argv[1:]
base = {"api_base": f"{url}/v1", "api_key": "none"}
asked = {"model": f"openai/{model}", "messages": ASK, "temperature": 0, "max_tokens": 30, **base}

whole = litellm.completion(**asked)
pieces = [chunk.choices[0].delta.content or "" for chunk in litellm.completion(**asked, stream=True)]
chat = ChatOpenAI(model=model, base_url=f"{url}/v1", api_key="none", temperature=0, max_tokens=30)
message = chat.invoke("What is 23 + 45?")
streamed = "".join(str(chunk.content) for chunk in chat.stream("What is 23 + 45?"))
vectors = OpenAIEmbeddings(model=model, base_url=f"{url}/v1", api_key="none").embed_documents(["a", "b"])
print(
    json.dumps(
        {
            "litellm": whole.choices[0].message.content,
            "litellm stream": "".join(pieces),
            "langchain": message.content,
            "langchain stream": streamed,
            "tokens": [whole.usage.completion_tokens, message.usage_metadata["output_tokens"]],
            "vectors": [len(vectors), len({len(vector) for vector in vectors})],
        }
    )
)

"""The engine as a Python object: several prompts at once, with seeds and log-probabilities.

python examples/offline.py [MODEL]
"""

import sys

from kvasir import LLM, SamplingParams

prompts = ["There once was a fox", "Hello! How are", "The capital of"]
params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=24, seed=1, logprobs=1)

with LLM(sys.argv[1] if len(sys.argv) > 1 else "kvasir-mini") as llm:
    print("\n".join(llm.summary), end="\n\n")
    for output in llm.generate(prompts, params):
        answer = output.outputs[0]
        print(f"{output.prompt}{answer.text}")
        print(f"    [{answer.finish_reason}, log-probability {answer.cumulative_logprob:.2f}]")

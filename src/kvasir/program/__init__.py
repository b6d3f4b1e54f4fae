"""The program executor: a model's readable forward, traced once into a flat list of native kernel calls.

trace      runs the model's forward on symbolic values -> Graph      kvasir.ops.graph
lower      Graph -> instructions: fused, with buffers and barriers
memory     the memory of the buffers
marshal    instructions -> the C structures (native) that csrc/program.cpp interprets; `experts` those of mixtures
program    one native call per step, over the runner's rows and the cache
"""

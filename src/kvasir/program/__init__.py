"""The program executor: a model's readable forward, traced once, as a flat list of native kernel calls.

trace      the model's forward on symbolic values -> Graph           kvasir.ops.graph
lower      Graph -> steps: fused, with buffers and barriers
layout     the memory that they lie in
marshal    steps -> the C structures (native) that csrc/program.cpp walks
program    one call a step, over the runner's rows and the cache
"""

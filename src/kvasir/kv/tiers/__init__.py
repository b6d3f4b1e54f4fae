"""Tiers, storage for blocks beyond the pool: host memory, a folder on disk; kv.peers has one that other engines
offer. They handle bytes and names, no tensors.

block       the name of a block (namespace, parent, ids) and the description of a store (Facts)
record      one part as bytes, the same in a file and in a message; compared with the request before it is served
connector   KVConnector: the protocol that the engine uses; it never waits for a disk or a peer
transfers   threads of a tier: loads by ticket, saves through a bounded queue
host        HostTier: host memory, for a pool in device memory
disk        DiskTier; write_budget limits its writes
later       LaterTier: a tier that opens once the weights are identified
joint       JointTier: several tiers as one
"""

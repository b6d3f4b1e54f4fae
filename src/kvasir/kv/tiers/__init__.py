"""Places for blocks beyond the pool: the host's memory, a folder on disk, another engine of this host. Bytes and names,
no tensors.

block       what a block is called: namespace, parent, ids; and what a store holds: Facts
record      one part as bytes, the same in a file and in a message; compared with what was asked before it is served
connector   KVConnector: the protocol that the engine sees, which never waits for a disk or a peer
transfers   its threads: loads by ticket, saves through a bounded queue
host        HostTier: memory of the host, where the pool is memory of a device
disk        DiskTier; write_budget bounds what it writes
peer        PeerTier (asks) and PeerServer (answers) over a Unix socket; wire has their frames
joint       JointTier: all of them as one
"""

"""Stored blocks of other engines: tiers (kv.tiers) that engines read from each other, over links of kv.transfer.

tier    PeerTier: the client, a KVConnector
server  PeerServer: offers the parts of a tier
wire    their frames
"""

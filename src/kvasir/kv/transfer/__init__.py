"""Transfers of computed blocks from the engine that computes a prompt to the one that continues it. They handle bytes
and names, no tensors. A transfer moves blocks once; tiers (kv.tiers) keep them.

block_socket  BlockSocket: frames over a stream socket; socket_file makes those that only this user can connect to
frames      the messages, with their bounds
security    who may connect: the same user on a socket file, TLS and a key over TCP
link        opening and greeting: two ends agree that they compute equal bits, before any block is sent
outbox      Outbox: parts that wait to be sent, and the thread of each receiver
assembly    Assembly: a part of which some pieces have arrived
inbox       Inbox: parts that have arrived and are verified, as a KVConnector that the scheduler fetches from
exchange    BlockExchange: both for one engine, with the socket on which others reach it
"""

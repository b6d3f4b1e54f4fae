"""The models of a server: the catalogue, leases, loading and memory."""

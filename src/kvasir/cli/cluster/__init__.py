"""`kvasir fleet CONFIG`: a server whose replicas are actors of a Ray cluster; see docs/fleet.md."""

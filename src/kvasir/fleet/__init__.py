"""Several engines behind the protocol of one: which of them computes a request, and what happens when one dies."""

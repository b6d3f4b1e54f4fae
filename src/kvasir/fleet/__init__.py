"""Several engines that look like one: which of them computes a request, and what happens when one dies."""

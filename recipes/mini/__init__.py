"""kvasir-mini: a tiny chat model, trained on data this recipe generates. Steps are in README.md."""

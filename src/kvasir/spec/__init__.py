"""Drafters: guesses at the ids that follow a sequence. A guess changes the speed of an answer, never its tokens."""

"""One small program per engine, run by that engine's interpreter, that executes commands from stdin. A worker may
import only the standard library, numpy and its engine."""

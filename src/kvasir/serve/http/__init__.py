"""HTTP: middlewares, faults, streams, bodies and connections. It knows no dialect and no model."""

"""HTTP below the endpoints: connections, bodies, errors, the context of a request."""

"""HTTP below the endpoints: connections, bodies, errors, request contexts."""

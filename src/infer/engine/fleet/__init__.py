"""Several engines behind one `EngineClient`; what they had not finished outlives any of them."""

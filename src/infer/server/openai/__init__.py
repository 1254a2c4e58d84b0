"""OpenAI's formats: schemas, requests for the engine, answers, streams. No engine state."""

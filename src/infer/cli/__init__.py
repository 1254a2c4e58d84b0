"""The terminal: `infer serve`, `infer generate`, `infer chat`."""

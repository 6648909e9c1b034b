"""Lossless speculative decoding: drafts come from anywhere, tokens only from the target."""

"""Drafting on another device: what crosses the wire, the drafter's engine, both of its ends."""

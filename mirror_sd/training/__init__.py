"""Distillation of drafts from a target's own answers."""

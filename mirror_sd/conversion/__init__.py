"""`mirror-sd convert`: a model in another number format, and what that costs."""

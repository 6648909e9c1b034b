"""The XLA back end (JAX): TPU where there is one, else XLA's own CPU compiler."""

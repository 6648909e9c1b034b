"""KV memory as integers: which block belongs to whom. No tensors here."""
